#include "launch/callers.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include <gtest/gtest.h>

#include "launch/socket.h"

namespace tessera::launch {
namespace {

constexpr int kLimitMs = 10'000;

FileDescriptor caller_of(const std::string& host, uint16_t port) {
  const SocketAddress address = resolve({host, port});
  FileDescriptor caller(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(
      connect(caller.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length),
      0);
  return caller;
}

bool has_callers(const Listener& listener, int limit_ms = kLimitMs) {
  pollfd file{.fd = listener.fd.get(), .events = POLLIN, .revents = 0};
  return poll(&file, 1, limit_ms) == 1;
}

// Closes a connection so that nothing of it stays.
void leave(FileDescriptor caller) {
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  setsockopt(caller.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
}

TEST(Callers, AreKnownByTheirUserBeforeTheyAreTaken) {
  const Listener listener = listen_on(resolve({"127.0.0.1", 0}));
  const auto nobody = callers_at(listener.fd.get());
  ASSERT_TRUE(nobody);
  EXPECT_EQ(nobody->length, 0);
  EXPECT_TRUE(nobody->callers.empty());
  const FileDescriptor first = caller_of("127.0.0.1", listener.address.port());
  const FileDescriptor second = caller_of("127.0.0.1", listener.address.port());
  ASSERT_TRUE(has_callers(listener));
  const auto queue = callers_at(listener.fd.get());
  ASSERT_TRUE(queue);
  EXPECT_EQ(queue->length, 2);
  ASSERT_EQ(queue->callers.size(), 2);
  for (const Caller& caller : queue->callers) {
    EXPECT_EQ(caller.host, "127.0.0.1");
    EXPECT_EQ(caller.user, geteuid());
    EXPECT_EQ(caller.text(), "127.0.0.1 (user " + std::to_string(geteuid()) + ")");
  }
  EXPECT_TRUE(has_callers(listener, 0));  // they still wait
  turn_away(listener.fd.get(), 1);
  EXPECT_EQ(callers_at(listener.fd.get())->callers.size(), 1);
  turn_away(listener.fd.get(), 100);
  EXPECT_FALSE(has_callers(listener, 0));
  char byte = 0;
  EXPECT_EQ(recv(first.get(), &byte, 1, 0), -1);
  EXPECT_EQ(errno, ECONNRESET);
}

TEST(Callers, WhoHasLeftIsNobodyButHoldsHisPlace) {
  const Listener listener = listen_on(resolve({"127.0.0.1", 0}));
  caller_of("127.0.0.1", listener.address.port()).reset();
  ASSERT_TRUE(has_callers(listener));
  leave(caller_of("127.0.0.1", listener.address.port()));
  const auto queue = callers_at(listener.fd.get());
  ASSERT_TRUE(queue);
  EXPECT_EQ(queue->length, 2);
  EXPECT_TRUE(queue->callers.empty());
  turn_away(listener.fd.get(), queue->length);
  EXPECT_FALSE(has_callers(listener, 0));
}

TEST(Callers, AreTheSameInEitherFormOfAnAddress) {
  const Listener plain = listen_on(resolve({"127.0.0.1", 0}));
  const FileDescriptor mapped_caller = caller_of("::ffff:127.0.0.1", plain.address.port());
  ASSERT_TRUE(has_callers(plain));
  const Listener mapped = listen_on(resolve({"::ffff:127.0.0.1", 0}));
  const FileDescriptor plain_caller = caller_of("127.0.0.1", mapped.address.port());
  ASSERT_TRUE(has_callers(mapped));
  for (const Listener* listener : {&plain, &mapped}) {
    const auto queue = callers_at(listener->fd.get());
    ASSERT_TRUE(queue);
    ASSERT_EQ(queue->callers.size(), 1);
    EXPECT_EQ(queue->callers[0].host, "127.0.0.1");
    EXPECT_EQ(queue->callers[0].user, geteuid());
  }
}

TEST(Callers, OfIPv6) {
  FileDescriptor probe(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const SocketAddress own = resolve({"::1", 0});
  if (bind(probe.get(), reinterpret_cast<const sockaddr*>(&own.storage), own.length) != 0) {
    GTEST_SKIP() << "this machine has no IPv6";
  }
  const Listener listener = listen_on(own);
  const FileDescriptor caller = caller_of("::1", listener.address.port());
  ASSERT_TRUE(has_callers(listener));
  const auto queue = callers_at(listener.fd.get());
  ASSERT_TRUE(queue);
  ASSERT_EQ(queue->callers.size(), 1);
  EXPECT_EQ(queue->callers[0].host, "::1");
  EXPECT_EQ(queue->callers[0].user, geteuid());
}

TEST(Callers, OfOtherPortsAreOthers) {
  const Listener listener = listen_on(resolve({"127.0.0.1", 0}));
  const Listener other = listen_on(resolve({"127.0.0.1", 0}));
  const FileDescriptor caller = caller_of("127.0.0.1", other.address.port());
  ASSERT_TRUE(has_callers(other));
  EXPECT_TRUE(callers_at(listener.fd.get())->callers.empty());
  // Who was taken waits no more.
  const FileDescriptor taken(accept(other.fd.get(), nullptr, nullptr));
  EXPECT_TRUE(callers_at(other.fd.get())->callers.empty());
}

TEST(Callers, NoneAreKnownOfWhatDoesNotListen) {
  const FileDescriptor socket_alone(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_FALSE(callers_at(socket_alone.get()));
  EXPECT_FALSE(callers_at(-1));
}

TEST(Hosts, AreSaidInOneForm) {
  EXPECT_EQ(plain_host("10.0.0.1"), "10.0.0.1");
  EXPECT_EQ(plain_host("::ffff:10.0.0.1"), "10.0.0.1");
  EXPECT_EQ(plain_host("::ffff:1:2"), "::ffff:1:2");
  EXPECT_EQ(plain_host("fd00::1"), "fd00::1");
  for (const std::string& host : own_hosts()) {
    EXPECT_FALSE(resolve({host, 0}).is_loopback()) << host;
  }
}

}  // namespace
}  // namespace tessera::launch

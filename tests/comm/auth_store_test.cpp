#include "comm/store/auth_store.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <optional>
#include <random>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/store/hosted_server.h"
#include "support/refused_threads.h"
#include "tessera/comm/error.h"

namespace tessera::comm::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Bytes = std::vector<std::uint8_t>;

Bytes bytes(const std::string& text) { return {text.begin(), text.end()}; }

// A server on a Unix socket or on loopback, in this process.
class StoreTest : public ::testing::TestWithParam<bool> {
 protected:
  StoreTest() {
    std::string name = ::testing::TempDir() + "storeXXXXXX";
    folder_ = mkdtemp(name.data());
    if (GetParam()) {
      place_.path = folder_ + "/store";
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      place_.path.copy(address.sun_path, sizeof(address.sun_path) - 1);
      listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
      EXPECT_EQ(::listen(listener_, 100), 0);
    } else {
      Socket socket = listen_on_free_port("127.0.0.1");
      place_.host = "127.0.0.1";
      place_.port = port_of(socket);
      listener_ = ::dup(socket.get());
    }
    server_ = std::make_shared<HostedServer>(listener_, secret_);
  }
  ~StoreTest() override {
    server_.reset();
    std::filesystem::remove_all(folder_);
  }
  c10::intrusive_ptr<AuthStore> client(milliseconds timeout = seconds(20)) {
    return c10::make_intrusive<AuthStore>(place_, secret_, timeout);
  }

  std::string folder_;
  Place place_;
  int listener_ = -1;
  const core::Secret secret_ = core::Secret::random();
  std::shared_ptr<HostedServer> server_;
};

INSTANTIATE_TEST_SUITE_P(Place, StoreTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Unix" : "Tcp"; });

// What any store answers to one random request, as text.
std::string answer_of(c10d::Store& store, int seed) {
  std::mt19937 dice(seed);
  const auto key = [&] { return std::string(1, static_cast<char>('a' + dice() % 4)); };
  const auto value = [&] { return dice() % 3 == 0 ? "" : std::to_string(dice() % 3); };
  std::string answer;
  try {
    switch (dice() % 9) {
      case 0:
        store.set(key(), bytes(value()));
        break;
      case 1: {
        // compareSet of a key that is there, or with an empty expectation: LibTorch's stores differ
        // among each other on the rest.
        const std::string name = key();
        const std::string expected = store.check({name}) ? value() : "";
        answer = store.compareSet(name, expected, value());
        break;
      }
      case 2:
        answer = std::to_string(store.add("n" + key(), static_cast<int>(dice() % 100) - 50));
        break;
      case 3:
        answer = store.deleteKey(key()) ? "deleted" : "not there";
        break;
      case 4:
        answer = store.check({key(), key()}) ? "there" : "not there";
        break;
      case 5: {
        const std::string name = key();
        if (store.check({name})) answer = store.get_to_str(name);
        break;
      }
      case 6:
        store.append(key(), bytes(value()));
        break;
      case 7: {
        store.multiSet({key(), key()}, {bytes(value()), bytes(value())});
        break;
      }
      case 8:
        store.queuePush("q" + key(), bytes(value()));
        answer = std::to_string(store.queueLen("qa"));
        if (store.queueLen("qa") > 0) {
          const Bytes popped = store.queuePop("qa", true);
          answer += std::string(popped.begin(), popped.end());
        }
        break;
    }
  } catch (const c10::DistQueueEmptyError&) {
    answer = "empty";
  }
  return answer;
}

TEST_P(StoreTest, AnswersAsLibTorchsStore) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  const auto torchs = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto own = client();
  for (int seed = 0; seed < 2000; ++seed) {
    ASSERT_EQ(answer_of(*own, seed), answer_of(*torchs, seed)) << "request " << seed;
  }
}

TEST_P(StoreTest, WaitsForWhatComesLater) {
  const auto first = client();
  const auto second = first->clone();
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(50));
    second->set("a", bytes("one"));
    second->set("b", bytes("two"));
    second->queuePush("q", bytes("three"));
  });
  first->wait({"a", "b"});
  EXPECT_EQ(first->get("a"), bytes("one"));
  EXPECT_EQ(first->multiGet({"b", "a"}), (std::vector<Bytes>{bytes("two"), bytes("one")}));
  EXPECT_EQ(first->queuePop("q", true), bytes("three"));
  late.join();
}

TEST_P(StoreTest, AWaitEndsAtItsLimitAndTheStoreGoesOn) {
  const auto store = client();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(store->wait({"never"}, milliseconds(100)), c10::DistStoreError);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(100));
  store->set("key", bytes("value"));
  EXPECT_EQ(store->get("key"), bytes("value"));
  EXPECT_THROW(store->queuePop("queue", false), c10::DistQueueEmptyError);
  store->setTimeout(milliseconds(50));
  EXPECT_THROW(store->get("never"), c10::DistStoreError);
  EXPECT_EQ(store->get("key"), bytes("value"));
}

TEST_P(StoreTest, LargeValuesPass) {
  const auto store = client();
  Bytes large(5 << 20);
  for (std::size_t i = 0; i < large.size(); ++i)
    large[i] = static_cast<std::uint8_t>(i * 2654435761U >> 24);
  store->set("large", large);
  EXPECT_EQ(client()->get("large"), large);
}

TEST_P(StoreTest, ManyClientsCountToTheirNumber) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const auto store = client();
      for (int k = 0; k < 100; ++k) store->add("count", 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(client()->add("count", 0), 800);
}

TEST_P(StoreTest, AnotherSecretIsRefusedAtOnce) {
  EXPECT_THROW(AuthStore(place_, core::Secret::random(), seconds(20)), SecretRefused);
  client()->set("still", bytes("served"));
}

TEST_P(StoreTest, RequestsThatMakeNoSenseAreRefusedAndChangeNothing) {
  const auto store = client();
  store->set("word", bytes("text"));
  EXPECT_THROW(store->add("word", 1), c10::DistStoreError);
  EXPECT_EQ(store->get("word"), bytes("text"));
}

TEST_P(StoreTest, AServerThatIsGoneIsAnErrorNotAWait) {
  const auto store = client();
  store->set("key", bytes("value"));
  server_.reset();
  EXPECT_THROW(store->get("key"), c10::DistNetworkError);
  EXPECT_THROW(store->get("key"), c10::DistNetworkError);
  EXPECT_THROW(AuthStore(place_, secret_, milliseconds(200)), Error);
}

// The exit code of a child that runs `body`, which forgets what its parent's threads did.
template <typename Body>
int in_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_P(StoreTest, AForkedChildDoesNotSpeakOnItsParentsConnection) {
  auto store = client();
  store->set("key", bytes("value"));
  const std::string parent = std::to_string(getpid());
  EXPECT_EQ(in_child([&] {
              try {
                store->set("key", bytes("the child's"));
                return 1;
              } catch (const c10::ValueError& error) {
                const std::string text = error.what_without_backtrace();
                if (text.find("belongs to process " + parent + "; this is process " +
                              std::to_string(getpid())) == std::string::npos) {
                  return 2;
                }
              }
              if (store->clone()->get("key") != bytes("value")) return 3;
              store.reset();
              server_.reset();
              return 0;
            }),
            0);
  EXPECT_EQ(store->get("key"), bytes("value"));
  EXPECT_EQ(client()->get("key"), bytes("value"));
}

TEST_P(StoreTest, AServerEndsThoughAForkedChildLives) {
  const auto store = client();
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  server_.reset();
  EXPECT_THROW(store->get("key"), c10::DistNetworkError);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// Without the secret: whatever is sent, nothing is answered but a greeting and zeros.
TEST_P(StoreTest, StrangersLearnNothingAndChangeNothing) {
  const auto store = client();
  store->set("key", bytes("value"));
  const auto connect = [&] {
    if (!GetParam())
      return connect_to("127.0.0.1", place_.port, std::chrono::steady_clock::now() + seconds(10));
    Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    place_.path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ::fcntl(socket.get(), F_SETFL, O_NONBLOCK);
    return socket;
  };
  std::mt19937 dice(1);
  for (int round = 0; round < 300; ++round) {
    const Socket stranger = connect();
    std::string text(dice() % 200, '\0');
    for (char& c : text) c = static_cast<char>(dice());
    if (dice() % 2 == 0) text = std::string("tessera\x01", 8) + text;
    if (dice() % 4 == 0)
      text = encode({static_cast<std::uint8_t>(Operation::kSet), {"key", "other"}});
    (void)::send(stranger.get(), text.data(), text.size(), MSG_NOSIGNAL);
    ::shutdown(stranger.get(), SHUT_WR);
    std::string answer;
    char buffer[4096];
    while (true) {
      pollfd request{.fd = stranger.get(), .events = POLLIN, .revents = 0};
      ASSERT_EQ(::poll(&request, 1, 10000), 1);
      const ssize_t size = ::recv(stranger.get(), buffer, sizeof(buffer), 0);
      if (size <= 0) break;
      answer.append(buffer, static_cast<std::size_t>(size));
    }
    if (answer.size() > 40) {
      EXPECT_EQ(answer.substr(40), std::string(32, '\0'));
    }
  }
  EXPECT_EQ(store->get("key"), bytes("value"));
  EXPECT_EQ(store->getNumKeys(), 1);
}

TEST_P(StoreTest, SlowStrangersDoNotKeepOthersOut) {
  std::vector<Socket> strangers;
  if (GetParam()) GTEST_SKIP() << "only this user reaches a Unix socket";
  for (int i = 0; i < 400; ++i) {
    strangers.push_back(
        connect_to("127.0.0.1", place_.port, std::chrono::steady_clock::now() + seconds(10)));
  }
  client(seconds(4))->set("key", bytes("value"));  // less than a stranger's own limit
}

double processor_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds_of = [](const timeval& t) { return t.tv_sec + 1e-6 * t.tv_usec; };
  return seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
}

// While it lives, this process may open one file more.
class OneFileLeft {
 public:
  OneFileLeft() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const int free = ::dup(STDERR_FILENO);
    ::close(free);
    const rlimit few{static_cast<rlim_t>(free) + 1, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  ~OneFileLeft() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST_P(StoreTest, WithoutDescriptorsItWaitsForOneAndDoesNotSpin) {
  const auto known = client();
  std::optional<OneFileLeft> scarcity(std::in_place);
  // Takes the last one, so that the server has none to take it in with.
  std::thread late([&] { client()->set("late", bytes("came")); });
  std::this_thread::sleep_for(milliseconds(200));
  const double before = processor_seconds();
  std::this_thread::sleep_for(milliseconds(600));
  EXPECT_LT(processor_seconds() - before, 0.2);
  EXPECT_FALSE(known->check({"late"}));  // those who are in are served
  scarcity.reset();
  late.join();
  EXPECT_EQ(known->get("late"), bytes("came"));
}

int num_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(all, {}));
}

TEST(HostedServer, WithoutAThreadNothingOfItIsLeft) {
  const int before = num_descriptors();
  {
    const tessera::testing::RefusedThread refused(1);
    const int listener = ::dup(listen_on_free_port("127.0.0.1").get());
    try {
      const HostedServer server(listener, core::Secret::random());
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
    }
  }
  EXPECT_EQ(num_descriptors(), before);
  sigset_t blocked;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  EXPECT_EQ(::sigismember(&blocked, SIGINT), 0);
}

TEST(Place, IsReadFromText) {
  EXPECT_EQ(Place::parse("unix:/a/b").path, "/a/b");
  EXPECT_EQ(Place::parse("tcp:10.0.0.1:77").host, "10.0.0.1");
  EXPECT_EQ(Place::parse("tcp:fe80::1:77").host, "fe80::1");
  EXPECT_EQ(Place::parse("tcp:10.0.0.1:77").port, 77);
  for (const char* wrong : {"", "unix:", "unix:relative", "tcp:", "tcp:host", "tcp:host:0", "x"}) {
    EXPECT_THROW(Place::parse(wrong), c10::ValueError) << wrong;
  }
}

}  // namespace
}  // namespace tessera::comm::store

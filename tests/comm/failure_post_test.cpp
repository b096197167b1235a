#include "comm/failure_post.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <sstream>

#include <gtest/gtest.h>

namespace tessera::comm {
namespace {

constexpr const char* kHere = "127.0.0.1";

// Somebody outside the group who knows all that stands in the store.
class Stranger {
 public:
  Stranger() : socket_(::socket(AF_INET, SOCK_DGRAM, 0)) {}
  ~Stranger() { ::close(socket_); }

  void write(const std::string& address, const std::string& letter) const {
    std::istringstream words(address);
    std::string host;
    std::uint16_t port = 0;
    words >> host >> port;
    sockaddr_in place{};
    place.sin_family = AF_INET;
    place.sin_port = htons(port);
    ::inet_pton(AF_INET, host.c_str(), &place.sin_addr);
    ASSERT_EQ(::sendto(socket_, letter.data(), letter.size(), 0,
                       reinterpret_cast<const sockaddr*>(&place), sizeof(place)),
              static_cast<ssize_t>(letter.size()));
  }

 private:
  int socket_;
};

std::string token_of(const std::string& address) { return address.substr(address.rfind(' ') + 1); }

TEST(FailurePost, CarriesLettersInTheOrderTheyWereSent) {
  const auto secret = core::Secret::random();
  FailurePost a(kHere, secret);
  FailurePost b(kHere, secret);
  FailurePost c(kHere, secret);
  a.send("first", {b.address(), c.address()});
  a.send("second", {b.address()});
  c.send("third", {b.address()});
  EXPECT_EQ(b.receive(), "first");
  EXPECT_EQ(b.receive(), "second");
  EXPECT_EQ(b.receive(), "third");
  EXPECT_EQ(b.receive(), std::nullopt);
  EXPECT_EQ(c.receive(), "first");
}

TEST(FailurePost, TheTokenAloneIsNotBelieved) {
  FailurePost post(kHere, core::Secret::random());
  const Stranger stranger;
  stranger.write(post.address(), token_of(post.address()) + "\n0 1 1\nforged");
  stranger.write(post.address(), "");
  stranger.write(post.address(), std::string(50, 'x'));
  FailurePost other(kHere, core::Secret::random());  // of a job with another secret
  other.send("forged", {post.address()});
  EXPECT_EQ(post.receive(), std::nullopt);
}

// A letter as somebody on the way sees it: signed as the header says, with the job's own secret.
std::string overheard(const core::Secret& secret, const std::string& address, int number) {
  const std::string content = "sender " + std::to_string(number) + "\ncause";
  const core::Digest seal = secret.derive("post " + address).sign(content);
  return std::string(core::bytes_of(seal)) + content;
}

TEST(FailurePost, ARepeatedOrOlderLetterIsDropped) {
  const auto secret = core::Secret::random();
  FailurePost post(kHere, secret);
  const Stranger stranger;
  const std::string letter = overheard(secret, post.address(), 5);
  stranger.write(post.address(), letter);
  EXPECT_EQ(post.receive(), "cause");
  stranger.write(post.address(), letter);
  stranger.write(post.address(), overheard(secret, post.address(), 4));
  EXPECT_EQ(post.receive(), std::nullopt);
  stranger.write(post.address(), overheard(secret, post.address(), 6));
  EXPECT_EQ(post.receive(), "cause");
}

TEST(FailurePost, ALetterForAnotherRankIsDropped) {
  const auto secret = core::Secret::random();
  FailurePost post(kHere, secret);
  FailurePost neighbour(kHere, secret);
  const Stranger stranger;
  stranger.write(post.address(), overheard(secret, neighbour.address(), 1));
  EXPECT_EQ(post.receive(), std::nullopt);
}

TEST(FailurePost, AChangedLetterIsDropped) {
  const auto secret = core::Secret::random();
  FailurePost post(kHere, secret);
  const Stranger stranger;
  const std::string letter = overheard(secret, post.address(), 1);
  for (std::size_t i = 0; i < letter.size(); ++i) {
    std::string wrong = letter;
    wrong[i] = static_cast<char>(wrong[i] ^ 1);
    stranger.write(post.address(), wrong);
    EXPECT_EQ(post.receive(), std::nullopt) << i;
  }
}

TEST(FailurePost, AFloodOfStrangersDoesNotHoldTheReaderUp) {
  const auto secret = core::Secret::random();
  FailurePost post(kHere, secret);
  FailurePost sender(kHere, secret);
  const Stranger stranger;
  for (int i = 0; i < 150; ++i) stranger.write(post.address(), "x");
  sender.send("cause", {post.address()});
  std::optional<std::string> letter;
  for (int i = 0; i < 4 && !letter; ++i) letter = post.receive();
  EXPECT_EQ(letter, "cause");
}

TEST(FailurePost, WithoutASecretTheTokenIsAsked) {
  FailurePost post(kHere, std::nullopt);
  FailurePost sender(kHere, std::nullopt);
  const Stranger stranger;
  stranger.write(post.address(), "guess\nforged");
  sender.send("cause", {post.address()});
  EXPECT_EQ(post.receive(), "cause");
}

}  // namespace
}  // namespace tessera::comm

#include "core/secret.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "core/handshake.h"

namespace tessera::core {
namespace {

using Side = Handshake::Side;
using State = Handshake::State;

std::string hex(const Digest& digest) { return hex_of(bytes_of(digest)); }

// FIPS 180-4 examples.
TEST(Sha256, PublishedValues) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// RFC 4231, section 4.
TEST(Hmac, PublishedValues) {
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counted;
  for (char c = 1; c <= 25; ++c) counted += c;
  EXPECT_EQ(hex(hmac_sha256(counted, std::string(50, '\xcd'))),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "This is a test using a larger than block-size key and a larger than "
                            "block-size data. The key needs to be hashed before being used by the "
                            "HMAC algorithm.")),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(Hmac, ComparesAllBytes) {
  EXPECT_TRUE(same_bytes("", ""));
  EXPECT_TRUE(same_bytes("abc", "abc"));
  EXPECT_FALSE(same_bytes("abc", "abd"));
  EXPECT_FALSE(same_bytes("xbc", "abc"));
  EXPECT_FALSE(same_bytes("abc", "abcd"));
}

class SecretFile : public testing::Test {
 protected:
  SecretFile() {
    std::string name = testing::TempDir() + "secretXXXXXX";
    folder_ = mkdtemp(name.data());
  }
  ~SecretFile() override {
    unsetenv(kSecretFileVariable);
    unsetenv(kSecretVariable);
    std::filesystem::remove_all(folder_);
  }
  std::string write(const std::string& text, mode_t mode) {
    const std::string path = folder_ + "/secret";
    std::ofstream(path) << text;
    chmod(path.c_str(), mode);
    return path;
  }
  static std::string error_of(const std::string& path) {
    try {
      Secret::from_file(path);
    } catch (const SecretError& error) {
      return error.what();
    }
    return "none";
  }
  std::string folder_;
};

const std::string kText(43, 'k');

TEST_F(SecretFile, IsReadWhenItIsPrivate) {
  const Secret secret = Secret::from_file(write(kText + "\n", 0600));
  EXPECT_EQ(secret.text(), Secret::from_text("  " + kText, "here").text());
  EXPECT_EQ(secret.text(), Secret::from_text(secret.text(), "here").text());
  EXPECT_NE(secret.text(), secret.derive("a").text());
  EXPECT_NE(secret.derive("a").text(), secret.derive("b").text());
}

TEST_F(SecretFile, IsRefusedWhenOthersCanReachIt) {
  for (const mode_t mode : {0604, 0640, 0602, 0644, 0660}) {
    EXPECT_NE(error_of(write(kText, mode)).find("by other users"), std::string::npos) << mode;
  }
  EXPECT_NE(error_of(folder_).find("not a plain file"), std::string::npos);
  EXPECT_NE(error_of(folder_ + "/none").find("No such file"), std::string::npos);
  const std::string path = write(kText, 0600);
  if (geteuid() == 0 && chown(path.c_str(), 12345, 0) == 0) {
    // root's own eyes: the file belongs to somebody who could change it.
    EXPECT_NE(error_of(path).find("belongs to user 12345"), std::string::npos);
  }
}

TEST_F(SecretFile, IsRefusedWhenItIsShortAndTheTextIsNotRepeated) {
  const std::string error = error_of(write("hunter2", 0600));
  EXPECT_NE(error.find("holds 7 bytes"), std::string::npos) << error;
  EXPECT_EQ(error.find("hunter2"), std::string::npos);
  EXPECT_NE(error_of(write(std::string(5000, 'x'), 0600)).find("a secret has 32 to 4096"),
            std::string::npos);
}

TEST_F(SecretFile, TheEnvironmentNamesItOrHoldsIt) {
  EXPECT_FALSE(Secret::from_environment().has_value());
  setenv(kSecretVariable, kText.c_str(), 1);
  EXPECT_EQ(Secret::from_environment()->text(), Secret::from_text(kText, "").text());
  const std::string other(32, 'o');
  setenv(kSecretFileVariable, write(other, 0600).c_str(), 1);
  EXPECT_EQ(Secret::from_environment()->text(), Secret::from_text(other, "").text());
}

// Lets both talk until neither has anything to say; `limit` bytes arrive at a time.
void converse(Handshake& listener, Handshake& caller, std::size_t limit) {
  std::string to_caller = listener.opening();
  std::string to_listener = caller.opening();
  std::string at_caller;
  std::string at_listener;
  while (!to_caller.empty() || !to_listener.empty()) {
    at_caller += to_caller.substr(0, limit);
    to_caller.erase(0, limit);
    caller.advance(at_caller, to_listener);
    at_listener += to_listener.substr(0, limit);
    to_listener.erase(0, limit);
    listener.advance(at_listener, to_caller);
  }
}

TEST(Handshake, BothProveTheSecretHoweverTheBytesArrive) {
  const Secret secret = Secret::random();
  for (const std::size_t limit : {1, 7, 1000}) {
    Handshake listener(Side::kListens, secret, "test");
    Handshake caller(Side::kConnects, secret, "test");
    converse(listener, caller, limit);
    EXPECT_EQ(listener.state(), State::kProven);
    EXPECT_EQ(caller.state(), State::kProven);
    std::string wire = caller.writer().frame("hello");
    EXPECT_EQ(listener.reader().next(wire, 100), "hello");
    wire = listener.writer().frame("welcome");
    EXPECT_EQ(caller.reader().next(wire, 100), "welcome");
  }
}

TEST(Handshake, AnotherSecretOrPurposeIsRefused) {
  const Secret secret = Secret::random();
  for (const auto& [other, purpose] :
       {std::pair(Secret::random(), "test"), std::pair(secret, "store"),
        std::pair(Secret::known_to_all(), "test")}) {
    Handshake listener(Side::kListens, secret, "test");
    Handshake caller(Side::kConnects, other, purpose);
    converse(listener, caller, 1000);
    EXPECT_EQ(listener.state(), State::kStranger);
    EXPECT_EQ(caller.state(), State::kRefused);
  }
}

TEST(Handshake, AListenerThatDoesNotKnowTheSecretIsFoundOut) {
  const Secret secret = Secret::random();
  Handshake caller(Side::kConnects, secret, "test");
  std::string greeting = Handshake(Side::kListens, Secret::random(), "test").opening();
  std::string sent;
  EXPECT_EQ(caller.advance(greeting, sent), State::kOpen);
  // Its own proof sent back, or anything else, is not the listener's.
  std::string answer = sent.substr(sent.size() - 32);
  EXPECT_EQ(caller.advance(answer, sent), State::kStranger);
}

TEST(Handshake, AProofServesOnce) {
  const Secret secret = Secret::random();
  Handshake first(Side::kListens, secret, "test");
  Handshake caller(Side::kConnects, secret, "test");
  std::string greeting = first.opening();
  std::string sent;
  caller.advance(greeting, sent);
  const std::string overheard = sent;
  std::string reply;
  EXPECT_EQ(first.advance(sent, reply), State::kProven);
  Handshake second(Side::kListens, secret, "test");
  std::string again = overheard;
  std::string answer;
  EXPECT_EQ(second.advance(again, answer), State::kStranger);
  EXPECT_EQ(answer, std::string(32, '\0'));  // tells nothing
}

TEST(Handshake, WrongFirstBytesAreEnough) {
  Handshake listener(Side::kListens, Secret::random(), "test");
  std::string received = "GET /";
  std::string sent;
  EXPECT_EQ(listener.advance(received, sent), State::kStranger);
  EXPECT_EQ(sent, "");
}

class Frames : public testing::Test {
 protected:
  const Secret key_ = Secret::random();
  FrameWriter writer_{key_};
  FrameReader reader_{key_};
};

TEST_F(Frames, ArriveInOrderInAnyPieces) {
  std::string wire = writer_.frame("one");
  wire += writer_.frame("");
  wire += writer_.frame("three");
  std::string received;
  std::vector<std::string> read;
  for (const char byte : wire) {
    received += byte;
    while (auto text = reader_.next(received, 5)) read.push_back(*text);
  }
  EXPECT_EQ(read, (std::vector<std::string>{"one", "", "three"}));
  EXPECT_EQ(received, "");
}

TEST_F(Frames, ChangedRepeatedSkippedAndLongOnesAreErrors) {
  const std::string first = writer_.frame("first");
  const std::string second = writer_.frame("second");
  for (std::size_t i = 0; i < first.size(); ++i) {
    std::string wrong = first;
    wrong[i] = static_cast<char>(wrong[i] ^ 1);
    wrong += std::string(300, 'x');  // a longer length is waited for otherwise
    EXPECT_THROW(FrameReader(key_).next(wrong, 200), FrameError) << i;
  }
  std::string skipped = second;
  EXPECT_THROW(FrameReader(key_).next(skipped, 100), FrameError);
  std::string repeated = first + first;
  EXPECT_EQ(reader_.next(repeated, 100), "first");
  EXPECT_THROW(reader_.next(repeated, 100), FrameError);
  std::string head = second.substr(0, 20);
  EXPECT_THROW(FrameReader(key_).next(head, 5), FrameError);  // before the rest is read
}

}  // namespace
}  // namespace tessera::core

#include "core/handshake.h"

#include <algorithm>
#include <utility>

namespace tessera::core {
namespace {

constexpr std::string_view kMagic("tessera\x01", 8);
constexpr std::size_t kNumber = 32;
constexpr std::size_t kProof = 32;
constexpr std::size_t kSeal = 16;  // of each frame
constexpr std::size_t kHead = 4 + kSeal;

void append_number(std::string& text, std::uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
}

Digest seal_of(const Secret& key, std::uint64_t count, std::string_view payload) {
  std::string signed_text;
  signed_text.reserve(8 + payload.size());
  append_number(signed_text, count, 8);
  signed_text += payload;
  return key.sign(signed_text);
}

}  // namespace

std::string FrameWriter::frame(std::string_view payload) {
  std::string text;
  text.reserve(kHead + payload.size());
  append_number(text, payload.size(), 4);
  text += bytes_of(seal_of(key_, count_++, payload)).substr(0, kSeal);
  return text += payload;
}

std::optional<std::string> FrameReader::next(std::string& received, std::size_t longest) {
  if (received.size() < kHead) return std::nullopt;
  std::size_t size = 0;
  for (int i = 0; i < 4; ++i) {
    size |= static_cast<std::size_t>(static_cast<unsigned char>(received[i])) << (8 * i);
  }
  if (size > longest) throw FrameError("its message is too long");
  if (received.size() < kHead + size) return std::nullopt;
  std::string payload = received.substr(kHead, size);
  const Digest seal = seal_of(key_, count_++, payload);
  if (!same_bytes(bytes_of(seal).substr(0, kSeal), std::string_view(received).substr(4, kSeal))) {
    throw FrameError("what arrived on its connection is not from it");
  }
  received.erase(0, kHead + size);
  return payload;
}

Handshake::Handshake(Side side, const Secret& secret, std::string purpose)
    : side_(side), secret_(secret), purpose_(std::move(purpose)) {
  (side_ == Side::kListens ? listener_number_ : caller_number_) = random_bytes(kNumber);
}

std::string Handshake::opening() const {
  return side_ == Side::kListens ? std::string(kMagic) + listener_number_ : "";
}

Digest Handshake::proof(std::string_view who) const {
  std::string text(who);
  return secret_.sign(text + " of " + purpose_ + ": " + listener_number_ + caller_number_);
}

Handshake::State Handshake::advance(std::string& received, std::string& to_send) {
  if (state_ != State::kOpen) return state_;
  // Wrong first bytes are enough to know.
  const bool expects_magic = side_ == Side::kListens || !has_answered_;
  const std::size_t seen = std::min(received.size(), kMagic.size());
  if (expects_magic && received.compare(0, seen, kMagic.substr(0, seen)) != 0) {
    return state_ = State::kStranger;
  }
  if (side_ == Side::kListens) {
    if (received.size() < kMagic.size() + kNumber + kProof) return state_;
    caller_number_ = received.substr(kMagic.size(), kNumber);
    const std::string theirs = received.substr(kMagic.size() + kNumber, kProof);
    received.erase(0, kMagic.size() + kNumber + kProof);
    if (!same_bytes(theirs, bytes_of(proof("caller")))) {
      to_send.append(kProof, '\0');
      return state_ = State::kStranger;
    }
    to_send += bytes_of(proof("listener"));
    return state_ = State::kProven;
  }
  if (!has_answered_) {
    if (received.size() < kMagic.size() + kNumber) return state_;
    listener_number_ = received.substr(kMagic.size(), kNumber);
    received.erase(0, kMagic.size() + kNumber);
    to_send += kMagic;
    to_send += caller_number_;
    to_send += bytes_of(proof("caller"));
    has_answered_ = true;
  }
  if (received.size() < kProof) return state_;
  const std::string theirs = received.substr(0, kProof);
  received.erase(0, kProof);
  if (same_bytes(theirs, bytes_of(proof("listener")))) return state_ = State::kProven;
  return state_ = theirs == std::string(kProof, '\0') ? State::kRefused : State::kStranger;
}

FrameWriter Handshake::writer() const {
  return FrameWriter(secret_.derive(
      std::string(side_ == Side::kListens ? "frames of the listener, " : "frames of the caller, ") +
      purpose_ + ": " + listener_number_ + caller_number_));
}

FrameReader Handshake::reader() const {
  return FrameReader(secret_.derive(
      std::string(side_ == Side::kListens ? "frames of the caller, " : "frames of the listener, ") +
      purpose_ + ": " + listener_number_ + caller_number_));
}

}  // namespace tessera::core

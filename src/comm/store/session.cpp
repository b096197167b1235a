#include "comm/store/session.h"

namespace tessera::comm::store {
namespace {

// A client that does not read what it asked for is not worth more memory than this.
constexpr std::size_t kMostUnsent = 4 * kLongest;

}  // namespace

Session::Session(const core::Secret& secret)
    : handshake_(core::Handshake::Side::kListens, secret, kPurpose),
      unsent_(handshake_.opening()) {}

void Session::receive(std::string_view bytes, const std::function<void(const Packet&)>& serve) {
  if (is_over_) return;
  received_.append(bytes);
  if (!reader_) {
    const auto state = handshake_.advance(received_, unsent_);
    if (state == core::Handshake::State::kOpen) return;
    if (state != core::Handshake::State::kProven) {
      is_over_ = true;
      return;
    }
    writer_ = handshake_.writer();
    reader_ = handshake_.reader();
  }
  try {
    while (!is_over_) {
      const auto text = reader_->next(received_, kLongest);
      if (!text) return;
      try {
        serve(decode(*text));
      } catch (const WireError& error) {
        answer({static_cast<std::uint8_t>(Status::kWrong), {error.what()}});
      }
    }
  } catch (const core::FrameError&) {
    is_over_ = true;
  }
}

void Session::answer(const Packet& packet) {
  if (is_over_) return;
  unsent_ += writer_->frame(encode(packet));
  if (unsent_.size() > kMostUnsent) is_over_ = true;
}

}  // namespace tessera::comm::store

#include "comm/store/wire.h"

namespace tessera::comm::store {
namespace {

void append_length(std::string& text, std::size_t length) {
  for (int i = 0; i < 4; ++i) text += static_cast<char>(length >> (8 * i) & 0xff);
}

}  // namespace

std::string encode(const Packet& packet) {
  std::string text(1, static_cast<char>(packet.code));
  for (const std::string& part : packet.parts) {
    append_length(text, part.size());
    text += part;
  }
  return text;
}

Packet decode(std::string_view text) {
  if (text.empty()) throw WireError("an empty packet");
  Packet packet;
  packet.code = static_cast<std::uint8_t>(text[0]);
  text.remove_prefix(1);
  while (!text.empty()) {
    if (text.size() < 4) throw WireError("a packet that ends in a length");
    std::size_t length = 0;
    for (int i = 0; i < 4; ++i) {
      length |= static_cast<std::size_t>(static_cast<unsigned char>(text[i])) << (8 * i);
    }
    text.remove_prefix(4);
    if (length > text.size()) throw WireError("a part that is longer than its packet");
    packet.parts.emplace_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return packet;
}

}  // namespace tessera::comm::store

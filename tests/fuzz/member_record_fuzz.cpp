// Records of other ranks from the store: refused, or the same after a round trip.

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "comm/member.h"

using namespace tessera::comm;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const Member member = decode_member(std::string(reinterpret_cast<const char*>(data), size));
    const Member again = decode_member(encode(member));
    if (encode(again) != encode(member)) std::abort();
  } catch (const std::invalid_argument&) {
  }
  return 0;
}

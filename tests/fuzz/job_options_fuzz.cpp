// Words of the command line: understood, or refused by the documented exception and no other.

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "tessera/launch/options.h"

using namespace tessera::launch;

namespace {

template <class Parse>
void expect_documented(Parse parse) {
  try {
    parse();
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  expect_documented([&] { parse_stream_rule(text); });
  expect_documented([&] {
    const Endpoint endpoint = parse_endpoint(text, 29500);
    const Endpoint again = parse_endpoint(endpoint.text());
    if (again.host != endpoint.host || again.port != endpoint.port) std::abort();
  });
  expect_documented([&] { parse_rank_list(text); });
  expect_documented([&] {
    if (parse_rank_count(text) < 1) std::abort();
  });
  expect_documented([&] {
    if (parse_seconds(text).count() < 0) std::abort();
  });
  expect_documented([&] {
    const int value = parse_integer(text, -3, 9);
    if (value < -3 || value > 9) std::abort();
  });
  return 0;
}

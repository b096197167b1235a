#include "lm/text_source.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <ATen/Functions.h>

#include "tessera/core/check.h"

namespace tessera::workloads {
namespace {

/// Mixes three numbers into one that looks random (the finaliser of splitmix64).
std::uint64_t mixed(std::uint64_t seed, std::uint64_t step, std::uint64_t index) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15ULL + step * 0xBF58476D1CE4E5B9ULL +
                    index * 0x94D049BB133111EBULL + 0x2545F4914F6CDD1DULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

}  // namespace

TextSource TextSource::from_file(const std::string& path, const lm::Tokenizer* tokenizer) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  TESSERA_CHECK_VALUE(file && !std::filesystem::is_directory(path), "lm: the file '", path,
                      "' cannot be read.");
  return TextSource(text.str(), tokenizer);
}

TextSource::TextSource(std::string_view text, const lm::Tokenizer* tokenizer) {
  const auto copied = [](const auto& values, at::ScalarType type) {
    at::Tensor tokens = at::empty({static_cast<std::int64_t>(values.size())}, type);
    if (!values.empty()) std::memcpy(tokens.data_ptr(), values.data(), tokens.nbytes());
    return tokens;
  };
  tokens_ =
      tokenizer == nullptr ? copied(text, at::kByte) : copied(tokenizer->encode(text), at::kInt);
}

TextSource TextSource::part(std::int64_t begin, std::int64_t end) const {
  return TextSource(tokens_.narrow(0, begin, end - begin));
}

void TextSource::check_holds(std::int64_t length) const {
  TESSERA_CHECK_VALUE(size() > length, "lm: a text of ", size(), " tokens holds no sequence of ",
                      length + 1, ". Use a longer text, or a smaller --length.");
}

at::Tensor TextSource::sequences(std::uint64_t seed, std::int64_t step, std::int64_t first,
                                 std::int64_t count, std::int64_t length) const {
  check_holds(length);
  const std::int64_t places = size() - length;
  at::Tensor batch = at::empty({count, length + 1}, at::kLong);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto place = static_cast<std::int64_t>(
        mixed(seed, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(first + i)) %
        static_cast<std::uint64_t>(places));
    batch[i].copy_(tokens_.narrow(0, place, length + 1));
  }
  return batch;
}

std::int64_t TextSource::num_pieces(std::int64_t length) const {
  check_holds(length);
  return (size() - 1) / length;
}

at::Tensor TextSource::pieces(std::span<const std::int64_t> numbers, std::int64_t length) const {
  const auto count = static_cast<std::int64_t>(numbers.size());
  at::Tensor batch = at::empty({count, length + 1}, at::kLong);
  for (std::int64_t i = 0; i < count; ++i) {
    batch[i].copy_(tokens_.narrow(0, numbers[static_cast<std::size_t>(i)] * length, length + 1));
  }
  return batch;
}

}  // namespace tessera::workloads

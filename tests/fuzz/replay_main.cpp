// Feeds every file of the given folders to the fuzz target it is linked with, and some mutations of
// each: cut short at every length, and with every byte flipped once. Then as many random ones as
// TESSERA_FUZZ_INPUTS says, or --inputs=N before the folders (10,000): bytes and digits changed,
// pieces dropped, doubled, and taken from another file. The n-th is the same in every run;
// TESSERA_FUZZ_FIRST begins at another. Says how much memory of its own the program has more at the
// end than after a tenth of them.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

void feed(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
}

std::uint64_t number_of(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

long own_kilobytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) return std::strtol(line.c_str() + 8, nullptr, 10);
  }
  return 0;
}

// A few changes at random places.
std::string mutated(const std::vector<std::string>& files, std::mt19937_64& random) {
  static const std::vector<std::string> kTokens = {
      "-1",   "0",       "1e999", "9223372036854775808",
      "\"\"", "null",    "[[",    "]]",
      "{\"",  "\\u0000", "\xff",  ":,",
      "NaN",  "1.5",     "\n",    "18446744073709551615"};
  const auto below = [&](std::size_t count) { return count == 0 ? 0 : random() % count; };
  std::string text = files[below(files.size())];
  for (std::size_t i = 1 + below(6); i > 0; --i) {
    const std::size_t place = below(text.size() + 1);
    const std::size_t length = std::min(text.size() - place, below(16));
    switch (below(6)) {
      case 0:
        if (place < text.size()) text[place] = static_cast<char>(random());
        break;
      case 1:
        if (place < text.size()) text[place] = static_cast<char>(text[place] ^ (1 << below(8)));
        break;
      case 2:
        text.erase(place, length);
        break;
      case 3:
        text.insert(place, text.substr(place, length));
        break;
      case 4:
        text.insert(place, kTokens[below(kTokens.size())]);
        break;
      default: {
        const std::string& other = files[below(files.size())];
        const std::size_t from = below(other.size() + 1);
        text.replace(place, length, other.substr(from, below(64)));
      }
    }
  }
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> files;
  std::uint64_t usual = 10'000;
  int first_folder = 1;
  if (argc > 1 && std::string(argv[1]).starts_with("--inputs=")) {
    usual = std::strtoull(argv[1] + std::string("--inputs=").size(), nullptr, 10);
    first_folder = 2;
  }
  for (int i = first_folder; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::string input(std::istreambuf_iterator<char>(file), {});
      feed(input);
      for (std::size_t length = 0; length < input.size(); ++length) feed(input.substr(0, length));
      for (std::size_t place = 0; place < input.size(); ++place) {
        std::string flipped = input;
        flipped[place] = static_cast<char>(flipped[place] ^ 0x55);
        feed(flipped);
      }
      files.push_back(input);
    }
  }
  if (files.empty()) return 1;
  std::sort(files.begin(), files.end());  // folders have no order
  const std::uint64_t first = number_of("TESSERA_FUZZ_FIRST", 0);
  const std::uint64_t count = number_of("TESSERA_FUZZ_INPUTS", usual);
  long before = 0;
  for (std::uint64_t i = first; i < first + count; ++i) {
    if (i == first + count / 10) before = own_kilobytes();
    std::mt19937_64 random(i);
    feed(mutated(files, random));
  }
  std::printf("%zu inputs replayed, %llu mutated; memory %ld KiB, grown by %ld\n", files.size(),
              static_cast<unsigned long long>(count), own_kilobytes(), own_kilobytes() - before);
  return 0;
}

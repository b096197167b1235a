// Feeds every file of the given folders to the fuzz target it is linked with, and some mutations of
// each: cut short at every length, and with every byte flipped once.

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

void feed(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
}

}  // namespace

int main(int argc, char** argv) {
  int num_files = 0;
  for (int i = 1; i < argc; ++i) {
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
      ++num_files;
    }
  }
  std::printf("%d inputs replayed\n", num_files);
  return num_files > 0 ? 0 : 1;
}

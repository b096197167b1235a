// tokenizer_ids TOKENIZER: reads texts from standard input, each as a line with its bytes in
// hexadecimal, and prints the tokens of each and the bytes they stand for.

#include <cstdio>
#include <iostream>
#include <string>

#include "lm/tokenizer.h"
#include "trainer/data_error.h"

int main(int argc, char** argv) {
  try {
    const auto tokenizer = tessera::workloads::lm::Tokenizer::from_file(argc > 1 ? argv[1] : "");
    std::printf("%ld\n", static_cast<long>(tokenizer.vocab_size()));
    for (std::string line; std::getline(std::cin, line);) {
      std::string text;
      for (std::size_t i = 0; i + 1 < line.size(); i += 2) {
        text += static_cast<char>(std::stoi(line.substr(i, 2), nullptr, 16));
      }
      const auto tokens = tokenizer.encode(text);
      for (const auto token : tokens) std::printf("%d ", token);
      std::printf("|");
      for (const unsigned char byte : tokenizer.decode(tokens)) std::printf("%02x", byte);
      std::printf("\n");
    }
  } catch (const tessera::trainer::DataError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 65;
  }
  return 0;
}

// src/core/letters.h — messages by datagram that only those who know the job's secret can write.
//
// A letter holds a signature for the one who receives it, who wrote it, its number, and the text.
// One that was made up, changed, repeated or meant for somebody else is not opened; nor is one that
// comes after a later one of the same writer. No LibTorch, and no input or output of its own.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "core/secret.h"

namespace tessera::core {

class Letters {
 public:
  /// `writer` is a random word that no other has and that holds no space; `address` is where this
  /// one receives, and holds a word of the same kind.
  Letters(const Secret& secret, std::string writer, std::string address)
      : secret_(secret), writer_(std::move(writer)), address_(std::move(address)) {}

  std::string seal(const std::string& address, std::string_view text);
  std::optional<std::string> open(const std::string& letter);

 private:
  Secret secret_;
  std::string writer_;
  std::string address_;
  std::uint64_t num_sealed_ = 0;
  std::map<std::string, std::uint64_t> last_from_;  // by writer
};

}  // namespace tessera::core

// dlrm/text_blocks.h — a text as blocks of whole lines, read one after the other. No LibTorch.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::workloads::dlrm {

/// Puts bytes of a text there, at most so many, and returns how many; 0 at its end.
using ReadText = std::function<std::size_t(char* to, std::size_t room)>;

/// Reads a regular file or a pipe, so a text of any length takes the memory of a few blocks.
class TextBlocks {
 public:
  /// Blocks have more than `block_bytes` bytes, up to the end of the line that reaches so far; the
  /// last may have fewer. Throws DataError if the text cannot be opened.
  TextBlocks(std::string path, std::size_t block_bytes);
  /// The text that `read` gives; `path` is named in what is thrown. Of "-", which is standard
  /// input, it is asked when there is something to read.
  TextBlocks(std::string path, std::size_t block_bytes, ReadText read);
  ~TextBlocks();
  TextBlocks(const TextBlocks&) = delete;
  TextBlocks& operator=(const TextBlocks&) = delete;

  /// The next block, in `memory`, which grows as needed; nothing at the end. One thread at a time.
  /// Throws DataError if the text cannot be read or has a line of more than 16 MiB.
  std::optional<std::string_view> next(std::vector<char>& memory);
  /// From any thread: whoever waits in `next` for a pipe gets the end of the text soon.
  void stop() noexcept { is_stopped_ = true; }

  std::int64_t num_bytes() const noexcept { return num_bytes_; }

 private:
  /// 0 at the end.
  std::size_t read(char* to, std::size_t room);

  /// Until standard input has something, or its end, or `stop` was called.
  void wait_for_input() const;

  bool is_input_ = false;  // standard input
  std::string path_;
  std::size_t block_bytes_;
  ReadText read_;
  int fd_ = -1;
  std::atomic<bool> is_stopped_{false};
  std::string rest_;  // what was read after the last block
  std::int64_t num_bytes_ = 0;
};

}  // namespace tessera::workloads::dlrm

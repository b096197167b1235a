// data/input.h — bytes of a file or of standard input, unpacked. No LibTorch.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/content.h"

namespace tessera::workloads::data {

/// Names with patterns (`day_*.csv`) as the files they stand for, in order. Throws DataError for a
/// pattern that fits nothing.
std::vector<std::string> expand(const std::vector<std::string>& names);

/// The same of one text, in which names stand with commas between them, unless it is a name itself.
std::vector<std::string> files_of(const std::string& names);

/// Throws DataError if `out` is one of `inputs`, by whatever name.
void check_apart(const std::vector<std::string>& inputs, const std::string& out);

/// Reads a file, or standard input if it is named "-", from its beginning to its end; gzip and zstd
/// are unpacked. Throws DataError, naming the file, if it cannot be read, is damaged, or holds
/// something else than text.
class Input {
 public:
  /// With `goes_on`, the end of a file is not the end: it is asked several times a second, and as
  /// long as it says true, reading waits for more; when it says false, the text ends there, also
  /// that of a pipe nobody closes. Packed files end as they do.
  explicit Input(const std::string& path, std::function<bool()> goes_on = nullptr);
  ~Input();
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;

  /// How many bytes were put there; 0 at the end only.
  std::size_t read(char* to, std::size_t room);
  /// The first bytes of the text, whatever was read since.
  std::string_view front() const noexcept { return unpacker_ == nullptr ? front_ : text_; }
  const std::string& name() const noexcept { return name_; }
  std::int64_t num_bytes() const noexcept { return num_bytes_; }  // read so far, packed

 private:
  struct Unpacker;
  struct Gzip;
  struct Zstd;
  std::size_t read_packed(char* to, std::size_t room);
  std::size_t read_or_wait(char* to, std::size_t room);

  std::function<bool()> goes_on_;
  std::string name_;
  int fd_ = -1;
  bool is_file_ = false;  // not a pipe
  std::int64_t num_bytes_ = 0;
  std::string front_;            // read to know what it is
  std::size_t front_taken_ = 0;  // of it, handed over
  std::string text_;             // the same, unpacked
  std::size_t text_taken_ = 0;
  std::unique_ptr<Unpacker> unpacker_;
};

/// Reads the text that a packed file or standard input, "-", holds; none if a file holds something
/// else. Throws DataError.
std::function<std::size_t(char* to, std::size_t room)> unpacking(const std::string& path);

}  // namespace tessera::workloads::data

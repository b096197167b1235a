// data/whole_file.h — a file that is there whole or not at all. No LibTorch.

#pragma once

#include <string>
#include <string_view>

namespace tessera::workloads::data {

/// Writes a file that nobody sees before `finish`; until then, and if that never comes, what was
/// there stays. Throws DataError naming the file. A pipe or a device is written as it is.
class WholeFile {
 public:
  explicit WholeFile(std::string path);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  void write(std::string_view bytes);
  /// What is written next lies at the beginning. Throws for a pipe.
  void rewind();
  /// Onto the disk, and in the place of what was there.
  void finish();

 private:
  [[noreturn]] void fail(const std::string& what) const;
  void open();
  bool give_name() const;

  std::string path_;
  std::string partial_;  // its name until it is whole, if it has one before
  bool is_named_ = false;
  bool is_stream_ = false;
  int fd_ = -1;
};

/// All of a text at once.
void write_whole(const std::string& path, std::string_view text);

}  // namespace tessera::workloads::data

// trainer/event_file.h — numbers of a training as TensorBoard reads them. No LibTorch.

#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/core/export.h"

namespace tessera::trainer {

/// A file of TensorBoard's events: `tensorboard --logdir FOLDER` shows it, while it grows and
/// later.
class TESSERA_API EventFile {
 public:
  /// Makes a new file in `folder`, whose name begins with events.out.tfevents. What earlier files
  /// there say of steps after `first_step` is not shown any more. Throws std::runtime_error.
  explicit EventFile(const std::string& folder, std::int64_t first_step = 0);

  /// A point of the curve `tag`; what is not finite is left out. Points reach the disk at the
  /// latest when `flush` returns or the object ends.
  void add(std::string_view tag, std::int64_t step, double value);
  void flush();
  const std::string& path() const noexcept { return path_; }

 private:
  void write(std::string_view event);

  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace tessera::trainer

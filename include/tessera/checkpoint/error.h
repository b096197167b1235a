// tessera/checkpoint/error.h — what can go wrong with a checkpoint. No LibTorch.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "tessera/core/export.h"

namespace tessera::checkpoint {

enum class ErrorKind : std::uint8_t {
  kMissing,  // there is no such checkpoint, file or tensor
  kCorrupt,  // what is there is not what was written, or was never a checkpoint
  kWrite,    // the disk refused; earlier checkpoints are untouched
  kInvalid,  // the caller asked for something that cannot be stored or placed
  kRead,     // disk or system refused to read, also when tried again; nothing is known to be wrong
             // with the checkpoint
};

/// "missing", "corrupt", "write", "invalid", "read".
TESSERA_API const char* name_of(ErrorKind kind) noexcept;

/// A failure that names the file, and the tensor if there is one, and the cause.
class TESSERA_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message);
  ~Error() override;
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace tessera::checkpoint

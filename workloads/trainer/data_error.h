// trainer/data_error.h — input that a training cannot use.

#pragma once

#include <stdexcept>

#include "tessera/core/export.h"

namespace tessera::trainer {

/// Data that cannot be used. The text names the file, the place and the reason.
class TESSERA_API DataError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tessera::trainer

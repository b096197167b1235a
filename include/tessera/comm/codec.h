// tessera/comm/codec.h — what values become on the wire, to send fewer bytes.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"

namespace tessera::comm {

enum class WireFormat {
  kNone,  // as they are
  kFp16,  // clamped to the finite range, so that an overflow stays a number
  kBf16,
  kInt8,  // rows of `row_size` values: 8 bits each, and the row's scale and smallest value
  kFp8,   // rows of `row_size` values: e4m3 each, and the row's scale
};

struct CodecOptions {
  WireFormat format = WireFormat::kNone;
  /// Multiplies before encoding and divides after: small gradients survive 16 bits.
  double loss_scale = 1.0;
  /// Values per row of kInt8 and kFp8.
  std::int64_t row_size = 32;
};

/// Encodes and decodes floating tensors. Values are cheap to copy, and const calls are thread-safe.
class TESSERA_API Codec {
 public:
  Codec() = default;
  /// Throws ValueError for a row size below 1 or a loss scale that is not positive and finite.
  explicit Codec(const CodecOptions& options);

  WireFormat format() const noexcept { return options_.format; }
  bool is_identity() const noexcept { return options_.format == WireFormat::kNone; }
  /// Whether encoded values may be summed: what reductions need.
  bool is_linear() const noexcept;

  /// Type and number of elements that `count` values of `dtype` become.
  at::ScalarType wire_type(at::ScalarType dtype) const;
  std::int64_t wire_size(std::int64_t count) const;

  /// Encodes a 1-D tensor whose parts (they add up to it) go to different ranks; part i becomes
  /// wire_size(parts[i]) elements.
  at::Tensor encode(const at::Tensor& values, const std::vector<std::int64_t>& parts) const;
  /// The inverse, up to what the format loses.
  at::Tensor decode(const at::Tensor& wire, const std::vector<std::int64_t>& parts,
                    at::ScalarType dtype) const;

 private:
  CodecOptions options_;
};

/// One codec for the values, one for their gradients.
struct Codecs {
  Codec forward;
  Codec backward;
};

}  // namespace tessera::comm

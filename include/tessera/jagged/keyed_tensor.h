// tessera/jagged/keyed_tensor.h — dense columns with names, e.g. pooled embeddings.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "tessera/core/export.h"

namespace tessera::jagged {

/// Tensors laid side by side along `key_dim`, found again by name. Copies share their tensor.
class TESSERA_API KeyedTensor {
 public:
  /// Throws ValueError if the lengths do not add up to the size of `values` along `key_dim`.
  KeyedTensor(std::vector<std::string> keys, std::vector<std::int64_t> length_per_key,
              at::Tensor values, std::int64_t key_dim = 1);

  static KeyedTensor from_tensor_list(std::vector<std::string> keys,
                                      const std::vector<at::Tensor>& tensors,
                                      std::int64_t key_dim = 1, std::int64_t cat_dim = 1);

  const std::vector<std::string>& keys() const noexcept { return keys_; }
  const at::Tensor& values() const noexcept { return values_; }
  std::int64_t key_dim() const noexcept { return key_dim_; }
  const std::vector<std::int64_t>& length_per_key() const noexcept { return length_per_key_; }
  const std::vector<std::int64_t>& offset_per_key() const noexcept { return offset_per_key_; }
  c10::Device device() const { return values_.device(); }
  std::int64_t size_in_bytes() const;

  bool has_key(const std::string& key) const;
  /// The columns of `key`, as a view; of the last one if several have the name. Throws IndexError
  /// if none has.
  at::Tensor operator[](const std::string& key) const;

  /// One tensor per group: the columns of its keys, in the order listed. Keys may be left out or
  /// used several times (their gradients add up). If several tensors have a key, the last counts.
  /// Throws IndexError for a key that is nowhere.
  static std::vector<at::Tensor> regroup(const std::vector<KeyedTensor>& keyed_tensors,
                                         const std::vector<std::vector<std::string>>& groups);

  KeyedTensor to(c10::Device device, bool non_blocking = false) const;
  void record_stream(c10::Stream stream) const;
  std::string str() const;

 private:
  std::vector<std::string> keys_;
  std::vector<std::int64_t> length_per_key_;
  std::vector<std::int64_t> offset_per_key_;
  at::Tensor values_;
  std::int64_t key_dim_;
  std::map<std::string, std::size_t> index_;
};

}  // namespace tessera::jagged

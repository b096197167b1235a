// src/core/kept_memory.h — large tensors of host memory, in what earlier ones left.
//
// A step of training makes the same large results again and again. Memory that was given back to
// the system in between comes with page faults, and cleared: a result is then written twice.

#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>

namespace tessera::core {

/// Free memory that is kept, at most. What was left longest ago is given back first.
inline constexpr std::size_t kMostKeptBytes = std::size_t{256} << 20;
/// Smaller tensors come from LibTorch's allocator.
inline constexpr std::size_t kLeastKeptBytes = std::size_t{1} << 20;

/// An uninitialised, contiguous tensor. On the CPU, from kLeastKeptBytes on, its memory is kept
/// when the tensor ends, and comes in huge pages where the system gives them on request. Any
/// thread.
at::Tensor empty_kept(at::IntArrayRef shape, const at::TensorOptions& options);

/// The same for the gradient of a batch of logits, which can be larger than all that empty_kept
/// keeps: the memory of the last one that ended is kept beside it, whatever its size, until one
/// that it does not suit is asked for. One below kLeastLastBytes comes from empty_kept.
at::Tensor empty_kept_last(at::IntArrayRef shape, const at::TensorOptions& options);
inline constexpr std::size_t kLeastLastBytes = std::size_t{8} << 20;

/// Bytes that are kept and free at present.
std::size_t kept_bytes() noexcept;

}  // namespace tessera::core

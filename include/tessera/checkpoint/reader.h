// tessera/checkpoint/reader.h — reads any region of any tensor, and believes nothing unsummed. No
// LibTorch.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tessera/checkpoint/disk.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<std::int64_t> shape;
};

/// Tensors by name, readable in pieces. Safe to use from several threads.
class TESSERA_API TensorSource {
 public:
  virtual ~TensorSource();
  virtual std::vector<TensorInfo> tensors() const = 0;
  /// Reads a region into `data`, row-major without gaps. Throws Error naming file and tensor when
  /// the bytes are not those that were written; `data` is then undefined.
  virtual void read(const std::string& name, const Region& region, std::byte* data) const = 0;
};

/// A finished checkpoint.
class TESSERA_API Reader : public TensorSource {
 public:
  /// Opens the folder of `step`: checks the manifest, the sizes of all files, their headers and all
  /// that is not tensors, and the bases of a delta. Reads no tensor. Throws Error. All files stay
  /// open, so that later reads are of this checkpoint, whatever takes its place.
  Reader(const std::string& root, std::int64_t step, Disk& disk = Disk::real());
  ~Reader() override;

  const Manifest& manifest() const noexcept;
  const std::string& folder() const noexcept;
  /// The chain of a delta, this checkpoint first.
  std::vector<const Manifest*> chain() const;

  std::vector<TensorInfo> tensors() const override;
  const TensorInfo* find(const std::string& name) const;
  void read(const std::string& name, const Region& region, std::byte* data) const override;

  /// Reads everything, also of the bases, and checks every sum, with two threads. `progress` gets
  /// the bytes done; it is called by one thread at a time, not always the same.
  void verify(const std::function<void(std::uint64_t)>& progress = nullptr) const;

 private:
  struct State;
  Reader();
  std::unique_ptr<State> state_;
};

/// Safetensors files without a manifest, made by others: one file, or a folder of them, with or
/// without model.safetensors.index.json and DCP_SHARDING_INFO. Carries no sums.
class TESSERA_API PlainReader : public TensorSource {
 public:
  explicit PlainReader(const std::string& path);
  ~PlainReader() override;
  std::vector<TensorInfo> tensors() const override;
  void read(const std::string& name, const Region& region, std::byte* data) const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// What was found while looking for a checkpoint.
struct Found {
  std::unique_ptr<Reader> reader;     // null if there is none
  std::vector<std::string> warnings;  // what is wrong with newer ones
};

/// Opens the checkpoint of `root` committed last that can be opened, of at most `max_step`,
/// and whose manifest's SHA-256 is not in `left_out`. Saves may go on meanwhile. Throws
/// Error(kRead) if one cannot be read for now: an older one instead would be a loss.
TESSERA_API Found find_newest(const std::string& root, std::int64_t max_step = INT64_MAX,
                              const std::set<std::string>& left_out = {},
                              Disk& disk = Disk::real());

/// Notes that this process goes on with what is in `root` by now, so that its saves may replace it.
/// A load does so by itself; who reads tensors one by one to continue from them calls it.
TESSERA_API void note_read(const std::string& root, Disk& disk = Disk::real());

}  // namespace tessera::checkpoint

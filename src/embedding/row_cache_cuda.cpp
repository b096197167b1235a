#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "embedding/row_cache.h"
#include "embedding/row_state.h"
#include "embedding/table_device.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/row_cache_launch.h"
#include "tessera/core/check.h"

namespace tessera::embedding::detail {
namespace {

namespace cuda = kernels::cuda;
using c10::cuda::CUDAStream;

void check(int error, const char* what) {
  TORCH_CHECK(error == 0, "embedding.cache: ", what, " failed: ", cuda::error_text(error), ".");
}

CUDAStream stream_of(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()); }

/// A point in a stream that others wait for.
class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "an event"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(const CUDAStream& stream) {
    check(cudaEventRecord(event_, stream.stream()), "an event");
  }
  void let_wait(const CUDAStream& stream) const {
    check(cudaStreamWaitEvent(stream.stream(), event_, 0), "an event");
  }
  void wait() const { check(cudaEventSynchronize(event_), "an event"); }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaRowCache;

struct CudaAdmission : Admission {
  ~CudaAdmission() override;
  std::shared_ptr<CudaRowCache> cache;
  TablePass pass;  // of the tables, without rows for those that are not cached
  at::Tensor slots;
  at::Tensor report;       // pinned: what was missing, and what was held, by table
  at::Tensor device_work;  // until the report is here
  std::uint32_t number = 0;
  Event reported;
  Event moved;
};

class CudaRowCache : public RowCache, public std::enable_shared_from_this<CudaRowCache> {
 public:
  CudaRowCache(const std::vector<Table>& tables, CachePolicy policy, RowOptimizer* optimizer)
      : policy_(policy), device_(tables.front().weight.device()) {
    const c10::cuda::CUDAGuard guard(device_);
    std::int64_t num_keys = 0;
    for (std::size_t t = 0; t < tables.size(); ++t) {
      cached_of_.push_back(-1);
      if (tables[t].cached_rows == 0) continue;
      cached_of_.back() = static_cast<std::int64_t>(own_.size());
      Own& own = own_.emplace_back();
      own.weight = tables[t].weight;
      own.done.table = tables[t].name;
      own.done.num_rows = own.weight.size(0);
      own.num_slots = std::min(tables[t].cached_rows, own.weight.size(0));
      own.first_key = num_keys;
      num_keys += own.weight.size(0);
      std::vector<at::Tensor> homes{own.weight.detach()};
      if (optimizer != nullptr) {
        const auto& state = optimizer->state().tables[t];
        homes.push_back(state.momentum1);
        homes.push_back(state.momentum2);
      }
      for (const at::Tensor& home : homes) {
        Piece& piece = own.pieces.emplace_back();
        piece.home = home;
      }
    }
    TESSERA_CHECK_VALUE(num_keys < (std::int64_t{1} << 31),
                        "embedding.cache: the cached tables of one batch have ", num_keys,
                        " rows together; there may be 2147483647. Use two batches.");
    TESSERA_CHECK_VALUE(own_.size() <= cuda::kMostCachedTables, "embedding.cache: there are ",
                        own_.size(), " cached tables in one batch; there may be ",
                        cuda::kMostCachedTables, ".");
    num_keys_ = num_keys;
    slot_of_ = at::full({num_keys}, -1, options(at::kInt));
    lay_out();
  }

  std::unique_ptr<Admission> admit(const TablePass& pass, const LookupInput& input) override {
    const std::scoped_lock lock(mutex_);
    auto admission = std::make_unique<CudaAdmission>();
    admission->cache = shared_from_this();
    admission->ids = input.ids;
    admission->offsets = input.offsets;
    admission->pass = pass;
    for (std::size_t f = 0; f < pass.features.size(); ++f) {
      if (cached_of_[static_cast<std::size_t>(pass.table_of[f])] < 0) {
        admission->pass.features[f].rows.num_rows = 0;
      }
    }
    admission->number = ++num_calls_;
    live_.insert(admission->number);
    start(*admission);
    return admission;
  }

  void finish(Admission& base) override {
    const std::scoped_lock lock(mutex_);
    auto& admission = static_cast<CudaAdmission&>(base);
    while (!has_come(admission)) {
      grow(admission);
      start(admission);
    }
    const CUDAStream stream = stream_of(device_);
    admission.moved.let_wait(stream);
    c10::cuda::CUDACachingAllocator::recordStream(admission.slots.storage().data_ptr(), stream);
    admission.device_work = at::Tensor();
  }

  void place(const Admission& base, TablePass& pass) const override {
    const auto& admission = static_cast<const CudaAdmission&>(base);
    pass.ids.ids = admission.slots.const_data_ptr();
    pass.ids.wide_ids = false;
    for (std::size_t f = 0; f < pass.features.size(); ++f) {
      const std::int64_t number = cached_of_[static_cast<std::size_t>(pass.table_of[f])];
      if (number >= 0) place(own_[static_cast<std::size_t>(number)], pass.features[f].rows);
    }
  }

  void place(std::size_t table, TableTarget& target) const override {
    if (cached_of_[table] < 0) return;
    const Own& own = own_[static_cast<std::size_t>(cached_of_[table])];
    place(own, target.rows);
    const auto numbers = [&](std::size_t piece) -> float* {
      const bool is_there = own.pieces.size() > piece && own.pieces[piece].cached.defined();
      return is_there ? own.pieces[piece].cached.data_ptr<float>() : nullptr;
    };
    target.state.momentum1 = numbers(1);
    target.state.momentum2 = numbers(2);
    target.state.key_of =
        reinterpret_cast<const std::uint32_t*>(key_of_.const_data_ptr<std::int32_t>()) +
        own.first_slot;
    target.state.first_key = static_cast<std::uint32_t>(own.first_key);
  }

  void write_back() override {
    const std::scoped_lock lock(mutex_);
    const c10::cuda::CUDAGuard guard(device_);
    const CUDAStream stream = stream_of(device_);
    wait_for_others(stream);
    check(cuda::write_back(arrays(), /*is_emptied=*/true, stream.stream()), "writing rows back");
    moved_.record(stream);
    // Whoever reads the tables next may be the host.
    check(cudaStreamSynchronize(stream.stream()), "writing rows back");
  }

  std::vector<RowCacheStatistics> statistics() const override {
    const std::scoped_lock lock(mutex_);
    std::vector<RowCacheStatistics> all;
    for (const Own& own : own_) {
      all.push_back(own.done);
      all.back().cached_rows = own.num_slots;
    }
    return all;
  }

  void release(const CudaAdmission& admission) {
    const std::scoped_lock lock(mutex_);
    live_.erase(admission.number);
    // What reads or steps its rows has been given to this stream; the last call's may have been
    // given to another.
    const c10::cuda::CUDAGuard guard(device_);
    released_.let_wait(stream_of(device_));
    released_.record(stream_of(device_));
  }

 private:
  struct Piece {
    at::Tensor home;  // undefined: not there
    at::Tensor cached;
  };
  struct Own {
    at::Tensor weight;
    std::vector<Piece> pieces;
    std::int64_t first_key = 0;
    std::int64_t first_slot = 0;
    std::int64_t num_slots = 0;
    std::int64_t added = 0;   // slots that have no memory yet
    RowCacheStatistics done;  // but for `cached_rows`, which is num_slots
  };

  struct Report {
    std::int64_t missing;
    std::int64_t held;
    std::int64_t found;
  };
  static Report report_of(const CudaAdmission& admission, std::size_t table) {
    const auto* const own =
        admission.report.const_data_ptr<std::int32_t>() + cuda::kCacheReport * table;
    return {own[0], own[1], own[2]};
  }

  at::TensorOptions options(at::ScalarType type) const {
    return at::TensorOptions().dtype(type).device(device_);
  }

  static void place(const Own& own, kernels::TableRows& rows) {
    rows.data = own.pieces[0].cached.data_ptr();
    rows.num_rows = own.num_slots;
  }

  /// Makes the memory of all slots; those there were keep their rows and numbers.
  void lay_out() {
    const at::NoGradGuard no_grad;
    std::int64_t num_slots = 0;
    std::vector<std::int64_t> firsts;
    for (const Own& own : own_) {
      firsts.push_back(num_slots);
      num_slots += own.num_slots;
    }
    TESSERA_CHECK_VALUE(num_slots < (std::int64_t{1} << 31), "embedding.cache: the caches have ",
                        num_slots, " rows together; there may be 2147483647.");
    at::Tensor key_of = at::full({num_slots}, -1, options(at::kInt));
    at::Tensor used = at::zeros({num_slots}, options(at::kInt));
    at::Tensor num_used = at::zeros({num_slots}, options(at::kInt));
    std::vector<cuda::CachedTable> tables;
    std::vector<std::uint32_t> first_keys;
    for (std::size_t i = 0; i < own_.size(); ++i) {
      Own& own = own_[i];
      for (Piece& piece : own.pieces) {
        if (!piece.home.defined()) continue;
        std::vector<std::int64_t> shape = piece.home.sizes().vec();
        shape[0] = own.num_slots;
        const at::Tensor before = piece.cached;
        piece.cached = at::empty(shape, options(piece.home.scalar_type()));
        if (before.defined()) piece.cached.narrow(0, 0, before.size(0)).copy_(before);
      }
      if (key_of_.defined()) {
        const std::int64_t kept = own.pieces[0].cached.size(0) - own.added;
        for (auto [to, from] :
             {std::pair{&key_of, &key_of_}, {&used, &used_}, {&num_used, &num_used_}}) {
          to->narrow(0, firsts[i], kept).copy_(from->narrow(0, own.first_slot, kept));
        }
      }
      own.added = 0;
      own.first_slot = firsts[i];
      cuda::CachedTable& table = tables.emplace_back();
      for (std::size_t p = 0; p < own.pieces.size(); ++p) {
        const Piece& piece = own.pieces[p];
        if (!piece.home.defined()) continue;
        const std::int64_t bytes = piece.home.element_size() * piece.home.stride(0);
        table.pieces[p] = {static_cast<char*>(piece.home.data_ptr()),
                           static_cast<char*>(piece.cached.data_ptr()), bytes};
      }
      table.first_key = static_cast<std::uint32_t>(own.first_key);
      table.num_keys = static_cast<std::uint32_t>(own.weight.size(0));
      table.first_slot = static_cast<std::uint32_t>(own.first_slot);
      table.num_slots = static_cast<std::uint32_t>(own.num_slots);
    }
    key_of_ = key_of;
    used_ = used;
    num_used_ = num_used;
    num_slots_ = num_slots;
    for (const std::int64_t number : cached_of_) {
      first_keys.push_back(number < 0 ? 0
                                      : static_cast<std::uint32_t>(
                                            own_[static_cast<std::size_t>(number)].first_key));
    }
    tables_ = to_device(tables.data(), tables.size() * sizeof(tables[0]));
    first_keys_ = to_device(first_keys.data(), first_keys.size() * 4);
    // Rare: whoever uses the new memory on another stream finds it filled.
    check(cudaStreamSynchronize(stream_of(device_).stream()), "laying out rows");
  }

  at::Tensor to_device(const void* bytes, std::size_t count) const {
    at::Tensor host = at::empty({static_cast<std::int64_t>(count)}, at::kByte);
    std::memcpy(host.data_ptr(), bytes, count);
    return host.to(device_);
  }

  cuda::RowCacheArrays arrays() const {
    const auto numbers = [](const at::Tensor& tensor) {
      return reinterpret_cast<std::uint32_t*>(tensor.data_ptr<std::int32_t>());
    };
    cuda::RowCacheArrays all;
    all.slot_of = slot_of_.data_ptr<std::int32_t>();
    all.key_of = numbers(key_of_);
    all.used = numbers(used_);
    all.num_used = numbers(num_used_);
    all.tables = static_cast<const cuda::CachedTable*>(tables_.const_data_ptr());
    all.num_tables = static_cast<int>(own_.size());
    all.num_keys = static_cast<std::uint32_t>(num_keys_);
    all.num_slots = static_cast<std::uint32_t>(num_slots_);
    return all;
  }

  /// Rows move only behind earlier moves, and behind what was done with rows that may leave.
  void wait_for_others(const CUDAStream& stream) const {
    moved_.let_wait(stream);
    released_.let_wait(stream);
  }

  void start(CudaAdmission& admission) {
    const c10::cuda::CUDAGuard guard(device_);
    const CUDAStream stream = stream_of(device_);
    wait_for_others(stream);
    const std::int64_t count = admission.pass.num_positions;
    const auto num_reports = static_cast<std::int64_t>(cuda::kCacheReport * own_.size());
    admission.slots = at::empty({count}, options(at::kInt));
    admission.report = at::zeros({num_reports}, at::TensorOptions(at::kInt).pinned_memory(true));
    if (count > 0) {
      const cuda::TableCall call = device_call(admission.pass, workspace_, device_);
      const std::size_t report_bytes =
          (static_cast<std::size_t>(num_reports) * 4 + 255) / 256 * 256;
      const std::size_t bytes = report_bytes + cuda::admit_bytes(count, num_keys_, num_slots_);
      admission.device_work = at::empty({static_cast<std::int64_t>(bytes)}, options(at::kByte));
      char* const work = static_cast<char*>(admission.device_work.data_ptr());
      cuda::CacheCall how;
      how.number = admission.number;
      how.oldest_live = *live_.begin();
      how.least_frequent = policy_ == CachePolicy::kLfu;
      check(cuda::find_rows(call, device_tables_of(admission.pass, workspace_),
                            static_cast<const std::uint32_t*>(first_keys_.const_data_ptr()),
                            arrays(), how, reinterpret_cast<std::uint32_t*>(work),
                            work + report_bytes, stream.stream()),
            "finding rows");
      check(cudaMemcpyAsync(admission.report.data_ptr(), work,
                            static_cast<std::size_t>(num_reports) * 4, cudaMemcpyDeviceToHost,
                            stream.stream()),
            "a report");
      admission.reported.record(stream);  // the host need not wait for the rows
      check(cuda::bring_rows(call, arrays(), how, admission.slots.data_ptr<std::int32_t>(),
                             work + report_bytes, stream.stream()),
            "bringing rows");
      c10::cuda::CUDACachingAllocator::recordStream(workspace_.device_features.storage().data_ptr(),
                                                    stream);
    }
    admission.moved.record(stream);
    moved_.record(stream);
  }

  /// Whether the rows of the call are there; the host waits for the report.
  bool has_come(CudaAdmission& admission) {
    admission.reported.wait();
    bool fits = true;
    for (std::size_t i = 0; i < own_.size(); ++i) {
      const Report report = report_of(admission, i);
      fits = fits && report.missing <= own_[i].num_slots - report.held;
    }
    if (!fits) return false;
    for (std::size_t i = 0; i < own_.size(); ++i) {
      const Report report = report_of(admission, i);
      RowCacheStatistics& done = own_[i].done;
      ++done.num_calls;
      done.num_found += report.found;
      done.num_loaded += report.missing;
    }
    return true;
  }

  /// Gives every table with too few slots what the call needs.
  void grow(const CudaAdmission& admission) {
    const c10::cuda::CUDAGuard guard(device_);
    check(cudaDeviceSynchronize(), "waiting for rows");
    for (std::size_t i = 0; i < own_.size(); ++i) {
      Own& own = own_[i];
      const Report report = report_of(admission, i);
      const std::int64_t needed = report.missing + report.held;
      if (needed <= own.num_slots) continue;
      if (own.done.num_grown++ == 0) {
        TORCH_WARN("embedding.cache: the cache of table '", own.done.table, "' has ", own.num_slots,
                   " rows, and batches at work at the same time ask for ", needed,
                   "; it grows. Give it more rows, or smaller batches.");
      }
      own.added = needed - own.num_slots;
      own.num_slots = needed;
    }
    lay_out();
  }

  CachePolicy policy_;
  at::Device device_;
  mutable std::mutex mutex_;
  Workspace workspace_;
  std::vector<std::int64_t> cached_of_;  // by table: number among own_, or -1
  std::vector<Own> own_;
  std::int64_t num_keys_ = 0;
  std::int64_t num_slots_ = 0;
  at::Tensor slot_of_;
  at::Tensor key_of_;
  at::Tensor used_;
  at::Tensor num_used_;
  at::Tensor tables_;
  at::Tensor first_keys_;  // by table of the batch
  std::uint32_t num_calls_ = 0;
  std::set<std::uint32_t> live_;
  Event moved_;
  Event released_;
};

CudaAdmission::~CudaAdmission() {
  try {
    cache->release(*this);
  } catch (...) {  // a device that is lost is told by the next call
  }
}

}  // namespace

std::shared_ptr<RowCache> make_row_cache(const std::vector<Table>& tables, CachePolicy policy,
                                         RowOptimizer* optimizer) {
  return std::make_shared<CudaRowCache>(tables, policy, optimizer);
}

bool is_mapped(const at::Tensor& tensor) {
  if (!tensor.is_cuda() || tensor.numel() == 0) return false;
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, tensor.const_data_ptr()), "asking for memory's kind");
  return attributes.type == cudaMemoryTypeHost;
}

at::Tensor make_mapped(std::int64_t rows, std::int64_t columns, at::ScalarType type,
                       at::Device device) {
  if (!device.has_index()) device = at::Device(device.type(), c10::cuda::current_device());
  const c10::cuda::CUDAGuard guard(device);
  const auto options = at::TensorOptions().dtype(type).device(device);
  const std::size_t bytes = static_cast<std::size_t>(rows * columns) * c10::elementSize(type);
  if (bytes == 0) return at::empty({rows, columns}, options);
  void* memory = nullptr;
  const int error = cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error != 0) cudaGetLastError();  // the error is told here, not by the next call
  TORCH_CHECK(error == 0, "embedding.mapped_rows: ", bytes, " bytes of host memory for ", rows,
              " x ", columns, " numbers cannot be had for the GPU: ", cuda::error_text(error), ".");
  return at::for_blob(memory, {rows, columns})
      .deleter([](void* pointer) { cudaFreeHost(pointer); })
      .options(options)
      .target_device(device)
      .make_tensor();
}

}  // namespace tessera::embedding::detail

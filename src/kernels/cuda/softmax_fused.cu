// Statistics and gradient of the summed loss in one read and one write of the logits (Hopper), for
// rows longer than one block can hold. Shorter ones go to softmax_fused_rows.cu.
//
// A row is spread over the registers of a cluster of blocks: each holds up to kCapacity packs of 16
// bytes as exponentials in float32. One warp fetches slices through a ring in shared memory ahead
// of the others; each warp sends its maximum and sum to all blocks of the cluster; then every
// thread scales what it holds and stores it. Clusters stay and take row after row.
//
// Rows that do not begin or end at 16 bytes have up to 14 elements outside whole packs. The
// fetching warp brings them to the first block, one thread each. Places in such a row are counted
// from the line of memory that it begins in, so that warps read and write whole lines.
//
// Registers decide: 72 exponentials per thread at 128 registers, no spill. The build fails on one.

#include <algorithm>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/fused_task.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/logit_pack.cuh"

namespace tessera::kernels::cuda {
namespace {

// Below sm_90 there is no kernel to use them all.
constexpr int kWorkers = 480;  // threads that compute; one warp more fetches
[[maybe_unused]] constexpr int kWarps = kWorkers / 32;
constexpr int kPacksPerThread = 9;  // of a slice
constexpr int kPacksPerChunk = 3;   // and of them per stage of the ring
constexpr int kChunks = kPacksPerThread / kPacksPerChunk;
constexpr int kStages = 6;
constexpr int kChunkPacks = kWorkers * kPacksPerChunk;
constexpr int kCapacity = kWorkers * kPacksPerThread;
constexpr int kRingBytes = kStages * kChunkPacks * 16;
[[maybe_unused]] constexpr int kEdges = 16;
constexpr int kLinePacks = 8;  // a line of memory has 128 bytes
// The fetching warp is at most two rows ahead of the slowest worker.
[[maybe_unused]] constexpr int kEdgeRows = kStages / kChunks + 1;

template <typename T>
__device__ __forceinline__ float element_of(const uint4& pack, int i) {
  float value = 0.F;
#pragma unroll
  for (int k = 0; k < Form<T>::kCount; ++k) value = k == i ? Form<T>::get(pack, k) : value;
  return value;
}

template <typename T, int kCluster, bool kHasEdges>
__global__ void __launch_bounds__(kWorkers + 32, 1) fused_kernel(FusedTask task) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900  // can_fuse keeps others away
  using F = Form<T>;
  constexpr int kCount = F::kCount;
  extern __shared__ __align__(128) uint8_t ring_bytes[];
  __shared__ __align__(8) uint64_t full[kStages], empty[kStages], exchanged[2];
  __shared__ __align__(8) float2 parts[2][kCluster * kWarps];
  __shared__ float edges[kEdgeRows][kEdges];
  uint4* ring = reinterpret_cast<uint4*>(ring_bytes);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int block = kCluster > 1 ? static_cast<int>(rank_in_cluster()) : 0;
  const int64_t first_row = blockIdx.x / kCluster, row_step = gridDim.x / kCluster;
  const int64_t num_rows = task.statistics.rows.num_rows;
  const int slice = task.slice;
  const int slice_start = block * slice;
  const int num_columns = static_cast<int>(task.statistics.rows.num_columns);
  const T* logits = static_cast<const T*>(task.statistics.rows.data);
  const auto cut_of = [&](int64_t offset) {
    return kHasEdges ? cut_row(logits + offset, num_columns) : Cut{0, task.num_packs, 0};
  };
  // Where this block's packs of a row begin and end, as places in its slice; place 0 of the first
  // slice is `shift` packs before the row's first pack.
  const auto shift_of = [&](const T* first_pack) {
    return kHasEdges ? static_cast<int>(reinterpret_cast<uintptr_t>(first_pack) / 16 % kLinePacks)
                     : 0;
  };
  const auto places_of = [&](const Cut& cut, int shift) {
    const int begin = kHasEdges ? max(0, shift - slice_start) : 0;
    return int2{begin, max(begin, min(slice, shift + cut.num_packs - slice_start))};
  };

  if (thread == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kWarps);
    }
    barrier_init(&exchanged[0], 1);
    barrier_init(&exchanged[1], 1);
    barrier_init_fence();
  }
  __syncthreads();
  cluster_sync();

  if (warp == kWarps) {
    // Edges are read a row ahead: nothing waits for them.
    const auto read_edge = [&](int64_t row) {
      if (block != 0 || row >= num_rows) return 0.F;
      const T* from = logits + task.statistics.rows.offset(row);
      const Cut cut = cut_row(from, num_columns);
      if (lane >= cut.head + cut.tail) return 0.F;
      return F::widen(from[column_of_edge(cut, num_columns, lane)]);
    };
    if (kHasEdges || lane == 0) {
      int stage = 0;
      uint32_t parity = 1;
      [[maybe_unused]] int edge_row = 0;
      [[maybe_unused]] float edge = kHasEdges ? read_edge(first_row) : 0.F;
      for (int64_t row = first_row; row < num_rows; row += row_step) {
        const int64_t offset = task.statistics.rows.offset(row);
        const Cut cut = cut_of(offset);
        const T* first_pack = logits + offset + cut.head;
        const int shift = shift_of(first_pack);
        const int2 places = places_of(cut, shift);
        const uint4* from = reinterpret_cast<const uint4*>(first_pack) + (slice_start - shift);
        if constexpr (kHasEdges) {
          if (lane == 0) barrier_wait(&empty[stage], parity);
          __syncwarp();
          if (lane < kEdges) edges[edge_row][lane] = edge;
          __syncwarp();
          edge_row = edge_row + 1 == kEdgeRows ? 0 : edge_row + 1;
        }
#pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          if (!kHasEdges || lane == 0) {
            barrier_wait(&empty[stage], parity);
            const int start = chunk * kChunkPacks;
            const int begin = max(start, places.x);
            const int count = max(0, min(start + kChunkPacks, places.y) - begin);
            barrier_arrive_expecting(&full[stage], count * 16);
            if (count > 0) {
              bulk_load(ring + stage * kChunkPacks + (begin - start), from + begin, count * 16,
                        &full[stage]);
            }
          }
          if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
          }
        }
        if constexpr (kHasEdges) edge = read_edge(row + row_step);
      }
    }
    __syncwarp();
  } else {
    const float factor = task.statistics.scale * kLog2E;
    const float inverse = task.inverse != nullptr ? *task.inverse : 1.F;
    int stage = 0;
    uint32_t parity = 0;
    int turn = 0;
    [[maybe_unused]] int edge_row = 0;
    RowPlan plan = plan_of(task.statistics, first_row);
    for (int64_t row = first_row; row < num_rows; row += row_step, ++turn) {
      float e[kPacksPerThread * kCount];
      float chunk_maximum[kChunks];
      Part own{minus_infinity(), 0.F};
      float label_logit = 0.F;
      bool owns_label = false;
      const Cut cut = cut_of(plan.offset);
      const int shift = shift_of(logits + plan.offset + cut.head);
      const int2 places = places_of(cut, shift);
      const auto is_here = [&](int place) {
        return static_cast<unsigned>(thread + place - places.x) <
               static_cast<unsigned>(places.y - places.x);
      };
      const int label_place = plan.label_column - (kHasEdges ? cut.head : 0);
      // Which of this thread's packs holds the label, as a multiple of kWorkers.
      const int label_pack =
          label_place >= 0 ? label_place / kCount + shift - slice_start - thread : -1;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        barrier_wait(&full[stage], parity);
        const uint4* held = ring + stage * kChunkPacks;
        uint4 packs[kPacksPerChunk];
#pragma unroll
        for (int u = 0; u < kPacksPerChunk; ++u) {
          const int place = (chunk * kPacksPerChunk + u) * kWorkers;
          packs[u] = padding_pack<T>();
          if (is_here(place)) packs[u] = held[thread + u * kWorkers];
          if (label_pack == place && is_here(place)) {
            label_logit = element_of<T>(packs[u], label_place % kCount);
            owns_label = true;
          }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&empty[stage]);
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1;
        }
        float top = F::largest(packs[0]);
#pragma unroll
        for (int u = 1; u < kPacksPerChunk; ++u) top = fmaxf(top, F::largest(packs[u]));
        const float maximum = fmaxf(own.maximum, top), center = center_of(maximum);
        own.sum *= exp2_fast(exponent_of(own.maximum, center, factor));
        own.maximum = maximum;
        chunk_maximum[chunk] = maximum;
        float s0 = 0.F, s1 = 0.F;
#pragma unroll
        for (int u = 0; u < kPacksPerChunk; ++u) {
#pragma unroll
          for (int i = 0; i < kCount; i += 2) {
            const float e0 = exp2_fast(exponent_of(F::get(packs[u], i), center, factor));
            const float e1 = exp2_fast(exponent_of(F::get(packs[u], i + 1), center, factor));
            s0 += e0;
            s1 += e1;
            e[(chunk * kPacksPerChunk + u) * kCount + i] = e0;
            e[(chunk * kPacksPerChunk + u) * kCount + i + 1] = e1;
          }
        }
        own.sum += s0 + s1;
      }
      const RowPlan next = plan_of(task.statistics, row + row_step);
      const bool has_edge = kHasEdges && block == 0 && thread < cut.head + cut.tail;
      if (has_edge) {
        const float value = edges[edge_row][thread];
        const float maximum = value == value ? value : minus_infinity();
        own = joined(own, {maximum, exp2_fast(exponent_of(value, center_of(maximum), factor))},
                     factor);
      }

      const Part of_warp = join_warp(own, factor);
      const int side = turn & 1;
      if (thread == 0) barrier_arrive_expecting(&exchanged[side], kCluster * kWarps * 8);
      if (lane < kCluster) {
        send_pair(address_in_block(&parts[side][block * kWarps + warp], lane), of_warp.maximum,
                  of_warp.sum, address_in_block(&exchanged[side], lane));
      }
      barrier_wait_cluster(&exchanged[side], (turn >> 1) & 1);
      Part all{minus_infinity(), 0.F};
#pragma unroll
      for (int i = 0; i < (kCluster * kWarps + 31) / 32; ++i) {
        if (lane + i * 32 < kCluster * kWarps) {
          const float2 pair = parts[side][lane + i * 32];
          const Part part{pair.x, pair.y};
          all = joined(all, part, factor);
        }
      }
      all = join_warp(all, factor);

      const auto [weight, by_sum] = slope_of(task, all, plan.ignored, inverse);
      T* row_start = const_cast<T*>(logits) + plan.offset;
      uint4* to = reinterpret_cast<uint4*>(row_start + cut.head) + (slice_start - shift + thread);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const float by = by_sum * exp2_fast(exponent_of(chunk_maximum[chunk], all.maximum, factor));
#pragma unroll
        for (int u = 0; u < kPacksPerChunk; ++u) {
          const int pack = chunk * kPacksPerChunk + u;
          float values[kCount];
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            values[i] = plan.ignored ? 0.F : e[pack * kCount + i] * by;
          }
          if (is_here(pack * kWorkers)) to[pack * kWorkers] = F::pack(values);
        }
      }
      if (has_edge) {
        const int column = column_of_edge(cut, num_columns, thread);
        const float value = edges[edge_row][thread];
        const float p = exp2_fast(exponent_of(value, all.maximum, factor));
        const bool is_label = column == plan.label_column;
        row_start[column] =
            F::narrow(plan.ignored ? 0.F : fmaf(p, by_sum, is_label ? -weight : 0.F));
        if (is_label) task.statistics.out.target[row] = value;
      }
      if (owns_label) {
        const float p = exp2_fast(exponent_of(label_logit, all.maximum, factor));
        row_start[plan.label_column] = F::narrow(fmaf(p, by_sum, -weight));
        task.statistics.out.target[row] = label_logit;
      }
      if (block == 0 && thread == 0) {
        task.statistics.out.maximum[row] = all.maximum;
        task.statistics.out.sum[row] = all.sum;
        if (plan.label_column < 0) task.statistics.out.target[row] = minus_infinity();
      }
      plan = next;
      if constexpr (kHasEdges) edge_row = edge_row + 1 == kEdgeRows ? 0 : edge_row + 1;
    }
  }
  cluster_sync();
#endif
}

/// Whether some row begins or ends inside 16 bytes.
bool has_edges(const LogitRows& rows) {
  return rows.num_columns % 8 != 0 || rows.inner_stride % 8 != 0 || rows.outer_stride % 8 != 0 ||
         reinterpret_cast<std::uintptr_t>(rows.data) % 16 != 0;
}

/// How a row is spread: over how many blocks (0: it does not fit), and how much each holds.
struct Spread {
  int cluster;
  int slice;
};

Spread spread_of(const LogitRows& rows) {
  const int num_packs = static_cast<int>(rows.num_columns / 8);
  for (int cluster = 1; cluster <= 8; cluster *= 2) {
    int slice = (num_packs + cluster - 1) / cluster;
    if (has_edges(rows)) {
      const int num_places = num_packs + kLinePacks - 1;
      slice = (num_places / cluster / kLinePacks + 1) * kLinePacks;
    }
    if (slice <= kCapacity) return {cluster, slice};
  }
  return {0, 0};
}

/// How many clusters stay on the device at a time.
template <typename T, int kCluster, bool kHasEdges>
int max_clusters(const cudaLaunchConfig_t& config) {
  cudaFuncSetAttribute(fused_kernel<T, kCluster, kHasEdges>,
                       cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes);
  int count = 0;
  cudaOccupancyMaxActiveClusters(&count, fused_kernel<T, kCluster, kHasEdges>, &config);
  return std::max(count, 1);
}

template <typename T, int kCluster, bool kHasEdges>
cudaError_t launch(const FusedTask& task, cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kCluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(kWorkers + 32);
  config.dynamicSmemBytes = kRingBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  static const int num_clusters = max_clusters<T, kCluster, kHasEdges>(config);
  const std::int64_t clusters = std::min<std::int64_t>(num_clusters, task.statistics.rows.num_rows);
  config.gridDim = dim3(static_cast<unsigned>(clusters * kCluster));
  return cudaLaunchKernelEx(&config, fused_kernel<T, kCluster, kHasEdges>, task);
}

template <typename T, bool kHasEdges>
cudaError_t launch_for(const FusedTask& task, cudaStream_t stream) {
  switch (spread_of(task.statistics.rows).cluster) {
    case 1:
      return launch<T, 1, kHasEdges>(task, stream);
    case 2:
      return launch<T, 2, kHasEdges>(task, stream);
    case 4:
      return launch<T, 4, kHasEdges>(task, stream);
    default:
      return launch<T, 8, kHasEdges>(task, stream);
  }
}

}  // namespace

bool can_fuse(const SoftmaxStatisticsTask& task, const LossShape& shape) {
  const LogitRows& rows = task.rows;
  const bool is_16_bit = rows.element == Element::kBFloat16 || rows.element == Element::kFloat16;
  if (!is_16_bit || shape.label_smoothing != 0.0 || task.labels.ids == nullptr) return false;
  // A few columns are mostly edges.
  if (rows.num_columns < 256) return false;
  const bool in_block = fits_block(rows);
  if (!in_block && spread_of(rows).cluster == 0) return false;
  int device = 0;
  int major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return in_block ? major >= 8 : major == 9;
}

int softmax_fused(const SoftmaxStatisticsTask& task, const LossShape& shape, const float* inverse,
                  void* stream) {
  if (task.rows.num_rows == 0) return 0;
  FusedTask fused;
  fused.statistics = task;
  fused.shape = shape;
  fused.inverse = inverse;
  fused.num_packs = static_cast<int>(task.rows.num_columns / 8);
  fused.slice = spread_of(task.rows).slice;
  const auto on = static_cast<cudaStream_t>(stream);
  if (fits_block(task.rows)) return static_cast<int>(softmax_fused_rows(fused, on));
  const auto start = [&]<typename T>() {
    return has_edges(task.rows) ? launch_for<T, true>(fused, on) : launch_for<T, false>(fused, on);
  };
  return static_cast<int>(task.rows.element == Element::kBFloat16
                              ? start.template operator()<__nv_bfloat16>()
                              : start.template operator()<__half>());
}

}  // namespace tessera::kernels::cuda

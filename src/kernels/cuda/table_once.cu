// Steps the rows that occur once in a batch, bag by bag. The gradient of a bag is read once and
// serves all its rows: read row by row it would cost the second-level cache more than the rows cost
// the memory. The sum of its squares, which row-wise Adagrad needs, is the same for all of them
// too, so that what is left to do for a row is to read it, its state, and to write both.

#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "kernels/cuda/table_marks.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Blocks that a multiprocessor should hold: as many as registers allow without spilling.
template <int kPacks, bool kRandom>
constexpr int kResident = kPacks > 1 || kRandom ? 3 : 4;

template <Element kElement>
constexpr int kWide = kElement == Element::kFloat32 ? 4 : 8;

/// Sixteen bytes of a row as numbers, and back.
template <Element kElement>
__device__ __forceinline__ void widen_pack(const uint4& pack, float (&w)[kWide<kElement>]) {
  const std::uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kElement == Element::kFloat32) {
      w[i] = __uint_as_float(words[i]);
    } else {
      using Form = Stored<kElement>;
      w[2 * i] = Form::widen(static_cast<std::uint16_t>(words[i] & 0xFFFFU));
      w[2 * i + 1] = Form::widen(static_cast<std::uint16_t>(words[i] >> 16));
    }
  }
}
template <Element kElement>
__device__ __forceinline__ uint4 narrow_pack(const float (&w)[kWide<kElement>]) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kElement == Element::kFloat32) {
      words[i] = __float_as_uint(w[i]);
    } else if constexpr (kElement == Element::kBFloat16) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(w[2 * i], w[2 * i + 1]);
      words[i] = *reinterpret_cast<const std::uint32_t*>(&two);
    } else {
      const __half2 two = __floats2half2_rn(w[2 * i], w[2 * i + 1]);
      words[i] = *reinterpret_cast<const std::uint32_t*>(&two);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
template <Element kElement>
__device__ __forceinline__ uint4 narrow_at_random(const float (&w)[kWide<kElement>],
                                                  std::uint32_t seed, int column) {
  using Form = Stored<kElement>;
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto at = [&](int c) -> std::uint32_t {
      return Form::narrow_at_random(w[c],
                                    column_bits(seed, static_cast<std::uint32_t>(column + c)));
    };
    words[i] = at(2 * i) | at(2 * i + 1) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// Ids of a bag that a lane looks at in one round.
constexpr int kPerLane = 2;

/// The rows of one round of a warp: where they are, and what the gradient is multiplied with.
struct Round {
  std::uint32_t row[32 * kPerLane];
  float move[32 * kPerLane];
};

template <Element kElement, int kPacks, bool kRandom>
__host__ __device__ bool is_once_kind(const TableSteps& table) {
  return is_once(table) && table.rows.element == kElement &&
         (kElement != Element::kFloat32 && table.step.is_stochastic) == kRandom &&
         (table.rows.num_columns > 32 * kWide<kElement>) == (kPacks > 1);
}

/// `lanes` lanes, a power of two, take a bag: as many as hold a row of the widest table.
template <Element kElement, int kPacks, bool kRandom>
__global__ void __launch_bounds__(kThreads, kResident<kPacks, kRandom>)
    once_kernel(TableCall call, const std::int32_t* table_of, const std::uint32_t* keys,
                RowMarks marks, const TableSteps* tables, const float* gradient, float limit,
                bool is_aligned, int lanes) {
  constexpr int kCount = kWide<kElement>;
  constexpr int kFlight = 8 / kPacks;  // rows of a bag on their way at once
  constexpr int kBytes = kElement == Element::kFloat32 ? 4 : 2;
  __shared__ uint4 flight[kFlight][kPacks][kThreads];
  __shared__ Round rounds[kWarps];
  Round& round = rounds[threadIdx.x / 32];
  const int in_warp = static_cast<int>(threadIdx.x % 32);
  const int lane = in_warp & (lanes - 1);
  const int first = in_warp - lane;  // lane of the bag
  const std::int64_t bag = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / lanes;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  const TableSteps* table = tables;
  float g[kPacks][kCount] = {};
  bool has_part[kPacks] = {};
  float square = 0;
  if (bag < call.num_bags) {
    const int f = feature_of_bag(call, bag);
    const TableFeature& feature = call.features[f];
    table = tables + table_of[f];
    if (is_once_kind<kElement, kPacks, kRandom>(*table)) {
      begin = static_cast<std::uint32_t>(call.ids.offset(bag));
      end = static_cast<std::uint32_t>(call.ids.offset(bag + 1));
    }
    if (begin < end) {
      const float* const from = gradient + place_of(call, feature, bag, begin);
      const float mean = feature.is_mean ? 1.0F / static_cast<float>(end - begin) : 1.0F;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int column = (p * lanes + lane) * kCount;
        has_part[p] = column < table->rows.num_columns;
        if (!has_part[p]) continue;
        load_floats<kCount>(from + column, is_aligned, g[p]);
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          g[p][c] = mean * within(g[p][c], limit);
          square += g[p][c] * g[p][c];
        }
      }
    }
  }
  square = sum_lanes(square, lanes, ~0U) / static_cast<float>(table->rows.num_columns);
  const RowStep& step = table->step;
  const std::uint32_t first_key = table->first_key;
  const auto row_bytes = static_cast<std::uint32_t>(table->rows.num_columns * kBytes);
  char* const data = static_cast<char*>(table->rows.data) + lane * 16;
  float* const state = step.rule == RowRule::kRowWiseAdagrad ? table->state.momentum1 : nullptr;
  const float rate = step.rate;
  const float eps = step.eps;
  const float kept = step.decay != 0.0F ? 1.0F - step.rate * step.decay : 1.0F;
  const std::uint32_t per_round = static_cast<std::uint32_t>(lanes) * kPerLane;
  const std::uint32_t num_rounds =
      __reduce_max_sync(~0U, (end - begin + per_round - 1) / per_round);
  std::uint32_t* const rows_here = round.row + first * kPerLane;
  float* const moves_here = round.move + first * kPerLane;
  for (std::uint32_t r = 0; r < num_rounds; ++r) {
    std::uint32_t row[kPerLane];
    bool is_single[kPerLane];
    float factor[kPerLane];
    int place[kPerLane];
    float h[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const std::uint32_t position = begin + r * per_round + i * lanes + lane;
      row[i] = position < end ? keys[position] : ~0U;
      factor[i] = 1.0F;
      if (call.ids.weights != nullptr && position < end) factor[i] = call.ids.weights[position];
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      is_single[i] = row[i] != ~0U && !marks.is_again(row[i]);
      row[i] -= first_key;
    }
    int count = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const unsigned all = __ballot_sync(~0U, is_single[i]);
      const unsigned mine = lanes == 32 ? all : all >> first & ((1U << lanes) - 1U);
      place[i] = count + __popc(mine & ((1U << lane) - 1U));
      count += __popc(mine);
      h[i] = 0;
      if (is_single[i]) {
        rows_here[place[i]] = row[i];
        if (state != nullptr) h[i] = state[row[i]];
      }
    }
    __syncwarp();
    const auto address = [&](int i, int p) {
      return data + static_cast<std::uint64_t>(rows_here[i]) * row_bytes + p * lanes * 16;
    };
    // Rows on their way lie in shared memory: in registers there would be room for fewer. A lane
    // reads what it has copied itself.
    const auto load = [&](int i, int u) {
      if (i < count) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (has_part[p]) __pipeline_memcpy_async(&flight[u][p][threadIdx.x], address(i, p), 16);
        }
      }
      __pipeline_commit();
    };
#pragma unroll
    for (int u = 0; u < kFlight; ++u) load(u, u);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (!is_single[i]) continue;
      float row_rate = rate;
      if (state != nullptr) {
        const float sum = h[i] + factor[i] * factor[i] * square;
        row_rate = rate / (sqrtf(sum) + eps);
        state[row[i]] = sum;
      }
      moves_here[place[i]] = row_rate * factor[i];
    }
    __syncwarp();
    for (int base = 0; base < count; base += kFlight) {
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        const int i = base + u;
        if (i >= count) break;
        __pipeline_wait_prior(kFlight - 1);
        const float move = moves_here[i];
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          if (!has_part[p]) continue;
          float w[kCount];
          widen_pack<kElement>(flight[u][p][threadIdx.x], w);
#pragma unroll
          for (int c = 0; c < kCount; ++c) w[c] = kept * w[c] - move * g[p][c];
          if constexpr (kRandom) {
            const std::uint32_t seed = row_seed(step.key, table->state.named_row(rows_here[i]));
            const int column = (p * lanes + lane) * kCount;
            *reinterpret_cast<uint4*>(address(i, p)) = narrow_at_random<kElement>(w, seed, column);
          } else {
            *reinterpret_cast<uint4*>(address(i, p)) = narrow_pack<kElement>(w);
          }
        }
        // The next row is on its way while those behind this one are stepped.
        load(i + kFlight, u);
      }
    }
    __pipeline_wait_prior(0);
    __syncwarp();  // all have read the round
  }
}

}  // namespace

int step_once_rows(const TableCall& call, const std::int32_t* table_of, const std::uint32_t* keys,
                   const RowMarks& marks, const TableSteps* tables, const TableSteps* host_tables,
                   int num_tables, const float* gradient, float limit, cudaStream_t stream) {
  const bool is_aligned = has_packed_gradients(call, gradient);
  const auto start = [&]<Element kElement, int kPacks, bool kRandom>() {
    int lanes = 0;
    for (int i = 0; i < num_tables; ++i) {
      if (!is_once_kind<kElement, kPacks, kRandom>(host_tables[i])) continue;
      const std::int64_t columns = (host_tables[i].rows.num_columns + kPacks - 1) / kPacks;
      lanes = std::max(lanes, lanes_for(columns, kWide<kElement>));
    }
    if (lanes == 0) return;
    const std::int64_t blocks = (call.num_bags * lanes + kThreads - 1) / kThreads;
    once_kernel<kElement, kPacks, kRandom><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
        call, table_of, keys, marks, tables, gradient, limit, is_aligned, lanes);
  };
  start.template operator()<Element::kFloat32, 1, false>();
  start.template operator()<Element::kFloat32, 2, false>();
  start.template operator()<Element::kFloat16, 1, false>();
  start.template operator()<Element::kFloat16, 1, true>();
  start.template operator()<Element::kBFloat16, 1, false>();
  start.template operator()<Element::kBFloat16, 1, true>();
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda

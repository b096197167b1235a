// src/kernels/cpu/softmax_block.h — sums of 2^t over a row, block by block, for the softmax kernels
// of this folder.
//
// One sweep: the axis comes from the first block that has a maximum, and later maxima are taken on
// the way. Only where one lies far above the axis is its block done once more, about that maximum.
// What keeps the sums apart from those about the row's maximum is put right once per row.

#pragma once

#include "kernels/cpu/logit_axis.h"

namespace tessera::kernels {

namespace {

struct RowSums {
  explicit RowSums(float scale_of_row) : scale(scale_of_row) {
    axis.rate = rate_of(scale_of_row, 8);
  }

  float scale;
  Axis<8> axis;
  float center = 0.0F;                 // where t was next to 0 when the axis was chosen
  float next_center = kMinusInfinity;  // where it is to be
  float maximum = kMinusInfinity;
  double sum = 0.0;             // of 2^t
  double weighted = 0.0;        // of 2^t (x - center)
  double total = 0.0;           // of x
  std::int64_t best_block = 0;  // where the maximum was first met
};

/// Sums over the lanes of a run of vectors.
template <bool kExtras>
struct Lanes {
  Floats sum{};
};
template <>
struct Lanes<true> {
  Floats sum{};
  Floats weighted{};
  Floats total{};
};

/// Adds one vector, and with kKeep or kExtras returns its powers.
template <bool kKeep, bool kExtras, bool kFar>
inline Floats add_vector(Floats x, const Powers<kFar>& powers, Floats center,
                         Lanes<kExtras>& lanes) {
  const Floats limit = powers.limited(x);
  if constexpr (kExtras || kKeep) {
    const Floats power = powers.plus(limit, Floats{});
    lanes.sum += power;
    // Of a limited logit the distance is finite, so that a power of 0 counts 0.
    if constexpr (kExtras) lanes.weighted += power * (kFar ? limit : limit - center);
    return power;
  } else {
    lanes.sum = powers.plus(limit, lanes.sum);
    return Floats{};
  }
}

template <typename Form>
float maximum_of(const typename Form::Stored* x, std::int64_t count) {
  Pair top{splat(kMinusInfinity), splat(kMinusInfinity)};
  for (std::int64_t i = 0; i < count; i += kPair) {
    const Pair p = i + kPair <= count ? Form::load(x + i) : load_part<Form>(x + i, count - i);
    top = {larger(top.a, p.a), larger(top.b, p.b)};
  }
  return largest_of(larger(top.a, top.b));
}

/// Moves the sums of a row to the axis about its next center.
inline void move_axis(RowSums& row) {
  const Axis<8> axis = Axis<8>::about(row.next_center, row.axis.rate);
  if (row.maximum != kMinusInfinity) {
    const double by = __builtin_exp2(row.axis.offset() - axis.offset());
    const double further = static_cast<double>(row.center) - static_cast<double>(row.next_center);
    row.weighted = by * (row.weighted + further * row.sum);
    row.sum *= by;
  }
  row.axis = axis;
  row.center = row.next_center;
}

/// Where the powers of a row are kept: filled up to whole blocks, and for each block what its axis
/// takes off, -inf if all powers are 0.
struct Kept {
  float* powers = nullptr;
  double* offsets = nullptr;
};

// Where there is +inf the sums are NaN on any axis.
inline bool is_finite(float top) { return top != kMinusInfinity && top != -kMinusInfinity; }

/// Adds the blocks from column `start` on, and returns the column of the first that was not added:
/// it is wanted on the axis about the row's next center, if it has one.
template <typename Form, bool kExtras, bool kKeep, bool kFar>
std::int64_t add_blocks(const typename Form::Stored* x, std::int64_t start, std::int64_t count,
                        const Powers<kFar>& powers, const Kept& kept, RowSums& row) {
  // Many powers are added: this is far below the largest float. Where distances from the center
  // are taken, a long one is rounded, and would cancel in the end.
  constexpr double kMost = kExtras || !TESSERA_FUSED_POWERS ? 2.0 : 32.0;
  // Such runs are summed first: of equal terms the roundings go one way, the further the longer.
  constexpr std::int64_t kRun = 16 * kPair;
  const Floats center = splat(row.center);
  Pair tops{splat(kMinusInfinity), splat(kMinusInfinity)};
  DoubleLanes sum;
  DoubleLanes weighted;
  DoubleLanes total;
  for (; start < count; start += Form::kBlock) {
    const std::int64_t end = count - start < Form::kBlock ? count : start + Form::kBlock;
    Lanes<kExtras> block;
    double last = 0.0;  // of the logits in part of a vector
    std::int64_t i = start;
    while (i < end) {
      Lanes<kExtras> even;
      Lanes<kExtras> odd;
      const auto add = [&](Pair p) {
        tops = {larger(tops.a, p.a), larger(tops.b, p.b)};
        const Pair pair{add_vector<kKeep>(p.a, powers, center, even),
                        add_vector<kKeep>(p.b, powers, center, odd)};
        if constexpr (kKeep) SingleForm::store(kept.powers + i, pair, false);
      };
      const std::int64_t run_end = end - i < kRun ? end : i + kRun;
#pragma GCC unroll 4  // more of them at work at a time; the sums keep their order
      for (; i + kPair <= run_end; i += kPair) {
        prefetch_ahead(x + i + Form::kBlock);
        const Pair p = Form::load(x + i);
        add(p);
        if constexpr (kExtras) {
          even.total += p.a;
          odd.total += p.b;
        }
      }
      if (i < run_end) {
        add(load_part<Form>(x + i, run_end - i));
        if constexpr (kExtras) {
          for (std::int64_t j = i; j < end; ++j) last += static_cast<double>(Form::widen(x[j]));
        }
        i = run_end;
      }
      block.sum += even.sum + odd.sum;
      if constexpr (kExtras) {
        block.weighted += even.weighted + odd.weighted;
        block.total += even.total + odd.total;
      }
    }
    const Floats top = larger(tops.a, tops.b);
    if (any_greater(top, splat(row.maximum))) {
      const float maximum = largest_of(top);
      if (is_finite(maximum) && row.axis.at(maximum) > kMost) {
        row.next_center = maximum;
        break;
      }
      row.maximum = maximum;
      row.best_block = start;
    }
    sum += block.sum;
    if constexpr (kExtras) {
      weighted += block.weighted;
      total += block.total;
      row.total += last;
    }
    const bool counts = row.maximum != kMinusInfinity;
    if constexpr (kKeep) {
      const double nothing = static_cast<double>(kMinusInfinity);
      kept.offsets[start / Form::kBlock] = counts ? row.axis.offset() : nothing;
    }
    if (!counts) {  // then there is no axis yet
      start = end;
      break;
    }
  }
  row.sum += sum.total();
  if constexpr (kExtras) {
    row.weighted += weighted.total();
    row.total += total.total();
  }
  return start;
}

template <typename Form, bool kExtras, bool kKeep>
RowSums sums_of_row(const typename Form::Stored* x, std::int64_t count, float scale,
                    const Kept& kept) {
  RowSums row(scale);
  std::int64_t start = 0;
  while (start < count) {
    if (row.maximum == kMinusInfinity) {
      const std::int64_t left = count - start;
      row.next_center = maximum_of<Form>(x + start, left < Form::kBlock ? left : Form::kBlock);
    }
    if (is_finite(row.next_center)) move_axis(row);
    with_powers(row.axis, [&](const auto& powers) {
      start = add_blocks<Form, kExtras, kKeep>(x, start, count, powers, kept, row);
    });
  }
  return row;
}

/// The sums about the row's maximum: of exp(d) and of exp(d) d, where d = scale (x - maximum), and
/// the factor that makes exp(d) of the powers on the row's axis.
struct AtMaximum {
  double sum;
  double weighted;
  double factor;
};
inline AtMaximum at_maximum(const RowSums& row) {
  if (row.maximum == kMinusInfinity) return {row.sum, row.weighted, 1.0};
  double own = 0.0;  // what the sweep gave for the maximum itself
  with_powers(row.axis, [&](const auto& powers) {
    own = static_cast<double>(powers.plus(powers.limited(splat(row.maximum)), Floats{})[0]);
  });
  // Its true part is 1: where it is nearly all there is, the sum has no error of a power.
  const double others = row.sum - own;
  const double factor = __builtin_exp2(-row.axis.at(row.maximum));
  const double above = static_cast<double>(row.maximum) - static_cast<double>(row.center);
  const double weighted =
      static_cast<double>(row.scale) * factor * ((row.weighted - own * above) - above * others);
  return {1.0 + factor * others, weighted > 0.0 ? 0.0 : weighted, factor};
}

}  // namespace

}  // namespace tessera::kernels

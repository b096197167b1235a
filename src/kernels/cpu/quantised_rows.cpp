// Rows in few bits. Compiled once per instruction set, without contraction of products and sums;
// see kernels/CMakeLists.txt and the note at the top of reduce.cpp.

#include "kernels/quantised_rows.h"

#include "kernels/cpu/row_vector.h"

namespace tessera::kernels {
namespace {

// Columns are taken 16 at a time, on every level.
constexpr int kGroup = 16;
constexpr int kVectors = kGroup / kLanes;

typedef std::uint8_t Bytes __attribute__((vector_size(16)));
typedef std::uint8_t LaneBytes __attribute__((vector_size(kLanes)));

typedef std::uint64_t LongPair __attribute__((vector_size(16)));

// Into a register at once: bytes that pass through memory wait there for each other.
inline Bytes load_16(const std::uint8_t* from) {
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}
#if !defined(__AVX512F__)
inline Bytes load_8(const std::uint8_t* from) {
  std::uint64_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  return bits_as<Bytes>(LongPair{word, 0});
}
#endif
inline Bytes load_4(const std::uint8_t* from) {
  std::uint32_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  return bits_as<Bytes>(LongPair{word, 0});
}

/// a[0], b[0], a[1], b[1], ... of the first eight.
inline Bytes in_turns(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

inline void widen_bytes(Bytes bytes, Floats* to) {
#if defined(__AVX512F__)
  to[0] = bits_as<Floats>(_mm512_maskz_cvtepi32_ps(
      0xFFFF, _mm512_maskz_cvtepu8_epi32(0xFFFF, bits_as<__m128i>(bytes))));
#elif defined(__AVX2__)
  const __m128i low = bits_as<__m128i>(bytes);
  to[0] = bits_as<Floats>(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low)));
  to[1] = bits_as<Floats>(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(low, 8))));
#else
  for (int v = 0; v < kVectors; ++v) {
    LaneBytes part;
    __builtin_memcpy(&part, reinterpret_cast<const char*>(&bytes) + v * kLanes, kLanes);
    to[v] = __builtin_convertvector(__builtin_convertvector(part, Ints), Floats);
  }
#endif
}

// How a row's numbers are stored. `load` takes 16 columns, `at` one.
template <typename Stored, typename Element>
struct PlainForm {
  static constexpr bool kHasScale = false;
  static constexpr bool kHasBias = false;
  static constexpr int kGroupBytes = kGroup * sizeof(Stored);
  static void load(const std::uint8_t* from, Floats* to) {
    for (int v = 0; v < kVectors; ++v) {
      to[v] = Element::load(reinterpret_cast<const Stored*>(from) + v * kLanes);
    }
  }
  static float at(const std::uint8_t* codes, std::int64_t c) {
    Stored stored;
    __builtin_memcpy(&stored, codes + c * static_cast<std::int64_t>(sizeof(Stored)),
                     sizeof(Stored));
    return Element::widen(stored);
  }
};
using FloatRows = PlainForm<float, SingleRow>;
using HalfRows = PlainForm<std::uint16_t, HalfRow>;
using BrainRows = PlainForm<std::uint16_t, BrainRow>;

struct CodeForm {
  static constexpr bool kHasScale = true;
  static constexpr bool kHasBias = true;
};

struct ByteCodes : CodeForm {
  static constexpr int kGroupBytes = 16;
  static void load(const std::uint8_t* from, Floats* to) { widen_bytes(load_16(from), to); }
  static float at(const std::uint8_t* codes, std::int64_t c) {
    return static_cast<float>(static_cast<std::int32_t>(codes[c]));
  }
};

struct NibbleCodes : CodeForm {
  static constexpr int kGroupBytes = 8;
  static void load(const std::uint8_t* from, Floats* to) {
#if defined(__AVX512F__)
    // Each lane brings its nibble down, and reads the number that belongs to its four lowest bits.
    std::int32_t first = 0;
    std::int32_t second = 0;
    __builtin_memcpy(&first, from, sizeof(first));
    __builtin_memcpy(&second, from + 4, sizeof(second));
    const __m512i eight_of_each = _mm512_mask_set1_epi32(_mm512_set1_epi32(first), 0xFF00, second);
    const __m512i places =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512 levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    to[0] = bits_as<Floats>(_mm512_maskz_permutexvar_ps(
        0xFFFF, _mm512_maskz_srlv_epi32(0xFFFF, eight_of_each, places), levels));
#else
    const Bytes bytes = load_8(from);
    widen_bytes(in_turns(bytes & 15, bytes >> 4), to);
#endif
  }
  static float at(const std::uint8_t* codes, std::int64_t c) {
    return static_cast<float>((codes[c / 2] >> (c % 2 * 4)) & 15);
  }
};

struct PairCodes : CodeForm {
  static constexpr int kGroupBytes = 4;
  static void load(const std::uint8_t* from, Floats* to) {
    const Bytes bytes = load_4(from);
    // Codes 0 and 2 of each byte, and 1 and 3: their turns are those of all four.
    const Bytes even = in_turns(bytes & 3, (bytes >> 4) & 3);
    const Bytes odd = in_turns((bytes >> 2) & 3, bytes >> 6);
    widen_bytes(in_turns(even, odd), to);
  }
  static float at(const std::uint8_t* codes, std::int64_t c) {
    return static_cast<float>((codes[c / 4] >> (c % 4 * 2)) & 3);
  }
};

struct EighthCodes {
  static constexpr bool kHasScale = true;
  static constexpr bool kHasBias = false;
  static constexpr int kGroupBytes = 16;
  // As HalfForm::widened: the exponent is 120 too small.
  static Floats widened(Words bits) {
    const Words magnitude = (bits & 0x7FU) << 20;
    const Words sign = (bits & 0x80U) << 24;
    const Words scaled = bits_as<Words>(bits_as<Floats>(magnitude) * 0x1p120F);
    const Words finite = magnitude == (0x7FU << 20) ? Words{} + 0x7FC00000U : scaled;
    return bits_as<Floats>(finite | sign);
  }
  static void load(const std::uint8_t* from, Floats* to) {
    for (int v = 0; v < kVectors; ++v) {
      LaneBytes part;
      __builtin_memcpy(&part, from + v * kLanes, kLanes);
      to[v] = widened(__builtin_convertvector(part, Words));
    }
  }
  static float at(const std::uint8_t* codes, std::int64_t c) {
    return widened(Words{} + static_cast<std::uint32_t>(codes[c]))[0];
  }
};

/// Calls `body(form)` for the form of the type.
template <typename Body>
TESSERA_INLINE_ALWAYS auto with_form_of(RowType type, const Body& body) {
  switch (type) {
    case RowType::kFloat16:
      return body(HalfRows{});
    case RowType::kBFloat16:
      return body(BrainRows{});
    case RowType::kInt8:
      return body(ByteCodes{});
    case RowType::kInt4:
      return body(NibbleCodes{});
    case RowType::kInt2:
      return body(PairCodes{});
    case RowType::kFloat8:
      return body(EighthCodes{});
    default:
      return body(FloatRows{});
  }
}

inline float half_at(const std::uint8_t* from) {
  std::uint16_t bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return HalfRow::widen(bits);
}

inline void put_half(std::uint8_t* to, std::uint16_t bits) {
  __builtin_memcpy(to, &bits, sizeof(bits));
}

template <typename Form>
inline float scale_of(const std::uint8_t* row) {
  return Form::kHasScale ? half_at(row) : 1.0F;
}
template <typename Form>
inline float bias_of(const std::uint8_t* row) {
  return Form::kHasBias ? half_at(row + 2) : 0.0F;
}
template <typename Form>
constexpr std::int64_t kHead = Form::kHasScale ? 4 : 0;

// ---- Quantising: one pass for the range, one for the codes. Left to the compiler's vectoriser.

constexpr float kRounder = 0x1.8p23F;  // adding it leaves the nearest integer in the low bits

inline bool is_infinite(float x) { return __builtin_fabsf(x) == __builtin_inff(); }

inline float usable_scale(float wanted) {
  const float scale = HalfRow::widen(HalfRow::narrow(wanted));
  return scale == 0.0F || is_infinite(1.0F / scale) ? 1.0F : scale;
}

std::uint8_t look_over(const float* values, std::int64_t count, float* least, float* largest) {
  float low = __builtin_inff();
  float high = -__builtin_inff();
  std::int32_t num_nan = 0;
  for (std::int64_t c = 0; c < count; ++c) {
    low = values[c] < low ? values[c] : low;
    high = values[c] > high ? values[c] : high;
    num_nan += values[c] != values[c] ? 1 : 0;
  }
  if (low > high) low = high = 0;
  *least = low;
  *largest = high;
  std::uint8_t faults = num_nan > 0 ? kRowNan : kRowFine;
  if (is_infinite(low) || is_infinite(high)) faults |= kRowOverflow;
  return faults;
}

template <int kBits>
std::uint8_t quantise_codes(const float* values, std::int64_t count, std::uint8_t* row) {
  float least = 0;
  float largest = 0;
  std::uint8_t faults = look_over(values, count, &least, &largest);
  const std::uint16_t bias_bits = HalfRow::narrow(least);
  const float bias = HalfRow::widen(bias_bits);
  const float range = largest - bias;
  constexpr auto kMost = static_cast<float>((1 << kBits) - 1);
  const float wanted = range == 0.0F ? 1.0F : range / kMost;
  const float scale = usable_scale(wanted);
  if (is_infinite(bias) || is_infinite(scale) || scale != scale) faults |= kRowOverflow;
  if (largest > least && HalfRow::widen(HalfRow::narrow(wanted)) == 0.0F) faults |= kRowTinyRange;
  put_half(row, HalfRow::narrow(scale));
  put_half(row + 2, bias_bits);
  const float inverse = 1.0F / scale;
  const auto code = [=](float x) {
    float level = (x - bias) * inverse;
    level = level > 0.0F ? level : 0.0F;
    level = level < kMost ? level : kMost;
    return static_cast<std::uint8_t>(static_cast<std::int32_t>((level + kRounder) - kRounder));
  };
  std::uint8_t* codes = row + 4;
  constexpr int kPerByte = 8 / kBits;
  const std::int64_t whole = count / kPerByte;
  for (std::int64_t i = 0; i < whole; ++i) {
    std::uint8_t byte = 0;
    for (int k = 0; k < kPerByte; ++k) {
      byte |= static_cast<std::uint8_t>(code(values[i * kPerByte + k]) << (k * kBits));
    }
    codes[i] = byte;
  }
  if (whole * kPerByte < count) {
    std::uint8_t byte = 0;
    for (std::int64_t c = whole * kPerByte; c < count; ++c) {
      byte |= static_cast<std::uint8_t>(code(values[c]) << ((c - whole * kPerByte) * kBits));
    }
    codes[whole] = byte;
  }
  return faults;
}

inline std::uint8_t narrow_to_eighth(float x) {
  const std::uint32_t sign = (bits_as<std::uint32_t>(x) >> 24) & 0x80U;
  float magnitude = __builtin_fabsf(x);
  if (magnitude != magnitude) return 0;
  magnitude = magnitude < 448.0F ? magnitude : 448.0F;
  std::uint32_t code = 0;
  if (magnitude < 0x1p-6F) {  // in steps of 2^-9
    code = bits_as<std::uint32_t>(magnitude + 0x1.8p14F) - bits_as<std::uint32_t>(0x1.8p14F);
  } else {
    const auto bits = bits_as<std::uint32_t>(magnitude);
    code = (bits - (120U << 23) + 0x7FFFFU + ((bits >> 20) & 1U)) >> 20;
  }
  return static_cast<std::uint8_t>(sign | code);
}

std::uint8_t quantise_eighths(const float* values, std::int64_t count, std::uint8_t* row) {
  float least = 0;
  float largest = 0;
  std::uint8_t faults = look_over(values, count, &least, &largest);
  largest = -least > largest ? -least : largest;
  largest = largest > 0.0F ? largest : 0.0F;
  const float wanted = largest == 0.0F ? 1.0F : largest / 448.0F;
  const float scale = usable_scale(wanted);
  if (is_infinite(scale)) faults |= kRowOverflow;
  if (largest > 0.0F && HalfRow::widen(HalfRow::narrow(wanted)) == 0.0F) faults |= kRowTinyRange;
  put_half(row, HalfRow::narrow(scale));
  put_half(row + 2, 0);
  const float inverse = 1.0F / scale;
  for (std::int64_t c = 0; c < count; ++c) row[4 + c] = narrow_to_eighth(values[c] * inverse);
  return faults;
}

template <typename Element>
std::uint8_t quantise_shorts(const float* values, std::int64_t count, std::uint16_t infinity,
                             std::uint8_t* row) {
  std::int32_t num_nan = 0;
  std::int32_t num_infinite = 0;
  for (std::int64_t c = 0; c < count; ++c) {
    const std::uint16_t bits = Element::narrow(values[c]);
    num_nan += values[c] != values[c] ? 1 : 0;
    num_infinite += (bits & 0x7FFFU) == infinity ? 1 : 0;
    put_half(row + 2 * c, bits);
  }
  return static_cast<std::uint8_t>((num_nan > 0 ? kRowNan : 0) |
                                   (num_infinite > 0 ? kRowOverflow : 0));
}

std::uint8_t quantise(RowType type, const float* values, std::int64_t count, std::uint8_t* row) {
  switch (type) {
    case RowType::kFloat16:
      return quantise_shorts<HalfRow>(values, count, 0x7C00, row);
    case RowType::kBFloat16:
      return quantise_shorts<BrainRow>(values, count, 0x7F80, row);
    case RowType::kInt8:
      return quantise_codes<8>(values, count, row);
    case RowType::kInt4:
      return quantise_codes<4>(values, count, row);
    case RowType::kInt2:
      return quantise_codes<2>(values, count, row);
    case RowType::kFloat8:
      return quantise_eighths(values, count, row);
    default: {
      float least = 0;
      float largest = 0;
      __builtin_memcpy(row, values, static_cast<unsigned long>(count) * sizeof(float));
      return look_over(values, count, &least, &largest);
    }
  }
}

// ---- Reading

/// Writes weight * (code * scale + bias) of a row; `scale` and `bias` have the weight in them.
template <typename Form>
inline void put_row(const std::uint8_t* row, float scale, float bias, std::int64_t count,
                    float* to) {
  const std::uint8_t* codes = row + kHead<Form>;
  const std::int64_t whole = count / kGroup * kGroup;
  for (std::int64_t c = 0; c < whole; c += kGroup, codes += Form::kGroupBytes) {
    Floats numbers[kVectors];
    Form::load(codes, numbers);
    for (int v = 0; v < kVectors; ++v) {
      const Floats product = numbers[v] * scale;
      store(to + c + v * kLanes, Form::kHasBias ? product + bias : product);
    }
  }
  for (std::int64_t c = whole; c < count; ++c) {
    const float product = Form::at(row + kHead<Form>, c) * scale;
    to[c] = Form::kHasBias ? product + bias : product;
  }
}

void dequantise(RowType type, const std::uint8_t* row, std::int64_t count, float* values) {
  with_form_of(type, [&](auto form) {
    using Form = decltype(form);
    put_row<Form>(row, scale_of<Form>(row), bias_of<Form>(row), count, values);
  });
}

/// How many rows ahead to fetch: as rows_ahead, but short rows farther, since more of them are
/// awaited at once.
inline std::int64_t short_rows_ahead(std::int64_t bytes_per_row) {
  const std::int64_t rows = 128 * kLineBytes / (bytes_per_row + kLineBytes - 1);
  return rows > 32 ? (rows < 64 ? rows : 64) : rows_ahead(bytes_per_row);
}

// Finds rows, and asks for those that come later. `kBytes` > 0: of that many bytes that are read.
template <int kBytes>
struct Walk {
  Walk(const QuantisedRows& rows, const QuantisedBags& bags)
      : rows(rows),
        ids(bags.ids),
        first(bags.offsets[0]),
        last(bags.offsets[bags.num_bags]),
        ahead(short_rows_ahead(kBytes > 0 ? kBytes : rows.row_bytes)) {
    for (std::int64_t k = first; k < first + ahead; ++k) fetch(k);
  }
  TESSERA_INLINE_ALWAYS void fetch(std::int64_t k) const {
    if (k >= last) return;
    const auto id = static_cast<std::uint64_t>(ids[k]);
    if (id >= static_cast<std::uint64_t>(rows.num_rows)) return;
    const std::uint8_t* row = rows.data + static_cast<std::int64_t>(id) * rows.row_bytes;
    if constexpr (kBytes == 0) {
      prefetch(row, rows.row_bytes);
    } else {
      constexpr int kLines = (kBytes + kLineBytes - 1) / kLineBytes;
      constexpr int kHalf = (kLines + 1) / 2;
#pragma GCC unroll 16
      for (int i = 0; i < kHalf; ++i) {
        if (kHalf + i < kLines) prefetch_line(row + (kHalf + i) * kLineBytes);
        prefetch_line(row + i * kLineBytes);
      }
      // Rows begin at multiples of 4: where 4 bytes are left, they lie in the line of the first.
      if constexpr (kBytes % kLineBytes != 4) {
        if ((reinterpret_cast<std::uintptr_t>(row) & (kLineBytes - 1)) != 0) {
          prefetch_line(row + kBytes - 1);
        }
      }
    }
  }
  /// Null for an id that is not a row.
  TESSERA_INLINE_ALWAYS const std::uint8_t* row(std::int64_t k) const {
    fetch(k + ahead);
    const auto id = static_cast<std::uint64_t>(ids[k]);
    if (id >= static_cast<std::uint64_t>(rows.num_rows)) return nullptr;
    return rows.data + static_cast<std::int64_t>(id) * rows.row_bytes;
  }

  const QuantisedRows& rows;
  const std::int64_t* ids;
  std::int64_t first;
  std::int64_t last;
  std::int64_t ahead;
};

// The order in which the groups of a row are read: pairs from both ends towards the middle. Read
// from front to back, three lines are a stream to the processor, which then fetches lines behind
// the row that nobody wants: a row of 256 bytes took half as long again. (Lines are asked for out
// of order for the same reason.)
constexpr int group_in_turn(int turn, int num_groups) {
  if (num_groups < 4) return turn;
  const int from_end = turn / 4 * 2;
  return turn % 4 < 2 ? num_groups - 1 - from_end - turn % 2 : from_end + 1 - turn % 2;
}

// Adds codes times scale. Without weights the product is exact (11 bits times 8), so one
// instruction for both gives the same bits.
template <typename Form, bool kWeighted>
TESSERA_INLINE_ALWAYS Floats added(Floats sum, Floats codes, Floats scale) {
  if constexpr (!Form::kHasScale && !kWeighted) return sum + codes;
#if defined(__AVX512F__)
  if constexpr (!kWeighted) return bits_as<Floats>(_mm512_fmadd_ps(codes, scale, sum));
#elif defined(__AVX2__)
  if constexpr (!kWeighted) return bits_as<Floats>(_mm256_fmadd_ps(codes, scale, sum));
#endif
  const Floats product = codes * scale;
  return sum + product;
}

// `kGroups` > 0: rows of exactly so many groups, whose sums stay in registers.
template <typename Form, bool kWeighted, int kGroups>
std::int64_t pool_rows(const QuantisedRows& rows, const QuantisedBags& bags, float* output,
                       std::int64_t stride) {
  const Walk<kGroups == 0 ? 0 : kHead<Form> + kGroups * Form::kGroupBytes> walk(rows, bags);
  const std::int64_t count = rows.num_columns;
  const std::int64_t whole = kGroups > 0 ? kGroups * kGroup : count / kGroup * kGroup;
  for (std::int64_t b = 0; b < bags.num_bags; ++b) {
    float* to = output + b * stride;
    const std::int64_t first = bags.offsets[b];
    const std::int64_t last = bags.offsets[b + 1];
    constexpr int kSums = kGroups > 0 ? kGroups * kVectors : 1;
    Floats sums[kSums] = {};
    if constexpr (kGroups == 0) {
      for (std::int64_t c = 0; c < count; ++c) to[c] = 0;
    }
    float biases = 0;
    for (std::int64_t k = first; k < last; ++k) {
      const std::uint8_t* row = walk.row(k);
      if (row == nullptr) return k;
      float scale = scale_of<Form>(row);
      float bias = bias_of<Form>(row);
      if constexpr (kWeighted) {
        scale *= bags.weights[k];
        bias *= bags.weights[k];
      }
      biases += bias;
      const Floats scales = splat(scale);
      const std::uint8_t* codes = row + kHead<Form>;
      if constexpr (kGroups > 0) {
#pragma GCC unroll 16
        for (int turn = 0; turn < kGroups; ++turn) {
          const int g = group_in_turn(turn, kGroups);
          Floats numbers[kVectors];
          Form::load(codes + g * Form::kGroupBytes, numbers);
          for (int v = 0; v < kVectors; ++v) {
            Floats& sum = sums[g * kVectors + v];
            sum = added<Form, kWeighted>(sum, numbers[v], scales);
          }
        }
      } else {
        for (std::int64_t c = 0; c < whole; c += kGroup) {
          Floats numbers[kVectors];
          Form::load(codes + c / kGroup * Form::kGroupBytes, numbers);
          for (int v = 0; v < kVectors; ++v) {
            float* at = to + c + v * kLanes;
            store(at, added<Form, kWeighted>(SingleRow::load(at), numbers[v], scales));
          }
        }
        for (std::int64_t c = whole; c < count; ++c) {
          const float product = Form::at(codes, c) * scale;
          to[c] += product;
        }
      }
    }
    const float factor =
        bags.is_mean && last > first ? 1.0F / static_cast<float>(last - first) : 1.0F;
    const bool has_bias = Form::kHasBias && last > first;
    if constexpr (kGroups > 0) {
      for (int i = 0; i < kSums; ++i) {
        const Floats sum = has_bias ? sums[i] + biases : sums[i];
        store(to + i * kLanes, sum * factor);
      }
    } else {
      for (std::int64_t c = 0; c < count; ++c) {
        const float sum = has_bias ? to[c] + biases : to[c];
        to[c] = sum * factor;
      }
    }
  }
  return -1;
}

template <typename Form, bool kWeighted>
std::int64_t pool_by_width(const QuantisedRows& rows, const QuantisedBags& bags, float* output,
                           std::int64_t stride) {
  switch (rows.num_columns) {
    case 16:
      return pool_rows<Form, kWeighted, 1>(rows, bags, output, stride);
    case 32:
      return pool_rows<Form, kWeighted, 2>(rows, bags, output, stride);
    case 64:
      return pool_rows<Form, kWeighted, 4>(rows, bags, output, stride);
    case 128:
      return pool_rows<Form, kWeighted, 8>(rows, bags, output, stride);
    case 256:
      return pool_rows<Form, kWeighted, 16>(rows, bags, output, stride);
    default:
      return pool_rows<Form, kWeighted, 0>(rows, bags, output, stride);
  }
}

std::int64_t pooled(const QuantisedRows& rows, const QuantisedBags& bags, float* output,
                    std::int64_t stride) {
  return with_form_of(rows.type, [&](auto form) {
    using Form = decltype(form);
    return bags.weights == nullptr ? pool_by_width<Form, false>(rows, bags, output, stride)
                                   : pool_by_width<Form, true>(rows, bags, output, stride);
  });
}

template <typename Form>
std::int64_t copy_rows(const QuantisedRows& rows, const QuantisedBags& bags, float* output,
                       std::int64_t stride) {
  const Walk<0> walk(rows, bags);
  for (std::int64_t k = walk.first; k < walk.last; ++k) {
    const std::uint8_t* row = walk.row(k);
    if (row == nullptr) return k;
    const float weight = bags.weights == nullptr ? 1.0F : bags.weights[k];
    put_row<Form>(row, weight * scale_of<Form>(row), weight * bias_of<Form>(row), rows.num_columns,
                  output + (k - walk.first) * stride);
  }
  return -1;
}

std::int64_t sequence(const QuantisedRows& rows, const QuantisedBags& bags, float* output,
                      std::int64_t stride) {
  return with_form_of(
      rows.type, [&](auto form) { return copy_rows<decltype(form)>(rows, bags, output, stride); });
}

}  // namespace

extern const QuantisedRowKernels TESSERA_KERNEL_TABLE(kQuantisedRows);
const QuantisedRowKernels TESSERA_KERNEL_TABLE(kQuantisedRows){quantise, dequantise, pooled,
                                                               sequence};

}  // namespace tessera::kernels

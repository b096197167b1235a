// Vectorised reductions. Compiled once per instruction set; see kernels/CMakeLists.txt. Only the
// table at the end is visible outside, and no inline function of the standard library is called:
// the linker could otherwise pick an AVX copy of it for code that runs on every CPU.

#include "kernels/reduce.h"

#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// Vectors of the width of the instruction set, as the compiler's own vector types: the same
// operators then serve numbers and vectors, and no alias analysis stands between a reduction in
// place and vector code. A loop left to the compiler falls back to one element at a time when a
// destination is one of the sources.
#if defined(__AVX512F__)
#define TESSERA_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define TESSERA_VECTOR_BYTES 32
#else
#define TESSERA_VECTOR_BYTES 16
#endif
#define TESSERA_INLINE inline __attribute__((always_inline))

namespace tessera::kernels {

namespace {

struct Half {
  std::uint16_t bits;
};
struct Brain {
  std::uint16_t bits;
};

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

inline float widen(Brain x) { return bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

inline Brain narrow_to_brain(float value) {
  const auto bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x40U;
  return {static_cast<std::uint16_t>(value != value ? quiet : rounded)};
}

inline float widen(Half x) {
  // Moves exponent and fraction to their places in a float whose exponent is 112 too small, and
  // multiplies by 2^112: subnormals come out right without a branch. Infinity and NaN need the
  // largest exponent instead.
  const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7FFFU) << 13;
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000U) << 16;
  const float scaled = bit_cast<float>(magnitude) * 0x1p112F;
  const std::uint32_t special = magnitude | 0x7F800000U;
  const std::uint32_t bits =
      magnitude >= (0x7C00U << 13) ? special : bit_cast<std::uint32_t>(scaled);
  return bit_cast<float>(bits | sign);
}

inline Half narrow_to_half(float value) {
  const auto bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  // Below 2^-14 the result is subnormal: adding 0.5 makes the float's own rounding drop the bits.
  const std::uint32_t small =
      bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5F) - 0x3F000000U;
  const std::uint32_t normal =
      (magnitude - (112U << 23) + 0x0FFFU + ((magnitude >> 13) & 1U)) >> 13;
  const std::uint32_t finite = magnitude < 0x38800000U ? small : normal;
  const std::uint32_t large =
      magnitude > 0x7F800000U ? (0x7E00U | ((magnitude >> 13) & 0x3FFU)) : 0x7C00U;
  // 65520 is the first value that rounds to infinity.
  return {static_cast<std::uint16_t>(sign | (magnitude >= 0x477FF000U ? large : finite))};
}

/// What a reduction does to two numbers or two vectors.
struct Sum {
  template <typename T>
  static TESSERA_INLINE T apply(T a, T b) {
    return a + b;
  }
};
struct Product {
  template <typename T>
  static TESSERA_INLINE T apply(T a, T b) {
    // Narrow numbers would be multiplied as int, which their product may not fit.
    if constexpr (std::is_integral_v<T> && sizeof(T) < sizeof(int)) {
      return static_cast<T>(1U * a * b);
    } else {
      return a * b;
    }
  }
};
struct Min {
  template <typename T>
  static TESSERA_INLINE T apply(T a, T b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct Max {
  template <typename T>
  static TESSERA_INLINE T apply(T a, T b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};
struct Band {
  template <typename T>
  static TESSERA_INLINE T apply(T a, T b) {
    return a & b;
  }
};
struct Bor {
  template <typename T>
  static TESSERA_INLINE T apply(T a, T b) {
    return a | b;
  }
};
struct Bxor {
  template <typename T>
  static TESSERA_INLINE T apply(T a, T b) {
    return a ^ b;
  }
};

/// How an element type is stored and combined. Integers add and multiply as unsigned numbers, so
/// that they wrap around.
template <typename T>
struct Plain {
  using Stored = T;
  using Wide = T;
  template <typename V>
  static TESSERA_INLINE V load(V x) {
    return x;
  }
};
/// Any byte but 0 is true, as far as it goes in; what comes out is 0 or 1.
struct Truth {
  using Stored = std::uint8_t;
  using Wide = std::uint8_t;
  template <typename V>
  static TESSERA_INLINE V load(V x) {
    return (x != V{}) ? V{} + 1 : V{};
  }
  static TESSERA_INLINE std::uint8_t load(std::uint8_t x) { return x != 0 ? 1 : 0; }
};
struct HalfPrecision {
  using Stored = Half;
  using Wide = float;
  static Wide load(Half x) { return widen(x); }
  static Half store(Wide x) { return narrow_to_half(x); }
};
struct BrainPrecision {
  using Stored = Brain;
  using Wide = float;
  static Wide load(Brain x) { return widen(x); }
  static Brain store(Wide x) { return narrow_to_brain(x); }
};

constexpr std::int64_t kBlock = 1024;  // elements; the block and its sources stay in the L1 cache

template <typename Form>
inline void load_block(typename Form::Wide* __restrict block,
                       const typename Form::Stored* __restrict source, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) block[i] = Form::load(source[i]);
}

template <typename Form>
inline void store_block(typename Form::Stored* __restrict destination,
                        const typename Form::Wide* __restrict block, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) destination[i] = Form::store(block[i]);
}

#if defined(__F16C__)
template <>
inline void load_block<HalfPrecision>(float* __restrict block, const Half* __restrict source,
                                      std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(block + i, _mm256_cvtph_ps(bits));
  }
  for (; i < count; ++i) block[i] = widen(source[i]);
}

template <>
inline void store_block<HalfPrecision>(Half* __restrict destination, const float* __restrict block,
                                       std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(block + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(destination + i), bits);
  }
  for (; i < count; ++i) destination[i] = narrow_to_half(block[i]);
}
#endif

/// Writes whole cache lines past the cache; the edges go through it.
void copy_streaming(void* destination, const void* source, std::size_t bytes) {
#if defined(__SSE2__)
  auto* to = static_cast<char*>(destination);
  const auto* from = static_cast<const char*>(source);
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(to) & 63U;
  const std::size_t head = misaligned == 0 ? 0 : 64 - misaligned;
  if (bytes < head + 64) {
    __builtin_memcpy(to, from, bytes);
    return;
  }
  __builtin_memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  for (; bytes >= 64; bytes -= 64, to += 64, from += 64) {
    // 1 KiB ahead: 100 MB on two cores in 3.4 ms instead of 4.3 ms where the pages are huge.
    _mm_prefetch(from + 1024, _MM_HINT_T0);
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, b);
#else
    for (int i = 0; i < 4; ++i) {
      const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, a);
    }
#endif
  }
  __builtin_memcpy(to, from, bytes);
#else
  __builtin_memcpy(destination, source, bytes);
#endif
}

void store_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

void copy_bytes(void* destination, const void* source, std::size_t bytes, Store store) {
  if (bytes == 0) return;
  if (store == Store::kCached) {
    __builtin_memcpy(destination, source, bytes);
    return;
  }
  copy_streaming(destination, source, bytes);
  store_fence();
}

/// Arrays of one call, already moved to the first element of a block.
template <typename Form>
struct Arrays {
  using Stored = typename Form::Stored;
  const void* const* sources;
  int num_sources;
  void* const* destinations;
  int num_destinations;

  const Stored* source(int s, std::int64_t first) const {
    return static_cast<const Stored*>(sources[s]) + first;
  }
  Stored* destination(int d, std::int64_t first) const {
    return static_cast<Stored*>(destinations[d]) + first;
  }
};

template <typename Vector, typename T>
TESSERA_INLINE Vector load_vector(const T* source) {
  Vector vector;
  __builtin_memcpy(&vector, source, sizeof(vector));
  return vector;
}

template <typename Vector, typename T>
TESSERA_INLINE void store_vector(T* destination, const Vector& vector, bool is_streaming) {
#if defined(__SSE2__)
  if (is_streaming && (reinterpret_cast<std::uintptr_t>(destination) % sizeof(Vector)) == 0) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination), bit_cast<__m512i>(vector));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(destination), bit_cast<__m256i>(vector));
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(destination), bit_cast<__m128i>(vector));
#endif
    return;
  }
#endif
  __builtin_memcpy(destination, &vector, sizeof(vector));
}

/// Elements [first, last), one at a time.
template <typename Form, typename Op, bool kAverage>
void reduce_elements(const Arrays<Form>& arrays, std::int64_t first, std::int64_t last) {
  using Wide = typename Form::Wide;
  for (std::int64_t i = first; i < last; ++i) {
    Wide total = Form::load(*arrays.source(0, i));
    for (int s = 1; s < arrays.num_sources; ++s) {
      total = Op::template apply<Wide>(total, Form::load(*arrays.source(s, i)));
    }
    if constexpr (kAverage) total /= static_cast<Wide>(arrays.num_sources);
    for (int d = 0; d < arrays.num_destinations; ++d) *arrays.destination(d, i) = total;
  }
}

/// One pass over all sources and destinations, four vectors at a time. `kSources` is the number of
/// sources if it is known at compile time, else 0.
template <typename Form, typename Op, bool kAverage, int kSources>
void reduce_vectors(const Arrays<Form>& arrays, std::int64_t count, Store store) {
  using Wide = typename Form::Wide;
  using Vector [[gnu::vector_size(TESSERA_VECTOR_BYTES)]] = Wide;
  constexpr std::int64_t kLanes = TESSERA_VECTOR_BYTES / sizeof(Wide);
  constexpr std::int64_t kStep = 4 * kLanes;
  const int num_sources = kSources == 0 ? arrays.num_sources : kSources;
  const bool is_streaming = store == Store::kStreaming;
  std::int64_t first = 0;
  if (is_streaming) {
    const auto address = reinterpret_cast<std::uintptr_t>(arrays.destination(0, 0));
    const auto head = static_cast<std::int64_t>((64 - address % 64) % 64 / sizeof(Wide));
    first = head < count ? head : count;
    reduce_elements<Form, Op, kAverage>(arrays, 0, first);
  }
  for (; first + kStep <= count; first += kStep) {
    Vector total[4];
    const auto* start = arrays.source(0, first);
    for (int v = 0; v < 4; ++v) total[v] = Form::load(load_vector<Vector>(start + v * kLanes));
    for (int s = 1; s < num_sources; ++s) {
      const auto* next = arrays.source(s, first);
      for (int v = 0; v < 4; ++v) {
        total[v] = Op::template apply<Vector>(total[v],
                                              Form::load(load_vector<Vector>(next + v * kLanes)));
      }
    }
    if constexpr (kAverage) {
      for (int v = 0; v < 4; ++v) total[v] /= static_cast<Wide>(num_sources);
    }
    for (int d = 0; d < arrays.num_destinations; ++d) {
      auto* end = arrays.destination(d, first);
      for (int v = 0; v < 4; ++v) store_vector(end + v * kLanes, total[v], is_streaming);
    }
  }
  reduce_elements<Form, Op, kAverage>(arrays, first, count);
  if (is_streaming) store_fence();
}

/// For types that are combined in a wider one: a block of sources at a time, in the L1 cache.
template <typename Form, typename Op, bool kAverage>
void reduce_blocks(const Arrays<Form>& arrays, std::int64_t count, Store store) {
  using Wide = typename Form::Wide;
  using Stored = typename Form::Stored;
  alignas(64) Wide total[kBlock];
  alignas(64) Wide next[kBlock];
  alignas(64) Stored result[kBlock];
  for (std::int64_t first = 0; first < count; first += kBlock) {
    const std::int64_t length = count - first < kBlock ? count - first : kBlock;
    load_block<Form>(total, arrays.source(0, first), length);
    for (int s = 1; s < arrays.num_sources; ++s) {
      load_block<Form>(next, arrays.source(s, first), length);
      for (std::int64_t i = 0; i < length; ++i) {
        total[i] = Op::template apply<Wide>(total[i], next[i]);
      }
    }
    if constexpr (kAverage) {
      const auto divisor = static_cast<Wide>(arrays.num_sources);
      for (std::int64_t i = 0; i < length; ++i) total[i] /= divisor;
    }
    store_block<Form>(result, total, length);
    const auto bytes = static_cast<std::size_t>(length) * sizeof(Stored);
    for (int d = 0; d < arrays.num_destinations; ++d) {
      if (store == Store::kStreaming) {
        copy_streaming(arrays.destination(d, first), result, bytes);
      } else {
        __builtin_memcpy(arrays.destination(d, first), result, bytes);
      }
    }
  }
  if (store == Store::kStreaming) store_fence();
}

template <typename Form, typename Op, bool kAverage = false>
void reduce_as(const void* const* sources, int num_sources, void* const* destinations,
               int num_destinations, std::int64_t count, Store store) {
  const Arrays<Form> arrays{sources, num_sources, destinations, num_destinations};
  if constexpr (sizeof(typename Form::Stored) < sizeof(typename Form::Wide)) {
    reduce_blocks<Form, Op, kAverage>(arrays, count, store);
  } else if (num_sources == 2) {
    reduce_vectors<Form, Op, kAverage, 2>(arrays, count, store);
  } else {
    reduce_vectors<Form, Op, kAverage, 0>(arrays, count, store);
  }
}

using ReduceLoop = void (*)(const void* const*, int, void* const*, int, std::int64_t, Store);

template <typename Form>
ReduceLoop floating_loop(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return reduce_as<Form, Sum>;
    case Reduction::kAvg:
      return reduce_as<Form, Sum, true>;
    case Reduction::kMin:
      return reduce_as<Form, Min>;
    case Reduction::kMax:
      return reduce_as<Form, Max>;
    case Reduction::kProduct:
      return reduce_as<Form, Product>;
    default:
      return nullptr;
  }
}

template <typename T, typename Unsigned>
ReduceLoop integer_loop(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return reduce_as<Plain<Unsigned>, Sum>;
    case Reduction::kMin:
      return reduce_as<Plain<T>, Min>;
    case Reduction::kMax:
      return reduce_as<Plain<T>, Max>;
    case Reduction::kProduct:
      return reduce_as<Plain<Unsigned>, Product>;
    case Reduction::kBand:
      return reduce_as<Plain<T>, Band>;
    case Reduction::kBor:
      return reduce_as<Plain<T>, Bor>;
    case Reduction::kBxor:
      return reduce_as<Plain<T>, Bxor>;
    default:
      return nullptr;
  }
}

ReduceLoop truth_loop(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
    case Reduction::kMax:
    case Reduction::kBor:
      return reduce_as<Truth, Bor>;
    case Reduction::kMin:
    case Reduction::kProduct:
    case Reduction::kBand:
      return reduce_as<Truth, Band>;
    case Reduction::kBxor:
      return reduce_as<Truth, Bxor>;
    default:
      return nullptr;
  }
}

ReduceLoop loop_of(Element element, Reduction reduction) {
  switch (element) {
    case Element::kBool:
      return truth_loop(reduction);
    case Element::kUInt8:
      return integer_loop<std::uint8_t, std::uint8_t>(reduction);
    case Element::kInt8:
      return integer_loop<std::int8_t, std::uint8_t>(reduction);
    case Element::kInt16:
      return integer_loop<std::int16_t, std::uint16_t>(reduction);
    case Element::kInt32:
      return integer_loop<std::int32_t, std::uint32_t>(reduction);
    case Element::kInt64:
      return integer_loop<std::int64_t, std::uint64_t>(reduction);
    case Element::kFloat16:
      return floating_loop<HalfPrecision>(reduction);
    case Element::kBFloat16:
      return floating_loop<BrainPrecision>(reduction);
    case Element::kFloat32:
      return floating_loop<Plain<float>>(reduction);
    case Element::kFloat64:
      return floating_loop<Plain<double>>(reduction);
  }
  return nullptr;
}

void reduce_any(Element element, Reduction reduction, const void* const* sources, int num_sources,
                void* const* destinations, int num_destinations, std::int64_t count, Store store) {
  loop_of(element, reduction)(sources, num_sources, destinations, num_destinations, count, store);
}

}  // namespace

extern const ReduceKernels TESSERA_KERNEL_TABLE(kReduceKernels);
const ReduceKernels TESSERA_KERNEL_TABLE(kReduceKernels){reduce_any, copy_bytes};

}  // namespace tessera::kernels

#include "tessera/core/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace tessera::core {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // 0x1EDC6F41, bits reversed

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Table make_table() {
  Table table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) != 0 ? kPolynomial : 0);
    table[0][byte] = sum;
  }
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    for (std::size_t k = 1; k < 8; ++k) {
      table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 0xFF];
    }
  }
  return table;
}

constexpr Table kTable = make_table();

std::uint64_t load_word(const unsigned char* bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, 8);
  return word;
}

// A polynomial of degree 31 over GF(2), bit 31 is x^0. Multiplication modulo the CRC's polynomial.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 0x80000000U; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

// x^(8 n): appending n zero bytes multiplies a sum's remainder by it.
constexpr std::uint32_t shift_by_bytes(std::uint64_t num_bytes) {
  std::uint32_t power = 0x00800000U;  // x^8
  std::uint32_t result = 0x80000000U;
  for (; num_bytes != 0; num_bytes >>= 1) {
    if ((num_bytes & 1) != 0) result = multiply(result, power);
    power = multiply(power, power);
  }
  return result;
}

#if defined(__x86_64__)
// Three streams at once: the instruction takes three cycles but a new one starts in each.
constexpr std::size_t kStream = 8192;

using ShiftTable = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr ShiftTable make_shift_table(std::uint64_t num_bytes) {
  ShiftTable table{};
  const std::uint32_t shift = shift_by_bytes(num_bytes);
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    for (std::size_t k = 0; k < 4; ++k) table[k][byte] = multiply(byte << (8 * k), shift);
  }
  return table;
}

std::uint32_t shifted(const ShiftTable& table, std::uint32_t sum) {
  return table[0][sum & 0xFF] ^ table[1][(sum >> 8) & 0xFF] ^ table[2][(sum >> 16) & 0xFF] ^
         table[3][sum >> 24];
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_by_instruction(const unsigned char* bytes,
                                                                      std::size_t num_bytes,
                                                                      std::uint32_t before) {
  static const ShiftTable kByOne = make_shift_table(kStream);
  static const ShiftTable kByTwo = make_shift_table(2 * kStream);
  std::uint64_t sum = ~before;
  while (num_bytes >= 3 * kStream) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kStream; i += 8) {
      sum = _mm_crc32_u64(sum, load_word(bytes + i));
      second = _mm_crc32_u64(second, load_word(bytes + kStream + i));
      third = _mm_crc32_u64(third, load_word(bytes + 2 * kStream + i));
    }
    sum = shifted(kByTwo, static_cast<std::uint32_t>(sum)) ^
          shifted(kByOne, static_cast<std::uint32_t>(second)) ^ third;
    bytes += 3 * kStream;
    num_bytes -= 3 * kStream;
  }
  for (; num_bytes >= 8; bytes += 8, num_bytes -= 8) sum = _mm_crc32_u64(sum, load_word(bytes));
  auto last = static_cast<std::uint32_t>(sum);
  for (; num_bytes > 0; ++bytes, --num_bytes) last = _mm_crc32_u8(last, *bytes);
  return ~last;
}
#endif

}  // namespace

std::uint32_t crc32c_by_table(const void* data, std::size_t num_bytes, std::uint32_t before) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint32_t sum = ~before;
  for (; num_bytes >= 8; bytes += 8, num_bytes -= 8) {
    const std::uint64_t word = load_word(bytes) ^ sum;
    sum = 0;
    for (std::size_t k = 0; k < 8; ++k) sum ^= kTable[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; num_bytes > 0; ++bytes, --num_bytes) sum = (sum >> 8) ^ kTable[0][(sum ^ *bytes) & 0xFF];
  return ~sum;
}

std::uint32_t crc32c(const void* data, std::size_t num_bytes, std::uint32_t before) {
#if defined(__x86_64__)
  static const bool kHasInstruction = __builtin_cpu_supports("sse4.2") != 0;
  if (kHasInstruction) {
    return crc32c_by_instruction(static_cast<const unsigned char*>(data), num_bytes, before);
  }
#endif
  return crc32c_by_table(data, num_bytes, before);
}

std::uint32_t crc32c_joined(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) {
  return multiply(first, shift_by_bytes(second_bytes)) ^ second;
}

}  // namespace tessera::core

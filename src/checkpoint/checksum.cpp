#include "tessera/checkpoint/checksum.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace tessera::checkpoint {
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

constexpr std::array<std::uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void hash_block(const unsigned char* block, std::array<std::uint32_t, 8>& state) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < 16; ++i) {
    w[i] = static_cast<std::uint32_t>(block[4 * i]) << 24 |
           static_cast<std::uint32_t>(block[4 * i + 1]) << 16 |
           static_cast<std::uint32_t>(block[4 * i + 2]) << 8 | block[4 * i + 3];
  }
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t a = w[i - 15];
    const std::uint32_t b = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) + w[i - 7] +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                             ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
    const std::uint32_t t2 =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<std::uint32_t, 8> added = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state[i] += added[i];
}

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

std::string sha256(std::string_view bytes) {
  std::array<std::uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* data = reinterpret_cast<const unsigned char*>(bytes.data());
  const std::size_t whole = bytes.size() / 64 * 64;
  for (std::size_t i = 0; i < whole; i += 64) hash_block(data + i, state);
  std::array<unsigned char, 128> tail{};
  const std::size_t rest = bytes.size() - whole;
  if (rest > 0) std::memcpy(tail.data(), data + whole, rest);
  tail[rest] = 0x80;
  const std::size_t tail_bytes = rest < 56 ? 64 : 128;
  const std::uint64_t num_bits = static_cast<std::uint64_t>(bytes.size()) * 8;
  for (std::size_t i = 0; i < 8; ++i) {
    tail[tail_bytes - 1 - i] = static_cast<unsigned char>(num_bits >> (8 * i));
  }
  for (std::size_t i = 0; i < tail_bytes; i += 64) hash_block(tail.data() + i, state);
  std::string text;
  for (const std::uint32_t word : state) {
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(word >> shift) & 0xF];
  }
  return text;
}

}  // namespace tessera::checkpoint

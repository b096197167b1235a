// src/core/sha256.h — SHA-256 (FIPS 180-4) and HMAC (RFC 2104) with it. No LibTorch.

#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::core {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view message);

/// Compares in a time that depends on the lengths alone, so that a stranger who guesses learns
/// nothing from how long the answer takes.
bool same_bytes(std::string_view a, std::string_view b) noexcept;

inline std::string_view bytes_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

/// Lower-case hexadecimal.
std::string hex_of(std::string_view bytes);

}  // namespace tessera::core

// src/core/secret.h — what the processes of one job know and nobody else. No LibTorch.
//
// `tessera run` makes a secret for every job and hands it to the ranks as a file that only their
// user can read. Where several hosts or a scheduler start the processes, the user hands it out: a
// file named by TESSERA_JOB_SECRET_FILE, or TESSERA_JOB_SECRET itself.

#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/sha256.h"

namespace tessera::core {

inline constexpr const char* kSecretFileVariable = "TESSERA_JOB_SECRET_FILE";
inline constexpr const char* kSecretVariable = "TESSERA_JOB_SECRET";

/// Says what is wrong with a secret and what to do. Never holds any of it.
class SecretError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A key of 32 bytes. Cleared when it goes.
class Secret {
 public:
  /// From the kernel's random numbers.
  static Secret random();
  /// The key everybody knows, for jobs that were asked to go without one.
  static Secret known_to_all();
  /// From what a user chose: 32 bytes at least, white space around them aside; `origin` says in an
  /// error where they come from. Throws SecretError.
  static Secret from_text(std::string_view text, const std::string& origin);
  /// From a file that belongs to this user, or root, and that no other user can read or write.
  /// Throws SecretError.
  static Secret from_file(const std::string& path);
  /// What the environment of this process holds, the file first. Nothing if neither variable is
  /// set. Throws SecretError if it cannot be used.
  static std::optional<Secret> from_environment();

  Secret(const Secret&) = default;
  Secret& operator=(const Secret&) = default;
  ~Secret();

  /// Another key for one purpose, from which this one cannot be found.
  Secret derive(std::string_view purpose) const;
  /// The HMAC of `message`.
  Digest sign(std::string_view message) const;
  /// As from_text reads it: `derive` and `sign` of the copy are the same.
  std::string text() const;

 private:
  explicit Secret(const Digest& key) : key_(key) {}

  Digest key_;
};

/// `count` bytes from the kernel. Throws std::system_error if it has none.
std::string random_bytes(std::size_t count);

}  // namespace tessera::core

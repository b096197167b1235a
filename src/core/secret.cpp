#include "core/secret.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace tessera::core {
namespace {

constexpr std::size_t kLeastText = 32;
constexpr std::size_t kMostText = 4096;
constexpr std::string_view kKeyMark = "key:";  // in front of 64 digits that are the key itself

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace(" \t\r\n\0", 5);
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// The key that `text` spells out, as Secret::text writes it.
std::optional<Digest> spelled_key(std::string_view text) {
  Digest key{};
  if (!text.starts_with(kKeyMark) || text.size() != kKeyMark.size() + 2 * key.size()) return {};
  text.remove_prefix(kKeyMark.size());
  for (std::size_t i = 0; i < key.size(); ++i) {
    const int high = digit(text[2 * i]);
    const int low = digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return {};
    key[i] = static_cast<std::uint8_t>(high << 4 | low);
  }
  return key;
}

std::string read_whole(int file) {
  std::string text(kMostText + 1, '\0');
  std::size_t size = 0;
  while (size < text.size()) {
    const ssize_t count = ::read(file, text.data() + size, text.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    size += static_cast<std::size_t>(count);
  }
  text.resize(size);
  return text;
}

}  // namespace

std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  if (::getrandom(bytes.data(), count, 0) != static_cast<ssize_t>(count)) {
    throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  return bytes;
}

Secret Secret::random() {
  Digest key{};
  const std::string bytes = random_bytes(key.size());
  std::memcpy(key.data(), bytes.data(), key.size());
  return Secret(key);
}

Secret Secret::known_to_all() { return Secret(Digest{}); }

Secret Secret::from_text(std::string_view text, const std::string& origin) {
  text = trimmed(text);
  if (text.size() < kLeastText || text.size() > kMostText) {
    throw SecretError(origin + " holds " + std::to_string(text.size()) +
                      " bytes; a secret has 32 to 4096. Make one: (umask 077; head -c 32 "
                      "/dev/urandom | base64 > job.secret)");
  }
  if (const auto key = spelled_key(text)) return Secret(*key);
  return Secret(core::sha256(text));
}

Secret Secret::from_file(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) {
    throw SecretError("the secret file " + path + " cannot be opened: " + std::strerror(errno));
  }
  struct stat status{};
  const bool is_known = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  const bool is_ours = status.st_uid == ::geteuid() || status.st_uid == 0;
  const bool is_private = (status.st_mode & 077) == 0;
  std::string text = is_known && is_ours && is_private ? read_whole(file) : "";
  ::close(file);
  if (!is_known) throw SecretError("the secret file " + path + " is not a plain file");
  if (!is_ours) {
    throw SecretError("the secret file " + path + " belongs to user " +
                      std::to_string(status.st_uid) + ", who can change it. Make one of your own");
  }
  if (!is_private) {
    throw SecretError("the secret file " + path +
                      " can be read or written by other users. Run: chmod 600 " + path);
  }
  const Secret secret = from_text(text, "the secret file " + path);
  ::explicit_bzero(text.data(), text.size());
  return secret;
}

std::optional<Secret> Secret::from_environment() {
  const char* file = std::getenv(kSecretFileVariable);
  if (file != nullptr && *file != '\0') return from_file(file);
  const char* text = std::getenv(kSecretVariable);
  if (text != nullptr && *text != '\0') return from_text(text, kSecretVariable);
  return std::nullopt;
}

Secret::~Secret() { ::explicit_bzero(key_.data(), key_.size()); }

Secret Secret::derive(std::string_view purpose) const {
  return Secret(sign("derive " + std::string(purpose)));
}

Digest Secret::sign(std::string_view message) const { return hmac_sha256(bytes_of(key_), message); }

std::string Secret::text() const { return std::string(kKeyMark) + hex_of(bytes_of(key_)); }

}  // namespace tessera::core

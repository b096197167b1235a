#include "core/letters.h"

#include <sstream>

namespace tessera::core {
namespace {

Digest seal_for(const Secret& secret, const std::string& address, const std::string& content) {
  return secret.derive("post " + address).sign(content);
}

}  // namespace

std::string Letters::seal(const std::string& address, std::string_view text) {
  std::string content = writer_ + " " + std::to_string(++num_sealed_) + "\n";
  content.append(text);
  const Digest signature = seal_for(secret_, address, content);
  return std::string(bytes_of(signature)) + content;
}

std::optional<std::string> Letters::open(const std::string& letter) {
  constexpr std::size_t kSignature = Digest{}.size();
  if (letter.size() < kSignature) return std::nullopt;
  const std::string content = letter.substr(kSignature);
  const Digest signature = seal_for(secret_, address_, content);
  if (!same_bytes(letter.substr(0, kSignature), bytes_of(signature))) return std::nullopt;
  // Written by one of the job, so it has this form.
  std::istringstream head(content);
  std::string writer;
  std::uint64_t number = 0;
  head >> writer >> number;
  std::uint64_t& last = last_from_[writer];
  if (number <= last) return std::nullopt;
  last = number;
  return content.substr(content.find('\n') + 1);
}

}  // namespace tessera::core

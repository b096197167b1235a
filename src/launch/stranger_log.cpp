#include "stranger_log.h"

#include "core/sha256.h"

namespace tessera::launch {
namespace {

constexpr std::chrono::seconds kPause{30};

}  // namespace

void StrangerLog::add(const std::string& address) {
  ++count_;
  last_ = address;
  if (timer_ == 0) tell();
}

std::string StrangerLog::summary() const {
  if (count_ == 0) return "";
  return std::to_string(count_) + (count_ == 1 ? " connection" : " connections") + " " + deed_ +
         ", the last from " + last_;
}

void StrangerLog::tell() {
  timer_ = 0;
  if (told_ == count_) return;
  told_ = count_;
  note_("refused: " + summary());
  timer_ = loop_.after(kPause, [this] { tell(); });
}

std::string printable(const std::string& text, size_t most) {
  std::string result;
  for (const char c : text) {
    if (result.size() >= most) return result + "...";
    if (c >= ' ' && c <= '~' && c != '\\') {
      result += c;
    } else {
      result += "\\x" + core::hex_of({&c, 1});
    }
  }
  return result;
}

}  // namespace tessera::launch

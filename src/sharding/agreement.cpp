#include "sharding/agreement.h"

#include <algorithm>

#include <ATen/ops/full.h>

#include "comm/engines.h"
#include "comm/texts.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"

namespace tessera::sharding {
namespace {

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text.append(line).append("\n");
  return text;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

[[noreturn]] void raise(const Fault& fault) {
  switch (fault.kind) {
    case Fault::Kind::kIndex:
      TESSERA_CHECK_INDEX(false, fault.text);
    case Fault::Kind::kType:
      TESSERA_CHECK_TYPE(false, fault.text);
    default:
      TESSERA_CHECK_VALUE(false, fault.text);
  }
}

}  // namespace

std::uint64_t hash_of(std::string_view text) noexcept {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const char letter : text) {
    hash = (hash ^ static_cast<std::uint8_t>(letter)) * 0x100000001B3U;
  }
  return hash;
}

void check_same_lines(const std::string& operation, const std::vector<std::string>& lines,
                      const comm::Group& group) {
  if (group.size() == 1) return;
  const std::string mine = joined(lines);
  const auto hash = static_cast<std::int64_t>(hash_of(mine));
  const at::Device device = comm::message_device(*group.process_group());
  const at::Tensor hashes =
      comm::all_gather(at::full({1}, hash, at::kLong).to(device), group).cpu();
  const auto* first = hashes.const_data_ptr<std::int64_t>();
  const auto* other = std::find_if(first, first + group.size(),
                                   [&](std::int64_t value) { return value != first[0]; });
  if (other == first + group.size()) return;
  const auto texts = comm::detail::exchange_texts(mine, group);
  const auto rank = static_cast<int>(other - first);
  const auto ours = split_lines(texts[0]);
  const auto theirs = split_lines(texts[static_cast<std::size_t>(rank)]);
  std::size_t line = 0;
  while (line < ours.size() && line < theirs.size() && ours[line] == theirs[line]) ++line;
  const auto at = [&](const std::vector<std::string>& all) {
    return line < all.size() ? all[line] : std::string("no further table");
  };
  TESSERA_CHECK_VALUE(false, operation, ": rank 0 has ", at(ours), "; rank ", rank, " has ",
                      at(theirs), ". Give all ranks the same tables, plan and options.");
}

void raise_together(const std::string& operation, const Fault& fault, const std::string& call,
                    const comm::Group& group) {
  // The first letter is the kind of the fault; no fault sends the call.
  const bool is_faulty = fault.kind != Fault::Kind::kNone;
  std::string mine(1, static_cast<char>('0' + static_cast<int>(fault.kind)));
  mine.append(is_faulty ? fault.text : call);
  const auto texts = comm::detail::exchange_texts(mine, group);
  for (const auto& text : texts) {
    const auto kind = static_cast<Fault::Kind>(text[0] - '0');
    if (kind != Fault::Kind::kNone) raise({kind, text.substr(1)});
  }
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    throw comm::Error(comm::ErrorKind::kMismatch, {static_cast<int>(r)},
                      operation + ": the ranks do different things. Rank 0: " + texts[0].substr(1) +
                          "; rank " + std::to_string(r) + ": " + texts[r].substr(1) + ".");
  }
  TESSERA_INTERNAL_ASSERT(false, "ranks disagreed, and then they did not");
}

}  // namespace tessera::sharding

#include "sharding/agreement.h"

#include "comm/agreement.h"
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

void check_same_lines(const std::string& operation, const std::vector<std::string>& lines,
                      const comm::Group& group) {
  if (group.size() == 1) return;
  const auto texts = comm::detail::find_difference(joined(lines), group);
  if (!texts) return;
  const int rank = comm::detail::unlike_the_first(*texts).front();
  const auto ours = split_lines(texts->front());
  const auto theirs = split_lines((*texts)[static_cast<std::size_t>(rank)]);
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

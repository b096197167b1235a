#include "comm/agreement.h"

#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include "comm/engines.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"

namespace tessera::comm::detail {

std::uint64_t hash_of(std::string_view text) noexcept {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const char letter : text) {
    hash = (hash ^ static_cast<std::uint8_t>(letter)) * 0x100000001B3U;
  }
  return hash;
}

std::vector<std::vector<std::int64_t>> exchange_words(const std::vector<std::int64_t>& mine,
                                                      const Group& group) {
  const at::Device device = message_device(*group.process_group());
  const at::Tensor all =
      all_gather(at::tensor(mine, at::kLong).unsqueeze(0).to(device), group).cpu();
  const std::int64_t* words = all.const_data_ptr<std::int64_t>();
  std::vector<std::vector<std::int64_t>> records;
  for (int rank = 0; rank < group.size(); ++rank, words += mine.size()) {
    records.emplace_back(words, words + mine.size());
  }
  return records;
}

std::vector<std::string> exchange_texts(const std::string& mine, const Group& group) {
  const at::Device device = message_device(*group.process_group());
  const auto length = static_cast<std::int64_t>(mine.size());
  std::vector<std::int64_t> lengths;
  for (const auto& words : exchange_words({length}, group)) lengths.push_back(words[0]);
  const at::Tensor bytes = at::empty({length}, at::kByte);
  if (!mine.empty()) std::memcpy(bytes.data_ptr(), mine.data(), mine.size());
  const at::Tensor all = all_gather_v(bytes.to(device), group, lengths).cpu();
  const char* place = reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>());
  std::vector<std::string> texts;
  for (const std::int64_t size : lengths) {
    texts.emplace_back(place, static_cast<std::size_t>(size));
    place += size;
  }
  return texts;
}

std::optional<std::vector<std::string>> find_difference(const std::string& mine,
                                                        const Group& group) {
  // Two hashes of which one sees the text from behind: texts that share both share everything.
  const std::string mirrored(mine.rbegin(), mine.rend());
  const auto words = exchange_words(
      {static_cast<std::int64_t>(mine.size()), static_cast<std::int64_t>(hash_of(mine)),
       static_cast<std::int64_t>(hash_of(mirrored))},
      group);
  if (unlike_the_first(words).empty()) return std::nullopt;
  return exchange_texts(mine, group);
}

void raise_faults(const std::string& fault, const std::vector<int>& wrong, const Group& group) {
  const auto texts = exchange_texts(fault, group);
  TESSERA_CHECK_VALUE(fault.empty(), fault);
  throw Error(ErrorKind::kMismatch, wrong,
              texts[wrong[0]] + " (On rank " + std::to_string(wrong[0]) + ", in group '" +
                  group.name() + "'.)");
}

}  // namespace tessera::comm::detail

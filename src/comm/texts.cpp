#include "comm/texts.h"

#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "comm/engines.h"
#include "tessera/comm/collectives.h"

namespace tessera::comm::detail {

std::vector<std::string> exchange_texts(const std::string& mine, const Group& group) {
  const at::Device device = message_device(*group.process_group());
  const at::Tensor bytes = at::empty({static_cast<std::int64_t>(mine.size())}, at::kByte);
  if (!mine.empty()) std::memcpy(bytes.data_ptr(), mine.data(), mine.size());
  const at::Tensor lengths =
      all_gather(at::full({1}, bytes.size(0), at::kLong).to(device), group).cpu();
  const auto* length = lengths.const_data_ptr<std::int64_t>();
  const at::Tensor all = all_gather_v(bytes.to(device), group,
                                      std::vector<std::int64_t>(length, length + group.size()))
                             .cpu();
  const char* place = reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>());
  std::vector<std::string> texts;
  for (int r = 0; r < group.size(); place += length[r], ++r) texts.emplace_back(place, length[r]);
  return texts;
}

}  // namespace tessera::comm::detail

#include "regions/together.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"

namespace tessera::regions::detail {

std::vector<std::string> exchange_texts(std::string mine, const comm::Group& group) {
  const at::Tensor bytes =
      at::from_blob(mine.data(), {static_cast<std::int64_t>(mine.size())}, at::kByte);
  const at::Tensor lengths = comm::all_gather(at::full({1}, bytes.size(0), at::kLong), group);
  const std::int64_t* length = lengths.const_data_ptr<std::int64_t>();
  const at::Tensor all =
      comm::all_gather_v(bytes, group, std::vector<std::int64_t>(length, length + group.size()));
  const char* place = reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>());
  std::vector<std::string> texts;
  for (int r = 0; r < group.size(); place += length[r], ++r) texts.emplace_back(place, length[r]);
  return texts;
}

std::vector<std::vector<std::int64_t>> exchange_words(const std::vector<std::int64_t>& mine,
                                                      const comm::Group& group) {
  const at::Tensor all = comm::all_gather(at::tensor(mine, at::kLong).unsqueeze(0), group);
  const std::int64_t* words = all.const_data_ptr<std::int64_t>();
  std::vector<std::vector<std::int64_t>> records;
  for (int r = 0; r < group.size(); ++r, words += mine.size()) {
    records.emplace_back(words, words + mine.size());
  }
  return records;
}

void raise_faults(const std::string& fault, const std::vector<int>& wrong,
                  const comm::Group& group) {
  const auto texts = exchange_texts(fault, group);
  TESSERA_CHECK_VALUE(fault.empty(), fault);
  throw comm::Error(comm::ErrorKind::kMismatch, wrong,
                    texts[wrong[0]] + " (On rank " + std::to_string(wrong[0]) + ", in group '" +
                        group.name() + "'.)");
}

}  // namespace tessera::regions::detail

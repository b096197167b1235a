#include "regions/together.h"

#include <ATen/Functions.h>

#include "comm/texts.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"

namespace tessera::regions::detail {

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
  const auto texts = comm::detail::exchange_texts(fault, group);
  TESSERA_CHECK_VALUE(fault.empty(), fault);
  throw comm::Error(comm::ErrorKind::kMismatch, wrong,
                    texts[wrong[0]] + " (On rank " + std::to_string(wrong[0]) + ", in group '" +
                        group.name() + "'.)");
}

}  // namespace tessera::regions::detail

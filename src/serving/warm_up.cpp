// What is done before a server is ready.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "tessera/serving/model.h"

namespace tessera::serving {
namespace {

// Brings pages into memory and into this process's address space; older kernels are asked by
// touching them.
void populate(const std::uint8_t* begin, std::int64_t count) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<std::uintptr_t>(begin) / page * page;
  const auto length =
      reinterpret_cast<std::uintptr_t>(begin) + static_cast<std::uintptr_t>(count) - first;
#ifdef MADV_POPULATE_READ
  if (::madvise(reinterpret_cast<void*>(first), length, MADV_POPULATE_READ) == 0) return;
#endif
  for (std::uintptr_t at = 0; at < length; at += page) {
    static_cast<void>(*reinterpret_cast<const volatile std::uint8_t*>(first + at));
  }
}

}  // namespace

std::int64_t Model::warm_up(std::int64_t most_bytes, std::int64_t most_samples,
                            const std::function<bool()>& goes_on) {
  constexpr std::int64_t kPiece = std::int64_t{64} << 20;
  const auto is_over = [&] { return goes_on && !goes_on(); };
  std::int64_t num_bytes = 0;
  auto lease = this->lease();
  const ModelInfo& info = lease.model();
  for (std::size_t t = 0; t < info.tables.size(); ++t) {
    const embedding::RowTable rows = table_of_package(t);
    const std::int64_t bytes =
        std::min(info.tables[t].stored_rows() * rows.row_bytes, most_bytes - num_bytes);
    for (std::int64_t at = 0; at < bytes && !is_over(); at += kPiece) {
      populate(rows.data + at, std::min(kPiece, bytes - at));
    }
    num_bytes += std::max<std::int64_t>(bytes, 0);
  }
  // A few ids a sample, spread over the rows; ids of tables that grow need not be there. Small
  // sizes several times; larger ones are computed in blocks, each of which does the same again.
  constexpr std::int64_t kIds = 4;
  constexpr std::int64_t kSamples = 64;  // of a size
  for (std::int64_t samples = 1; !is_over(); samples = std::min(2 * samples, most_samples)) {
    const auto count = static_cast<std::size_t>(samples);
    const std::vector<float> dense(count * static_cast<std::size_t>(info.num_dense));
    std::vector<std::vector<std::int64_t>> ids(info.features.size());
    std::vector<std::int32_t> lengths(count, kIds);
    const std::vector<std::int32_t> none(count, 0);
    std::vector<FeatureBags> bags;
    for (std::size_t f = 0; f < ids.size(); ++f) {
      const std::int64_t num_rows = info.tables[info.features[f].table].num_rows;
      if (num_rows > 0) {
        for (std::int64_t i = 0; i < kIds * samples; ++i) ids[f].push_back(i * 7919 % num_rows);
      }
      bags.push_back({ids[f], num_rows > 0 ? lengths : none, {}});
    }
    std::vector<float> logits(count);
    const std::int64_t turns = std::clamp<std::int64_t>(kSamples / samples, 1, 10);
    for (std::int64_t turn = 0; turn < turns; ++turn) {
      lease.predict({samples, dense, bags}, logits);
    }
    if (samples >= most_samples) break;
  }
  return num_bytes;
}

}  // namespace tessera::serving

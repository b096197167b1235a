#include "kernels/row_cut.h"

#include <algorithm>

namespace tessera::kernels {
namespace {

// Up to this many parts, comparing with all of them is faster than searching.
constexpr std::int64_t kFewParts = 16;

inline std::int64_t part_of(std::int64_t id, const std::int64_t* starts, std::int64_t num_parts) {
  if (num_parts <= kFewParts) {
    std::int64_t part = 0;
    for (std::int64_t p = 1; p < num_parts; ++p) part += static_cast<std::int64_t>(id >= starts[p]);
    return part;
  }
  return std::upper_bound(starts + 1, starts + num_parts, id) - starts - 1;
}

inline std::int64_t inside(std::int64_t id, std::int64_t num_rows) {
  return static_cast<std::uint64_t>(id) < static_cast<std::uint64_t>(num_rows) ? id : 0;
}

}  // namespace

template <typename Id, typename Length>
void count_parts(const RowCut<Id>& cut, const Length* bag_lengths, std::int64_t num_bags,
                 std::int32_t* const* lengths) noexcept {
  const std::int64_t num_rows = cut.starts[cut.num_parts];
  const Id* id = cut.ids;
  for (std::int64_t bag = 0; bag < num_bags; ++bag) {
    for (const Id* end = id + bag_lengths[bag]; id < end; ++id) {
      ++lengths[part_of(inside(*id, num_rows), cut.starts, cut.num_parts)][bag];
    }
  }
}

template <typename Id>
void fill_parts(const RowCut<Id>& cut, const RowCutExtras& extras, std::int64_t* cursor,
                Id* ids_out) noexcept {
  const std::int64_t num_rows = cut.starts[cut.num_parts];
  for (std::int64_t i = 0; i < cut.num_ids; ++i) {
    const std::int64_t id = inside(cut.ids[i], num_rows);
    const std::int64_t part = part_of(id, cut.starts, cut.num_parts);
    const std::int64_t at = cursor[part]++;
    ids_out[at] = static_cast<Id>(id - cut.starts[part]);
    if (extras.weights != nullptr) extras.weights_out[at] = extras.weights[i];
    if (extras.source != nullptr) extras.source[at] = extras.first_source + i;
  }
}

template void count_parts(const RowCut<std::int32_t>&, const std::int32_t*, std::int64_t,
                          std::int32_t* const*) noexcept;
template void count_parts(const RowCut<std::int32_t>&, const std::int64_t*, std::int64_t,
                          std::int32_t* const*) noexcept;
template void fill_parts(const RowCut<std::int32_t>&, const RowCutExtras&, std::int64_t*,
                         std::int32_t*) noexcept;
template void count_parts(const RowCut<std::int64_t>&, const std::int32_t*, std::int64_t,
                          std::int32_t* const*) noexcept;
template void count_parts(const RowCut<std::int64_t>&, const std::int64_t*, std::int64_t,
                          std::int32_t* const*) noexcept;
template void fill_parts(const RowCut<std::int64_t>&, const RowCutExtras&, std::int64_t*,
                         std::int64_t*) noexcept;

}  // namespace tessera::kernels

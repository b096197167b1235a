#include "tessera/vocab_parallel/solo_group.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera::vocab_parallel {

comm::Group group_or_solo(const std::optional<comm::Group>& group) {
  if (group) return *group;
  // Never destroyed: the order in which libraries end their statics is not known.
  static const auto* solo = [] {
    auto options = comm::default_group_options();
    options.name = "solo";
    return new comm::Group(comm::make_group(c10::make_intrusive<c10d::HashStore>(), 0, 1, options));
  }();
  return *solo;
}

}  // namespace tessera::vocab_parallel

// dlrm/text_check.h — finds texts that were hashed to one id. No LibTorch.

#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/collision/id_table.h"

namespace tessera::workloads::dlrm {

/// Keeps a second hash of 32 bits beside the id of every text, and counts the texts that share the
/// id of another. Some 50 bytes a text. May be asked from one thread while another goes on.
class TextCheck {
 public:
  void see(std::string_view text, std::int64_t id);

  struct Found {
    std::int64_t texts = 0;    // with ids of their own
    std::int64_t clashes = 0;  // different texts that share the id of another
  };
  Found found();

 private:
  void look_up();

  std::mutex mutex_;
  collision::IdTable ids_;
  std::vector<std::uint32_t> checks_;  // of the text that had the id first, by row
  std::set<std::pair<std::int64_t, std::uint32_t>> clashes_;
  // Looked up together, as the table does it best.
  std::vector<std::int64_t> next_ids_;
  std::vector<std::uint32_t> next_checks_;
  std::vector<std::int64_t> rows_;
};

}  // namespace tessera::workloads::dlrm

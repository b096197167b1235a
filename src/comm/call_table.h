// src/comm/call_table.h — the calls of all ranks of a group, brought together and compared.
//
// Shared memory compares calls where they lie. Engines that send messages first exchange a record
// per rank and compare them here, by the same rules and with the same words.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/call_board.h"
#include "comm/transport.h"

namespace tessera::comm {

class CallTable {
 public:
  explicit CallTable(int size);

  /// Bytes of one rank's record.
  std::size_t record_bytes() const noexcept { return record_words_ * sizeof(std::int64_t); }

  /// This rank's call as a record. `inputs` and `outputs` are empty where the operator has one
  /// count.
  std::vector<std::int64_t> record(const Call& call, std::int64_t count,
                                   std::span<const Piece> inputs,
                                   std::span<const Piece> outputs) const;

  /// Compares the records of all ranks, which lie behind each other. Throws Failure(kMismatch),
  /// with the same text on every rank, if they do not fit.
  void check(const Call& call, int rank, const std::int64_t* records);

 private:
  int size_;
  std::size_t record_words_;
  std::vector<CallHeader> headers_;
  std::vector<std::int64_t> counts_;  // of each rank: PeerCounts
};

}  // namespace tessera::comm

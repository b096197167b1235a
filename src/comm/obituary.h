// src/comm/obituary.h — one death, told in the same words by all ranks of a job.
//
// Ranks of one group agree by themselves. But one may see a death in a collective of a group, and
// another, which was through with that one, while it makes the next. Then the words of who tells
// first are everybody's. And a rank that ends because of a death is dead itself a moment later: who
// sees that one first is told of the other.

#pragma once

#include <map>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/member.h"
#include "comm/transport.h"

namespace tessera::comm {

/// Remembers, without keeping it alive, where the ranks of the job can agree, and who this process
/// is among them.
void remember_store(const c10::intrusive_ptr<c10d::Store>& store, const Member& self);

/// This process has made a group, so it outlives the death it told of, if it did: its own end,
/// later, is another matter. Throws what the store throws.
void note_new_group(c10d::Store& store);

/// `failure` as all ranks tell it, if it is the death of a process; else as it is. `members` are
/// those of the caller's group that it knows, by group rank, and so are the ranks of the result.
/// Waits for the store, 200 ms at most.
Failure in_first_words(const Failure& failure, const std::map<int, Member>& members) noexcept;

}  // namespace tessera::comm

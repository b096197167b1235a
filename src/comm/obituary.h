// src/comm/obituary.h — one death, told in the same words by all ranks of a job.
//
// Ranks of one group agree by themselves. But one may see a death in a collective of a group, and
// another, which was through with that one, while it makes the next. Then the words of who tells
// first are everybody's.

#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/transport.h"

namespace tessera::comm {

/// Remembers, without keeping it alive, where the ranks of the job can agree.
void remember_store(const c10::intrusive_ptr<c10d::Store>& store);

/// `failure` as all ranks tell it, if it is the death of a process; else as it is. Its ranks stay
/// those of the caller's group. Waits for the store, 200 ms at most.
Failure in_first_words(const Failure& failure) noexcept;

}  // namespace tessera::comm

// src/comm/shm/creation.h — how the ranks of a group come to have one segment.

#pragma once

#include <memory>

#include "comm/shm/layout.h"
#include "comm/shm/segment.h"
#include "comm/shm/shm_transport.h"
#include "comm/transport.h"

namespace tessera::comm::shm {

struct GroupSegment {
  std::shared_ptr<Segment> segment;
  Sizes sizes;
};

/// Rank 0 makes the segment and hands it to the others over lines (handover.h); the store holds
/// nothing but the name to connect to. Either every rank gets the segment, or every rank gets the
/// same Failure. Collective; see ShmTransport::create.
GroupSegment make_group_segment(int rank, int size, Bootstrap& bootstrap, WaitMonitor& monitor,
                                const ShmOptions& options);

}  // namespace tessera::comm::shm

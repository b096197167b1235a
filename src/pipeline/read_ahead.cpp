#include "tessera/pipeline/read_ahead.h"

#include <sched.h>

namespace tessera::pipeline::detail {

void be_modest() noexcept {
#if defined(SCHED_BATCH)
  // Waking up, such a thread does not take the core of one that computes.
  const sched_param no_priority{};
  ::sched_setscheduler(0, SCHED_BATCH, &no_priority);
#endif
}

}  // namespace tessera::pipeline::detail

#include "comm/shm/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace tessera::comm::shm {

// The shared form of the calls is used (no FUTEX_PRIVATE_FLAG): the word lies in a file mapping, at
// a different address in every process.

void Doorbell::ring() noexcept {
  rings.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&rings), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

void Doorbell::sleep(std::uint32_t heard, std::chrono::nanoseconds limit) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(seconds.count());
  timeout.tv_nsec = static_cast<long>((limit - seconds).count());
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&rings), FUTEX_WAIT, heard, &timeout, nullptr,
          0);
}

}  // namespace tessera::comm::shm

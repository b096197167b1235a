#include "core/own_files.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace tessera::core {
namespace {

// The number of each socket in the kernel's books by its descriptor, 0 for none: it tells whether a
// descriptor still is what it was. Without a lock, which a child might find taken for ever.
constexpr std::size_t kMostFiles = 1 << 16;
std::atomic<std::uint64_t> numbers[kMostFiles];
std::atomic<std::size_t> num_descriptors{0};

std::uint64_t number_of(int descriptor) noexcept {
  struct stat status{};
  const bool is_socket = ::fstat(descriptor, &status) == 0 && S_ISSOCK(status.st_mode);
  return is_socket ? status.st_ino : 0;
}

void let_go() noexcept {
  const int error = errno;
  int nothing = -1;
  const std::size_t end = num_descriptors.load();
  for (std::size_t i = 0; i < end; ++i) {
    const std::uint64_t number = numbers[i].exchange(0);
    const int descriptor = static_cast<int>(i);
    if (number == 0 || number_of(descriptor) != number) continue;
    if (nothing < 0) nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    if (nothing >= 0) ::dup3(nothing, descriptor, O_CLOEXEC);
  }
  if (nothing >= 0) ::close(nothing);
  errno = error;
}

}  // namespace

void keep_from_children(int socket) noexcept {
  [[maybe_unused]] static const int installed = ::pthread_atfork(nullptr, nullptr, let_go);
  const auto place = static_cast<std::size_t>(socket);
  if (socket < 0 || place >= kMostFiles) return;
  numbers[place] = number_of(socket);
  std::size_t before = num_descriptors.load();
  while (before <= place && !num_descriptors.compare_exchange_weak(before, place + 1)) {
  }
}

}  // namespace tessera::core

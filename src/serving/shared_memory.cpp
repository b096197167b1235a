#include "serving/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/checkpoint/error.h"

namespace tessera::serving {
namespace {

[[noreturn]] void fail(const std::string& doing) {
  throw checkpoint::Error(
      checkpoint::ErrorKind::kRead,
      "serving: shared memory cannot be " + doing + ": " + std::strerror(errno) + ".");
}

}  // namespace

std::size_t whole_pages(std::size_t num_bytes) {
  static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (num_bytes + page - 1) / page * page;
}

SharedMemory::SharedMemory(const char* name, std::size_t num_bytes)
    : num_bytes_(whole_pages(num_bytes)) {
  fd_ = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0) fail("made");
  if (::ftruncate(fd_, static_cast<off_t>(num_bytes_)) != 0 ||
      ::fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int code = errno;
    ::close(fd_);
    errno = code;
    fail("given " + std::to_string(num_bytes_) + " bytes");
  }
  void* mapped =
      ::mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (mapped == MAP_FAILED) {
    const int code = errno;
    ::close(fd_);
    errno = code;
    fail("mapped");
  }
  data_ = static_cast<std::byte*>(mapped);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      num_bytes_(std::exchange(other.num_bytes_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, num_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

void SharedMemory::show_at(void* address, std::size_t begin, std::size_t num_bytes) const {
  if (::mmap(address, num_bytes, PROT_READ, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd_,
             static_cast<off_t>(begin)) == MAP_FAILED) {
    fail("mapped");
  }
}

void SharedMemory::make_read_only() const noexcept {
  if (data_ != nullptr) ::mprotect(data_, num_bytes_, PROT_READ);
}

}  // namespace tessera::serving

#include "dlrm/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "dlrm/click_log.h"

namespace tessera::workloads::dlrm {

MappedFile::MappedFile(const std::string& path) {
  // Without O_NONBLOCK, opening a pipe would wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) throw DataError(path + ": cannot be opened: " + std::strerror(errno) + ".");
  struct stat facts{};
  std::string problem;
  if (::fstat(fd, &facts) != 0) {
    problem = std::string("cannot be read: ") + std::strerror(errno) + ".";
  } else if (!S_ISREG(facts.st_mode)) {
    problem = "is not a regular file.";
  } else if (facts.st_size > 0) {
    num_bytes_ = static_cast<std::size_t>(facts.st_size);
    void* data = ::mmap(nullptr, num_bytes_, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
      problem = std::string("cannot be mapped: ") + std::strerror(errno) + ".";
      num_bytes_ = 0;
    } else {
      data_ = static_cast<const char*>(data);
    }
  }
  ::close(fd);
  if (!problem.empty()) throw DataError(path + ": " + problem);
}

void MappedFile::fetch(std::size_t begin, std::size_t count) const noexcept {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t end = std::min(begin + count, num_bytes_);
  begin = begin / page * page;
  // A wish: whoever reads the bytes gets them either way.
  if (begin < end) ::madvise(const_cast<char*>(data_) + begin, end - begin, MADV_WILLNEED);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<char*>(data_), num_bytes_);
}

}  // namespace tessera::workloads::dlrm

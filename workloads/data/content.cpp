#include "data/content.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tessera::workloads::data {
namespace {

struct Sign {
  std::string_view bytes;
  FileKind kind;
  const char* name;
  const char* advice;
};

constexpr const char* kAsText = "write it as CSV or JSON lines";

constexpr const char* kByColumns =
    "it is read by a schema, as tessera data schema guesses one, and not from a pipe";

constexpr Sign kSigns[] = {
    {"TSRCLICK", FileKind::kClickLog, "a click log already", "train on it as it is"},
    {"\x1f\x8b", FileKind::kGzip, "gzip", "unpack it first"},
    {"\x28\xb5\x2f\xfd", FileKind::kZstd, "zstd", "unpack it first"},
    {"PAR1", FileKind::kParquet, "a Parquet file", kByColumns},
    {"ARROW1", FileKind::kOther, "an Arrow file", kAsText},
    {"ORC", FileKind::kOther, "an ORC file", kAsText},
    {"Obj\x01", FileKind::kOther, "an Avro file", kAsText},
    {"\x93NUMPY", FileKind::kOther, "a NumPy array",
     "save columns with their names, by numpy.savez"},
    {"PK\x03\x04", FileKind::kZip, "a zip or npz archive", kByColumns},
    {"BZh", FileKind::kOther, "bzip2", "unpack it: bzcat FILE | tessera data ... -"},
    {"\xfd"
     "7zXZ",
     FileKind::kOther, "xz", "unpack it: xzcat FILE | tessera data ... -"},
    {"\x89HDF", FileKind::kOther, "an HDF5 file", kAsText},
    {"SQLite format 3", FileKind::kOther, "an SQLite database", kAsText},
    {"\xff\xfe", FileKind::kOther, "UTF-16 text", "write it as UTF-8"},
    {"\xfe\xff", FileKind::kOther, "UTF-16 text", "write it as UTF-8"},
};

}  // namespace

Content content_of(std::string_view front) {
  for (const Sign& sign : kSigns) {
    if (front.starts_with(sign.bytes)) return {sign.kind, sign.name, sign.advice};
  }
  if (front.find('\0') != std::string_view::npos) {
    return {FileKind::kOther, "a binary file of an unknown kind", kAsText};
  }
  return {};
}

void check_text(const std::string& path, std::string_view front) {
  const Content content = content_of(front);
  if (content.kind == FileKind::kText) return;
  throw DataError(path + ": is " + content.name + ", not text: " + content.advice + ".");
}

std::string front_of(const std::string& path, std::size_t num_bytes) {
  struct stat facts{};
  // Without O_NONBLOCK, opening a pipe would wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) throw DataError(path + ": cannot be opened: " + std::strerror(errno) + ".");
  std::string front;
  if (::fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode)) {
    front.resize(num_bytes);
    const ssize_t done = ::pread(fd, front.data(), num_bytes, 0);
    front.resize(static_cast<std::size_t>(std::max<ssize_t>(done, 0)));
  }
  ::close(fd);
  return front;
}

}  // namespace tessera::workloads::data

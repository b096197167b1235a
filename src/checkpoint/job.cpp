#include "checkpoint/job.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/reader.h"

namespace tessera::checkpoint {
namespace {

using Place = std::pair<dev_t, ino_t>;

// Roots have many names.
Place place_of(const std::string& root) {
  struct stat facts{};
  if (::stat(root.c_str(), &facts) != 0) return {};
  return {facts.st_dev, facts.st_ino};
}

struct Read {
  std::mutex mutex;
  std::map<Place, std::int64_t> until;
};

Read& read_roots() {
  static auto* const roots = new Read;  // never destroyed: loads may come late
  return *roots;
}

}  // namespace

std::string random_digits(Disk& disk) {
  std::uint64_t number = disk.random();
  std::string text;
  for (int i = 0; i < 16; ++i, number >>= 4) text += "0123456789abcdef"[number & 0xF];
  return text;
}

std::string this_job() {
  static const std::string job = [] {
    // The run's own name is a secret of its ranks; manifests are read by others.
    const char* run = std::getenv("TESSERA_RUN_ID");
    if (run == nullptr || *run == '\0') return random_digits();
    return sha256(std::string("checkpoint of ") + run).substr(0, 16);
  }();
  return job;
}

void note_read(const std::string& root, Disk& disk) {
  const std::int64_t commit = last_commit(root, disk);
  Read& roots = read_roots();
  const std::lock_guard lock(roots.mutex);
  std::int64_t& until = roots.until[place_of(root)];
  until = std::max(until, commit);
}

std::int64_t read_until(const std::string& root) {
  Read& roots = read_roots();
  const std::lock_guard lock(roots.mutex);
  const auto found = roots.until.find(place_of(root));
  return found == roots.until.end() ? 0 : found->second;
}

}  // namespace tessera::checkpoint

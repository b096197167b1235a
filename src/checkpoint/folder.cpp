#include "tessera/checkpoint/folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <ctime>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/job.h"
#include "checkpoint/open_file.h"
#include "checkpoint/root_lock.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/error.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kPrefix = "step-";
constexpr std::size_t kDigits = 12;
constexpr const char* kLatest = "LATEST";

// ".tmp-" followed by the random part.
bool is_temporary(std::string_view name) {
  const std::size_t place = name.find(".tmp-");
  return place != std::string_view::npos &&
         (step_of(name.substr(0, place)) >= 0 || name.substr(0, place) == kLatest);
}

bool is_gone(const std::string& path, Disk& disk) {
  struct stat facts{};
  return disk.look_at(AT_FDCWD, path, facts) != 0 && errno == ENOENT;
}

// None if there is no such folder.
std::vector<std::string> names_in(const std::string& path, Disk& disk, bool follows = true) {
  if (is_gone(path, disk)) return {};
  try {
    return OpenFolder(path, follows, disk).names();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kRead) throw;
    return {};
  }
}

bool is_there(const std::string& path, Disk& disk) {
  struct stat facts{};
  return disk.look_at(AT_FDCWD, path, facts) == 0;
}

bool is_folder(const std::string& path, Disk& disk) {
  struct stat facts{};
  return disk.look_at(AT_FDCWD, path, facts) == 0 && S_ISDIR(facts.st_mode);
}

void make_folders(const std::string& path, Disk& disk) {
  if (path.empty() || path == "/" || is_there(path, disk)) return;
  const std::size_t slash = path.find_last_of('/');
  if (slash != std::string::npos && slash > 0) make_folders(path.substr(0, slash), disk);
  if (disk.make_folder(path) != 0 && errno != EEXIST) throw_write_error("make the folder", path);
}

// Brings the names of a root and of the folders around it to the disk. Who made them may have died,
// or failed, before it did: without them everything inside would go with the power.
void sync_way_to(const std::string& path, Disk& disk) {
  const std::size_t slash = path.find_last_of('/');
  const std::string parent = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  if (disk.sync_folder(parent) != 0) {
    // What this user may not open, it has not made.
    const bool is_foreign = errno == EACCES || errno == EPERM || errno == EROFS;
    if (!is_foreign) throw_write_error("sync", parent);
  }
  if (slash != std::string::npos && slash > 0) sync_way_to(path.substr(0, slash), disk);
}

// Folders that the `keep` good ones committed last need: themselves, and the bases of deltas.
// `committed` is one of them, whatever else is there.
std::set<std::string> needed_folders(const std::string& root, const std::string& committed,
                                     int keep, Disk& disk) {
  std::vector<std::string> names{committed};
  for (const std::int64_t step : list_commits(root, disk)) {
    if (folder_name(step) != committed) names.push_back(folder_name(step));
  }
  std::set<std::string> needed;
  int num_good = 0;
  for (std::string name : names) {
    if (num_good >= keep) break;
    bool is_good = false;
    for (int depth = 0; depth < 1000 && !name.empty(); ++depth) {
      try {
        const Manifest manifest = read_manifest(root + "/" + name, disk);
        is_good = true;
        needed.insert(name);
        name = manifest.base ? manifest.base->folder : "";
      } catch (const Error&) {
        needed.insert(name);  // perhaps of use to somebody; only good ones are counted
        break;
      }
    }
    num_good += is_good ? 1 : 0;
  }
  return needed;
}

// The number after that of the last commit that is whole.
std::int64_t next_commit(const std::string& root, Disk& disk) {
  for (const std::int64_t step : list_commits(root, disk)) {
    try {
      const std::int64_t last = read_manifest(root + "/" + folder_name(step), disk).commit;
      return last < INT64_MAX ? last + 1 : last;
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kRead) throw;
      continue;  // a number that was changed counts for nothing
    }
  }
  return 1;
}

std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace

std::string folder_name(std::int64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < kDigits) digits.insert(0, kDigits - digits.size(), '0');
  return std::string(kPrefix).append(digits);
}

std::int64_t step_of(std::string_view name) noexcept {
  if (!name.starts_with(kPrefix)) return -1;
  const std::string_view digits = name.substr(kPrefix.size());
  if (digits.size() < kDigits || (digits.size() > kDigits && digits[0] == '0')) return -1;
  std::int64_t step = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  return error == std::errc() && end == digits.data() + digits.size() && step >= 0 ? step : -1;
}

namespace {

// Commit and step of each finished folder, ascending in steps; the commits only if asked for. A
// folder that goes while it is looked at was removed by a save, whose own one may have come too
// late to be seen: everything is looked at again.
std::vector<std::pair<std::int64_t, std::int64_t>> look_around(const std::string& root,
                                                               bool wants_commits, Disk& disk) {
  for (;;) {
    std::vector<std::pair<std::int64_t, std::int64_t>> found;
    std::optional<OpenFolder> opened;
    std::int64_t before = 0;
    bool is_stale = false;
    for (const std::string& name : names_in(root, disk)) {
      const std::int64_t step = step_of(name);
      if (step < 0 || is_stale) continue;
      const std::string path = root + "/" + name;
      if (is_folder(path, disk)) {
        if (wants_commits) {
          if (!opened) opened.emplace(root, /*follows=*/true, disk);
          const std::int64_t commit = read_commit(*opened, name);
          if (commit >= 0) before = commit;  // one that cannot be read follows the step before it
        }
        found.emplace_back(before, step);
      }
      is_stale = is_gone(path, disk);
    }
    if (!is_stale) return found;
  }
}

std::vector<std::int64_t> steps_of(std::vector<std::pair<std::int64_t, std::int64_t>> found) {
  std::sort(found.begin(), found.end(), std::greater<>());
  std::vector<std::int64_t> steps;
  for (const auto& [commit, step] : found) steps.push_back(step);
  return steps;
}

}  // namespace

std::vector<std::int64_t> list_steps(const std::string& root, Disk& disk) {
  return steps_of(look_around(root, false, disk));
}

std::vector<std::int64_t> list_commits(const std::string& root, Disk& disk) {
  return steps_of(look_around(root, true, disk));
}

std::int64_t last_commit(const std::string& root, Disk& disk) {
  std::int64_t last = 0;
  for (const auto& [commit, step] : look_around(root, true, disk)) last = std::max(last, commit);
  return last;
}

std::string latest_folder(const std::string& root, Disk& disk) {
  try {
    std::string text = read_small_file(OpenFolder(root, /*follows=*/true, disk), kLatest, 256);
    if (text.empty() || text.back() != '\n') return "";
    text.pop_back();
    return step_of(text) >= 0 ? text : "";
  } catch (const Error&) {
    return "";
  }
}

// Also of what is no folder. Never through a link: what it leads to is not ours.
void remove_folder(const std::string& path, Disk& disk) {
  if (!is_folder(path, disk)) {
    disk.remove(path);
    return;
  }
  std::vector<std::string> names;
  try {
    names = names_in(path, disk, /*follows=*/false);
  } catch (const Error&) {
    return;  // what stays has no final name, and goes with a later save
  }
  for (const std::string& name : names) remove_folder(path + "/" + name, disk);
  disk.remove_folder(path);
}

PendingFolder::PendingFolder(std::string root, std::int64_t step, Disk& disk, bool replaces)
    : root_(std::move(root)), name_(folder_name(step)), disk_(disk) {
  while (root_.size() > 1 && root_.back() == '/') root_.pop_back();
  if (step < 0) {
    throw Error(ErrorKind::kInvalid,
                "checkpoint.save: the step is " + std::to_string(step) + ". Count from 0.");
  }
  if (root_.empty()) {
    throw Error(ErrorKind::kInvalid, "checkpoint.save: the folder to save into has no name.");
  }
  make_folders(root_, disk_);
  lock_ = std::make_unique<RootLock>(root_, disk_);
  if (!replaces) check_owner();
  const std::vector<std::string> names = names_in(root_, disk_);
  const bool is_first = std::none_of(names.begin(), names.end(),
                                     [](const std::string& name) { return step_of(name) >= 0; });
  if (is_first) sync_way_to(root_, disk_);
  // What is left may be an older checkpoint whose place another has taken, and only names that are
  // on the disk say so.
  const bool has_left = std::any_of(names.begin(), names.end(), is_temporary);
  if (has_left && disk_.sync_folder(root_) != 0) throw_write_error("sync", root_);
  for (const std::string& left : names) {
    if (is_temporary(left)) remove_folder(root_ + "/" + left, disk_);
  }
  path_ = root_ + "/" + name_ + ".tmp-" + random_digits(disk_);
  if (disk_.make_folder(path_) != 0) throw_write_error("make the folder", path_);
}

void PendingFolder::check_owner() const {
  Manifest old;
  try {
    old = read_manifest(root_ + "/" + name_, disk_);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kRead) throw;
    return;  // there is none, or nothing that could be lost
  }
  if (old.job.empty() || old.job == this_job() || old.commit <= read_until(root_)) return;
  throw Error(ErrorKind::kInvalid,
              "checkpoint.save: " + root_ + "/" + name_ + " was saved by job " + old.job + " at " +
                  old.saved + "; this is job " + this_job() +
                  ", which has not loaded from there since. Load first, save into another folder, "
                  "or ask for it to be replaced.");
}

PendingFolder::~PendingFolder() {
  if (is_committed_ || !lock_->is_ours()) return;
  try {
    remove_folder(path_, disk_);
  } catch (...) {  // the next save removes it
  }
}

void PendingFolder::write_manifest(Manifest& manifest) {
  // The index of whole tensors, for readers that expect one; a sharded tensor has no place in it.
  std::map<std::string, std::string> index;
  std::uint64_t total_bytes = 0;
  for (const TensorRecord& tensor : manifest.tensors) {
    if (tensor.regions.size() != 1 || tensor.regions[0].region.lengths != tensor.shape) break;
    const RegionRecord& region = tensor.regions[0];
    index[tensor.name] = manifest.files.at(region.file).name;
    total_bytes += region.end - region.begin;
  }
  if (index.size() == manifest.tensors.size() && !index.empty() && manifest.deltas.empty() &&
      manifest.lists.empty()) {
    const std::string text = encode_index(index, total_bytes);
    FileWriter writer(disk_, path_ + "/" + kIndexName);
    writer.write(text);
    writer.finish();
    manifest.files.push_back(
        {.name = kIndexName, .num_bytes = text.size(), .crc = crc32c(text.data(), text.size())});
  }
  try {
    check_manifest(manifest, "checkpoint.save");
  } catch (const Error& error) {
    throw Error(ErrorKind::kInvalid, error.what());
  }
  if (manifest.commit == 0) {
    manifest.commit = next_commit(root_, disk_);
    manifest.saved = time_now();
  }
  if (manifest.job.empty()) manifest.job = this_job();
  const std::string text = encode_manifest(manifest);
  FileWriter writer(disk_, path_ + "/" + kManifestName);
  writer.write(text);
  writer.finish();
  if (disk_.sync_folder(path_) != 0) throw_write_error("sync", path_);
}

void PendingFolder::commit(int keep) {
  const std::string target = root_ + "/" + name_;
  if (is_there(target, disk_)) {
    if (disk_.exchange(path_, target) != 0) throw_write_error("replace", target);
    // What was there before now has the temporary name; it goes after the root is synced.
  } else if (disk_.rename(path_, target) != 0) {
    throw_write_error("rename to", target);
  }
  const bool has_old = is_there(path_, disk_);
  is_committed_ = true;
  if (disk_.sync_folder(root_) != 0) throw_write_error("sync", root_);
  if (has_old) remove_folder(path_, disk_);

  const std::string latest = root_ + "/" + kLatest;
  const std::string next = latest + ".tmp-" + random_digits(disk_);
  FileWriter writer(disk_, next);
  writer.write(name_ + "\n");
  writer.finish();
  if (disk_.rename(next, latest) != 0) throw_write_error("rename to", latest);
  if (disk_.sync_folder(root_) != 0) throw_write_error("sync", root_);

  if (keep <= 0) return;
  try {
    const std::set<std::string> needed = needed_folders(root_, name_, keep, disk_);
    // Out of sight first, also for whoever comes after a crash: a folder with a final name is
    // always whole.
    std::vector<std::string> gone;
    for (const std::int64_t step : list_steps(root_, disk_)) {
      const std::string name = folder_name(step);
      if (needed.contains(name)) continue;
      const std::string path = root_ + "/" + name;
      gone.push_back(path + ".tmp-" + random_digits(disk_));
      if (disk_.rename(path, gone.back()) != 0) throw_write_error("remove", path);
    }
    if (gone.empty()) return;
    if (disk_.sync_folder(root_) != 0) throw_write_error("sync", root_);
    for (const std::string& path : gone) remove_folder(path, disk_);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kRead) throw;
    // The new one is there; those beyond `keep` go with a later save.
  }
}

}  // namespace tessera::checkpoint

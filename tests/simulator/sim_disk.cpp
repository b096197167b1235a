#include "simulator/sim_disk.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace tessera::simulator {
namespace {

std::string leaf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

}  // namespace

SimDisk::SimDisk(Random& random, Order order)
    : random_(random), order_(order), top_(make(/*is_folder=*/true)) {}

void SimDisk::begin(Plan plan) {
  plan_ = std::move(plan);
  num_calls_ = 0;
}

int SimDisk::refuse(int number) {
  errno = number;
  return -1;
}

// Before every call: whether it is refused.
bool SimDisk::fails(int usual_error) {
  if (!is_between_) {
    ++num_calls_;
    if (plan_.crash_at > 0 && num_calls_ >= plan_.crash_at) has_stopped_ = true;
    if (plan_.between && num_calls_ == plan_.between_at && !has_stopped_) {
      is_between_ = true;
      plan_.between();
      is_between_ = false;
    }
  }
  if (has_stopped_) {
    errno = EIO;
    return true;
  }
  if (!is_between_ && plan_.one_error_in > 0 && random_.one_in(plan_.one_error_in)) {
    errno = usual_error;
    return true;
  }
  return false;
}

SimDisk::NodePtr SimDisk::make(bool is_folder) {
  auto node = std::make_shared<Node>();
  node->is_folder = is_folder;
  node->number = next_number_++;
  return node;
}

SimDisk::NodePtr SimDisk::find(const std::string& path, NodePtr from) const {
  NodePtr node = from ? std::move(from) : top_;
  std::size_t begin = 0;
  while (begin < path.size() && node) {
    const std::size_t end = std::min(path.find('/', begin), path.size());
    const std::string name = path.substr(begin, end - begin);
    begin = end + 1;
    if (name.empty() || name == ".") continue;
    const auto found = node->names.find(name);
    node = found == node->names.end() ? nullptr : found->second;
  }
  return node;
}

SimDisk::NodePtr SimDisk::folder_of(const std::string& path) const {
  return find(path.substr(0, path.rfind('/') + 1));
}

SimDisk::NodePtr SimDisk::node_of(int fd) const {
  const auto found = open_.find(fd);
  return found == open_.end() ? nullptr : found->second;
}

void SimDisk::apply(Change change) {
  for (const Entry& entry : change) {
    if (entry.node) {
      entry.folder->names[entry.name] = entry.node;
    } else {
      entry.folder->names.erase(entry.name);
    }
  }
  unsynced_.push_back(std::move(change));
}

int SimDisk::open(int parent, const std::string& name, int flags) {
  if (fails(random_.flip() ? EMFILE : EIO)) return -1;
  const NodePtr node = parent == AT_FDCWD ? find(name) : find(name, node_of(parent));
  if (!node) return refuse(ENOENT);
  if ((flags & O_DIRECTORY) != 0 && !node->is_folder) return refuse(ENOTDIR);
  open_[next_fd_] = node;
  return next_fd_++;
}

ssize_t SimDisk::read(int fd, void* data, std::size_t num_bytes, std::uint64_t begin) {
  if (fails(random_.flip() ? EINTR : EIO)) return -1;
  const NodePtr node = node_of(fd);
  if (!node || node->is_folder) return refuse(EBADF);
  if (begin >= node->content.size()) return 0;
  std::size_t count = std::min(num_bytes, node->content.size() - begin);
  if (plan_.one_error_in > 0 && count > 1 && random_.one_in(4)) count = 1 + random_.below(count);
  std::memcpy(data, node->content.data() + begin, count);
  return static_cast<ssize_t>(count);
}

void SimDisk::fill(const Node& node, struct stat& facts) {
  static const uid_t user = ::geteuid();
  facts = {};
  facts.st_mode = node.is_folder ? S_IFDIR | 0755 : S_IFREG | 0644;
  facts.st_size = static_cast<off_t>(node.content.size());
  facts.st_ino = node.number;
  facts.st_dev = 1;
  facts.st_nlink = 1;
  facts.st_uid = user;
}

int SimDisk::look(int fd, struct stat& facts) {
  const NodePtr node = node_of(fd);
  if (has_stopped_ || !node) return refuse(EIO);
  fill(*node, facts);
  return 0;
}

int SimDisk::look_at(int parent, const std::string& name, struct stat& facts) {
  if (has_stopped_) return refuse(EIO);
  const NodePtr node = parent == AT_FDCWD ? find(name) : find(name, node_of(parent));
  if (!node) return refuse(ENOENT);
  fill(*node, facts);
  return 0;
}

int SimDisk::list(int fd, std::vector<std::string>& names) {
  if (fails(random_.flip() ? ENOMEM : EIO)) return -1;
  const NodePtr node = node_of(fd);
  if (!node || !node->is_folder) return refuse(ENOTDIR);
  for (const auto& [name, inner] : node->names) names.push_back(name);
  return 0;
}

void SimDisk::pause(int) {}

int SimDisk::make_folder(const std::string& path) {
  if (fails(ENOSPC)) return -1;
  const NodePtr folder = folder_of(path);
  if (!folder) return refuse(ENOENT);
  if (find(path)) return refuse(EEXIST);
  apply({{folder, leaf(path), make(true)}});
  return 0;
}

int SimDisk::create(const std::string& path) {
  if (fails(ENOSPC)) return -1;
  const NodePtr folder = folder_of(path);
  if (!folder) return refuse(ENOENT);
  if (find(path)) return refuse(EEXIST);
  const NodePtr node = make(false);
  apply({{folder, leaf(path), node}});
  open_[next_fd_] = node;
  return next_fd_++;
}

ssize_t SimDisk::write(int fd, const void* data, std::size_t num_bytes) {
  const bool was_running = !has_stopped_;
  const NodePtr node = node_of(fd);
  if (!node) return refuse(EBADF);
  if (fails(random_.flip() ? ENOSPC : EIO)) {
    // The last write of a process may have come half-way.
    if (was_running && random_.flip()) {
      node->content.append(static_cast<const char*>(data), random_.below(num_bytes + 1));
    }
    return -1;
  }
  std::size_t count = num_bytes;
  if (count > 1 && random_.one_in(8)) count = 1 + random_.below(count);
  node->content.append(static_cast<const char*>(data), count);
  return static_cast<ssize_t>(count);
}

int SimDisk::sync(int fd) {
  if (fails(EIO)) return -1;
  const NodePtr node = node_of(fd);
  if (!node) return refuse(EBADF);
  node->synced = node->content;
  return 0;
}

int SimDisk::close(int fd) {
  // Also after the end: the process that had it open is gone.
  open_.erase(fd);
  return has_stopped_ ? refuse(EIO) : 0;
}

int SimDisk::sync_folder(const std::string& path) {
  if (fails(EIO)) return -1;
  const NodePtr folder = find(path);
  if (!folder) return refuse(ENOENT);
  const auto touches = [&](const Change& change) {
    return std::any_of(change.begin(), change.end(),
                       [&](const Entry& entry) { return entry.folder == folder; });
  };
  std::vector<Change> left;
  // With a journal everything before comes along.
  std::size_t last = 0;
  for (std::size_t i = 0; i < unsynced_.size(); ++i) {
    if (touches(unsynced_[i])) last = i + 1;
  }
  for (std::size_t i = 0; i < unsynced_.size(); ++i) {
    const bool goes = order_ == Order::kOrdered ? i < last : touches(unsynced_[i]);
    if (!goes) {
      left.push_back(std::move(unsynced_[i]));
      continue;
    }
    for (const Entry& entry : unsynced_[i]) {
      if (entry.node) {
        entry.folder->synced_names[entry.name] = entry.node;
      } else {
        entry.folder->synced_names.erase(entry.name);
      }
    }
  }
  unsynced_ = std::move(left);
  return 0;
}

int SimDisk::rename(const std::string& from, const std::string& to) {
  if (fails(EIO)) return -1;
  const NodePtr node = find(from);
  const NodePtr source = folder_of(from);
  const NodePtr target = folder_of(to);
  if (!node || !source || !target) return refuse(ENOENT);
  const NodePtr there = find(to);
  if (there && there->is_folder && !there->names.empty()) return refuse(ENOTEMPTY);
  apply({{target, leaf(to), node}, {source, leaf(from), nullptr}});
  return 0;
}

int SimDisk::exchange(const std::string& first, const std::string& second) {
  if (fails(EIO)) return -1;
  const NodePtr a = find(first);
  const NodePtr b = find(second);
  if (!a || !b) return refuse(ENOENT);
  apply({{folder_of(first), leaf(first), b}, {folder_of(second), leaf(second), a}});
  return 0;
}

int SimDisk::remove(const std::string& path) {
  if (fails(EIO)) return -1;
  const NodePtr node = find(path);
  if (!node) return refuse(ENOENT);
  if (node->is_folder) return refuse(EISDIR);
  apply({{folder_of(path), leaf(path), nullptr}});
  return 0;
}

int SimDisk::remove_folder(const std::string& path) {
  if (fails(EIO)) return -1;
  const NodePtr node = find(path);
  if (!node) return refuse(ENOENT);
  if (!node->names.empty()) return refuse(ENOTEMPTY);
  apply({{folder_of(path), leaf(path), nullptr}});
  return 0;
}

// A file of its own each time: who locks is one process here, and a crash frees it.
int SimDisk::open_lock(const std::string&) {
  if (has_stopped_) return refuse(EIO);
  return ::memfd_create("lock", MFD_CLOEXEC);
}

std::uint64_t SimDisk::random() { return random_.next(); }

// The tree as it is on the disk, with what was being written in one of its possible states.
SimDisk::NodePtr SimDisk::survivor(const NodePtr& node, std::map<const Node*, NodePtr>& made) {
  NodePtr& copy = made[node.get()];
  if (copy) return copy;
  copy = make(node->is_folder);
  const NodePtr result = copy;
  if (node->is_folder) {
    for (const auto& [name, inner] : node->synced_names) {
      const NodePtr kept = survivor(inner, made);
      result->names[name] = kept;
      result->synced_names[name] = kept;
    }
    return result;
  }
  std::string content = node->synced;
  const std::size_t num_unsynced = node->content.size() - node->synced.size();
  if (num_unsynced > 0 && random_.flip()) {
    const std::size_t count = random_.flip() ? num_unsynced : random_.below(num_unsynced + 1);
    const bool is_zero = random_.one_in(3);  // the length is there, the data is not
    content += is_zero ? std::string(count, '\0') : node->content.substr(content.size(), count);
  }
  result->content = result->synced = content;
  return result;
}

void SimDisk::restart() {
  std::size_t num_kept = order_ == Order::kOrdered ? random_.below(unsynced_.size() + 1) : 0;
  for (const Change& change : unsynced_) {
    const bool is_kept = order_ == Order::kOrdered ? num_kept > 0 : random_.flip();
    if (num_kept > 0) --num_kept;
    if (!is_kept) continue;
    for (const Entry& entry : change) {
      if (entry.node) {
        entry.folder->synced_names[entry.name] = entry.node;
      } else {
        entry.folder->synced_names.erase(entry.name);
      }
    }
  }
  std::map<const Node*, NodePtr> made;
  top_ = survivor(top_, made);
  open_.clear();
  unsynced_.clear();
  has_stopped_ = false;
  plan_ = {};
}

}  // namespace tessera::simulator

#include "scratch.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "environment.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::launch {
namespace {

namespace fs = std::filesystem;

// A folder without a lock may be one that is being made, by a process this one cannot see.
constexpr time_t kTimeToLock = 60;

std::string temporary_folder() {
  const char* folder = std::getenv("TMPDIR");
  return folder != nullptr && *folder != '\0' ? folder : "/tmp";
}

// When a process began, in ticks since the start of the machine; empty if there is none.
std::string start_time_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return "";
  size_t begin = name_end + 2;
  for (int field = 3; field < 22 && begin != 0; ++field) begin = text.find(' ', begin) + 1;
  return begin == 0 ? "" : text.substr(begin, text.find(' ', begin) - begin);
}

// Whether nobody but this user can put anything there.
bool is_private(const std::string& folder) {
  struct stat status{};
  return lstat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
         status.st_uid == geteuid() && (status.st_mode & 077) == 0;
}

// Whether it is there, and not as a launcher would make it.
bool is_taken(const std::string& folder) {
  struct stat status{};
  return lstat(folder.c_str(), &status) == 0 && !is_private(folder);
}

// Another user may have taken the first of them, or any number.
constexpr int kNumNames = 64;

std::string possible_parent(int number) {
  const std::string first = temporary_folder() + "/tessera-" + std::to_string(geteuid());
  return number == 0 ? first : first + "." + std::to_string(number);
}

[[noreturn]] void throw_no_folder(const std::string& folder) {
  throw LaunchError(kExitInternal, "run: cannot make a folder " + folder,
                    std::generic_category().message(errno), "set TMPDIR to a folder with space");
}

void remove_left_behind(const std::string& parent) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(parent, ignored)) {
    const std::string folder = entry.path().string();
    if (!scratch_is_in_use(folder)) fs::remove_all(folder, ignored);
  }
}

}  // namespace

std::string scratch_parent() {
  for (int i = 0; i < kNumNames; ++i) {
    if (!is_taken(possible_parent(i))) return possible_parent(i);
  }
  return possible_parent(0);
}

std::vector<std::string> scratch_parents() {
  std::vector<std::string> parents;
  for (int i = 0; i < kNumNames; ++i) {
    if (is_private(possible_parent(i))) parents.push_back(possible_parent(i));
  }
  return parents;
}

std::vector<std::string> taken_scratch_parents() {
  std::vector<std::string> taken;
  for (int i = 0; i < kNumNames; ++i) {
    if (is_taken(possible_parent(i))) taken.push_back(possible_parent(i));
  }
  return taken;
}

bool scratch_is_in_use(const std::string& folder) {
  // <pid>.<start time>.<random>
  const std::string name = fs::path(folder).filename().string();
  const size_t first = name.find('.');
  const size_t second = name.find('.', first + 1);
  if (first == std::string::npos || second == std::string::npos) return true;  // not ours
  const std::string pid = name.substr(0, first);
  if (pid.find_first_not_of("0123456789") != std::string::npos) return true;
  if (start_time_of(pid) == name.substr(first + 1, second - first - 1)) return true;
  // Processes of another container cannot be seen, but their locks can.
  const FileDescriptor lock(
      open((folder + "/lock").c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (lock.is_open()) return flock(lock.get(), LOCK_EX | LOCK_NB) != 0;
  struct stat status{};
  return lstat(folder.c_str(), &status) != 0 || time(nullptr) - status.st_mtime < kTimeToLock;
}

Scratch::Scratch() : parent_(scratch_parent()) {
  if (is_taken(parent_)) {
    // All names are taken. The job runs, but nobody finds it.
    parent_ = temporary_folder() + "/tessera-XXXXXX";
    if (mkdtemp(parent_.data()) == nullptr) throw_no_folder(parent_);
  }
  const std::string pid = std::to_string(getpid());
  path_ = parent_ + "/" + pid + "." + start_time_of(pid) + "." + random_hex(3);
}

void Scratch::make() {
  // A launcher that ends at this moment may remove the folder of all, which is empty then.
  while (mkdir(path_.c_str(), 0700) != 0) {
    if (errno != ENOENT || (mkdir(parent_.c_str(), 0700) != 0 && errno != EEXIST)) {
      throw_no_folder(path_);
    }
  }
  if (!is_private(parent_)) {
    rmdir(path_.c_str());
    errno = EACCES;
    throw_no_folder(parent_);
  }
  lock_ =
      FileDescriptor(open((path_ + "/lock").c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!lock_.is_open() || flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) throw_no_folder(path_);
  remove_left_behind(parent_);
}

Scratch::~Scratch() { remove_scratch(path_); }

void remove_scratch(const std::string& path) {
  std::error_code ignored;
  fs::remove_all(path, ignored);
  rmdir(fs::path(path).parent_path().c_str());  // unless another launcher uses it
}

}  // namespace tessera::launch

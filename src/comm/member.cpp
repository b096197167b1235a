#include "comm/member.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>

#include "core/host_name.h"

namespace tessera::comm {
namespace {

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::uint64_t inode_of(const char* path) {
  struct stat status{};
  return ::stat(path, &status) == 0 ? status.st_ino : 0;
}

// The fields of /proc/PID/stat after the command's name, which may itself hold spaces and brackets.
std::string stat_after_name(pid_t pid) {
  const std::string line = first_line(("/proc/" + std::to_string(pid) + "/stat").c_str());
  const auto end_of_name = line.rfind(')');
  return end_of_name == std::string::npos ? "" : line.substr(end_of_name + 1);
}

// A process as /proc tells it.
struct ProcessStatus {
  bool is_known = false;  // whether /proc could be read at all
  bool exists = false;
  char state = '\0';
  std::uint64_t flags = 0;
  std::uint64_t start_time = 0;
};

ProcessStatus status_in(const std::string& path) {
  ProcessStatus status;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    // Without /proc, or out of descriptors, nothing is known.
    status.is_known = errno == ENOENT && ::access("/proc/self/stat", F_OK) == 0;
    return status;
  }
  std::array<char, 1024> text{};
  const ssize_t length = ::read(file, text.data(), text.size() - 1);
  const int error = errno;
  ::close(file);
  status.is_known = length > 0 || error == ESRCH;
  if (length <= 0) return status;
  const std::string line(text.data(), static_cast<std::size_t>(length));
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  std::string skipped;
  fields >> status.state;
  for (int index = 4; index < 9; ++index) fields >> skipped;
  fields >> status.flags;
  for (int index = 10; index < 22; ++index) fields >> skipped;
  fields >> status.start_time;
  status.exists = !fields.fail();
  return status;
}

// From the kernel's sched.h; part of what /proc promises.
constexpr std::uint64_t kExiting = 0x4;
constexpr std::uint64_t kKilledBySignal = 0x400;

bool is_exiting(const ProcessStatus& status) {
  return status.state == 'Z' || status.state == 'X' || (status.flags & kExiting) != 0;
}

// The first thread may end alone; a process has ended when all its threads have.
bool are_all_exiting(pid_t pid) {
  const std::string folder = "/proc/" + std::to_string(pid) + "/task";
  DIR* entries = ::opendir(folder.c_str());
  if (entries == nullptr) return errno == ENOENT;
  bool all = true;
  while (const dirent* entry = ::readdir(entries)) {
    if (entry->d_name[0] == '.') continue;
    const ProcessStatus status = status_in(folder + "/" + entry->d_name + "/stat");
    if (!status.is_known || (status.exists && !is_exiting(status))) {
      all = false;
      break;
    }
  }
  ::closedir(entries);
  return all;
}

// Ranks of one host share memory and see each other's pids. Network and pid namespaces are told
// apart, so that two containers on one machine count as two hosts.
std::string host_identity() {
  std::ostringstream text;
  text << first_line("/proc/sys/kernel/random/boot_id") << '-' << std::hex
       << inode_of("/proc/self/ns/net") << '-' << inode_of("/proc/self/ns/pid");
  return text.str();
}

}  // namespace

std::string Member::describe() const {
  return "rank " + std::to_string(world_rank) + " (pid " + std::to_string(pid) + ", host " +
         host_name + ")";
}

Member this_process(int world_rank) {
  Member member;
  member.world_rank = world_rank;
  member.pid = ::getpid();
  member.start_time = process_start_time(member.pid);
  member.host = host_identity();
  member.host_name = core::host_name();
  return member;
}

std::string encode(const Member& member) {
  std::ostringstream text;
  text << member.world_rank << ' ' << member.pid << ' ' << member.start_time << ' '
       << member.gpus_for_nccl << ' ' << member.host << ' ' << member.host_name;
  return text.str();
}

Member decode_member(const std::string& text) {
  std::istringstream stream(text);
  Member member;
  stream >> member.world_rank >> member.pid >> member.start_time >> member.gpus_for_nccl >>
      member.host;
  if (!stream) throw std::invalid_argument("not a member record: " + text);
  stream >> member.host_name;
  return member;
}

CudaWay choose_cuda_way(const std::vector<Member>& members) {
  std::map<std::string, int> ranks_on_host;
  for (const Member& member : members) ++ranks_on_host[member.host];
  const auto has_enough = [&](const Member& member) {
    return member.gpus_for_nccl >= ranks_on_host[member.host];
  };
  const auto lacking = std::find_if_not(members.begin(), members.end(), has_enough);
  if (lacking == members.end()) return {.is_nccl = true};
  const auto other = std::find_if(members.begin(), members.end(), has_enough);
  if (other == members.end()) return {};
  const int gpus = lacking->gpus_for_nccl;
  const int ranks = ranks_on_host[lacking->host];
  return {.teller = static_cast<int>(other - members.begin()),
          .reason = lacking->describe() + " has " + std::to_string(gpus) +
                    (gpus == 1 ? " GPU" : " GPUs") + " for NCCL, and its host " +
                    std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks") +
                    ". Let every rank see all GPUs of its host (CUDA_VISIBLE_DEVICES)" +
                    (gpus == 0 ? ", with the same TESSERA_ENGINE and a LibTorch with NCCL." : ".")};
}

std::uint64_t process_start_time(pid_t pid) {
  // Field 22 of the line; the state, field 3, is the first one after the name.
  std::istringstream fields(stat_after_name(pid));
  std::string field;
  for (int index = 3; index < 22; ++index) fields >> field;
  std::uint64_t start = 0;
  fields >> start;
  return start;
}

char process_state(pid_t pid) {
  const std::string fields = stat_after_name(pid);
  return fields.size() > 1 ? fields[1] : '\0';
}

bool has_ended(const Member& member) {
  const ProcessStatus status = status_in("/proc/" + std::to_string(member.pid) + "/stat");
  if (!status.is_known) return ::kill(member.pid, 0) != 0 && errno == ESRCH;
  if (!status.exists || status.start_time != member.start_time) return true;
  if ((status.flags & kKilledBySignal) != 0) return true;
  return is_exiting(status) && are_all_exiting(member.pid);
}

}  // namespace tessera::comm

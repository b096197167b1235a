// src/comm/member.h — who sits behind a rank: process and host.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

struct Member {
  int world_rank = 0;
  pid_t pid = 0;
  std::uint64_t start_time =
      0;                  // of the process, in clock ticks since boot: tells reused pids apart
  std::string host;       // equal for ranks that can share memory and see each other's processes
  std::string host_name;  // for people
  int gpus_for_nccl = 0;  // GPUs that this process sees, and may use NCCL for

  /// "rank 2 (pid 4711, host a)".
  std::string describe() const;
};

/// Describes the calling process.
Member this_process(int world_rank);

std::string encode(const Member& member);
/// Throws std::invalid_argument if `text` was not made by encode.
Member decode_member(const std::string& text);

/// How the CUDA tensors of a group travel.
struct CudaWay {
  bool is_nccl = false;  // else through host memory
  int teller = -1;       // who says why it is not NCCL though it takes it for possible; -1: nobody
  std::string reason;    // what it says
};

/// NCCL if every rank of a host can have a GPU of its own. From what all `members` see, so that all
/// decide alike: ranks with different engines would wait for each other.
CudaWay choose_cuda_way(const std::vector<Member>& members);

/// Start time of a process in clock ticks since boot, 0 if there is none with this pid.
std::uint64_t process_start_time(pid_t pid);
/// The state letter of a process from /proc ('R', 'S', 'T', ...), 0 if there is none.
char process_state(pid_t pid);

/// Whether the process of `member`, on this host, has ended or is bound to: a large one takes its
/// time between the signal and the moment its descriptors tell. False if that cannot be known.
bool has_ended(const Member& member);

}  // namespace tessera::comm

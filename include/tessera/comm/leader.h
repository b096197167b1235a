// tessera/comm/leader.h — work that one rank does for all.

#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/check.h"
#include "tessera/core/export.h"

namespace tessera::comm {

/// Whether this process is rank `leader` of the group. Not collective.
TESSERA_API bool is_leader(const Group& group, int leader = 0);

/// Runs `work` on group rank `rank` and returns its bytes on every rank.
///
/// Collective. An exception of `work` is raised on every rank, with its text and the rank's number,
/// as Error(kPeerFailed) on the others and as itself where it happened; the group stays usable.
TESSERA_API std::vector<std::uint8_t> invoke_on_rank_and_broadcast_bytes(
    const Group& group, int rank, const std::function<std::vector<std::uint8_t>()>& work);

/// How a result crosses from the rank that computed it to the others.
template <class T>
struct ResultCodec;

template <class T>
  requires std::is_trivially_copyable_v<T>
struct ResultCodec<T> {
  static std::vector<std::uint8_t> encode(const T& value) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&value);
    return {bytes, bytes + sizeof(T)};
  }
  static T decode(const std::vector<std::uint8_t>& bytes) {
    TESSERA_CHECK_TYPE(bytes.size() == sizeof(T), "comm.invoke_on_rank: the result has ",
                       bytes.size(), " bytes, this rank expects a type of ", sizeof(T),
                       ". Give every rank the same work.");
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
};

template <>
struct ResultCodec<std::string> {
  static std::vector<std::uint8_t> encode(const std::string& value) {
    return {value.begin(), value.end()};
  }
  static std::string decode(const std::vector<std::uint8_t>& bytes) {
    return {bytes.begin(), bytes.end()};
  }
};

/// As above, for any type with a ResultCodec: plain values and strings have one.
template <class Work>
auto invoke_on_rank_and_broadcast_result(const Group& group, int rank, Work&& work) {
  using Result = std::invoke_result_t<Work>;
  return ResultCodec<Result>::decode(invoke_on_rank_and_broadcast_bytes(
      group, rank, [&work] { return ResultCodec<Result>::encode(work()); }));
}

/// Returns a function that runs `work` on the leader and returns its result everywhere. Calling it
/// is collective.
template <class Work>
auto run_on_leader(const Group& group, int leader, Work work) {
  return [group, leader, work = std::move(work)](auto&&... arguments) {
    return invoke_on_rank_and_broadcast_result(group, leader, [&] { return work(arguments...); });
  };
}

}  // namespace tessera::comm

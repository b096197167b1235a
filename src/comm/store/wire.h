// src/comm/store/wire.h — what clients and the server of the job's store say to each other.
//
// After the handshake of core/handshake.h each request is one frame, and so is each answer. A
// request is an operation and its parts; an answer is a status and its parts. No LibTorch.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm::store {

inline constexpr const char* kPurpose = "store";
/// A request or answer that is longer is refused.
inline constexpr std::size_t kLongest = std::size_t{64} << 20;

enum class Operation : std::uint8_t {
  kSet = 1,      // key, value, and so on
  kGet,          // keys; waits until all are there and answers with their values
  kWait,         // keys; the same without the values
  kCheck,        // keys
  kAdd,          // key, number
  kCompareSet,   // key, expected, wanted
  kDelete,       // key
  kCount,        // -
  kAppend,       // key, value
  kPush,         // key, value
  kPop,          // key, "1" to wait
  kLength,       // key
  kList,         // -
  kStopWaiting,  // -; answered by kStopped, after the answer to what was waited for if there is one
};

enum class Status : std::uint8_t { kDone = 1, kNothing, kStopped, kWrong };

class WireError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One request or answer: what it is, and its parts.
struct Packet {
  std::uint8_t code = 0;
  std::vector<std::string> parts;
};

std::string encode(const Packet& packet);
/// Throws WireError if the text is not a packet.
Packet decode(std::string_view text);

}  // namespace tessera::comm::store

#include "tessera/comm/leader.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include "comm/engines.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"

namespace tessera::comm {

bool is_leader(const Group& group, int leader) { return group.rank() == leader; }

std::vector<std::uint8_t> invoke_on_rank_and_broadcast_bytes(
    const Group& group, int rank, const std::function<std::vector<std::uint8_t>()>& work) {
  TESSERA_CHECK_VALUE(rank >= 0 && rank < group.size(), "comm.invoke_on_rank: ", rank,
                      " is not a rank of a group of ", group.size(), ".");
  std::vector<std::uint8_t> bytes;
  std::exception_ptr error;
  if (group.rank() == rank) {
    try {
      bytes = work();
    } catch (const c10::Error& caught) {
      error = std::current_exception();
      const std::string text = caught.what_without_backtrace();
      bytes.assign(text.begin(), text.end());
    } catch (const std::exception& caught) {
      error = std::current_exception();
      const std::string text = caught.what();
      bytes.assign(text.begin(), text.end());
    } catch (...) {
      error = std::current_exception();
    }
  }
  const std::vector<std::int64_t> words{error ? 1 : 0, static_cast<std::int64_t>(bytes.size())};
  const at::Device device = message_device(*group.process_group());
  at::Tensor head = at::tensor(words, at::kLong).to(device);
  broadcast_(head, rank, group);
  head = head.cpu();
  const bool has_failed = head[0].item<std::int64_t>() != 0;
  bytes.resize(static_cast<std::size_t>(head[1].item<std::int64_t>()));
  const at::Tensor own =
      at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte);
  at::Tensor body = own.to(device);  // itself in host memory
  broadcast_(body, rank, group);
  own.copy_(body);
  if (error) std::rethrow_exception(error);
  if (has_failed) {
    throw Error(ErrorKind::kPeerFailed, {rank},
                "comm.invoke_on_rank: rank " + std::to_string(group.world_rank(rank)) +
                    " raised: " + std::string(bytes.begin(), bytes.end()));
  }
  return bytes;
}

}  // namespace tessera::comm

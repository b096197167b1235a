// Messages between two ranks. They run beside the collectives, in order per peer and direction.

#include "comm/backend.h"
#include "comm/tensor_memory.h"
#include "tessera/core/check.h"

namespace tessera::comm {

using Use = TensorMemory::Use;

c10::intrusive_ptr<c10d::Work> EngineBackend::submit_point_to_point(c10d::OpType type,
                                                                    const char* title,
                                                                    at::Tensor tensor, int peer,
                                                                    int tag, bool is_send) {
  check_own(title);
  const char* op = is_send ? "send" : "recv";
  check_tensor(op, tensor, getBackendName());
  TESSERA_CHECK_VALUE(peer < size_ && peer >= (is_send ? 0 : -1), "comm.", op, ": ", peer,
                      " is not a rank of a group of ", size_, " (0 to ", size_ - 1, ").");
  std::shared_ptr<Executor> lane;
  {
    std::lock_guard lock(lanes_mutex_);
    auto& slot = lanes_[{is_send, peer}];
    if (!slot) slot = make_executor(false);
    lane = slot;
  }
  const std::uint64_t sequence = point_to_point_sequence_.fetch_add(1);
  auto run = [this, memory = TensorMemory(tensor, is_send ? Use::kRead : Use::kWrite), peer, tag,
              is_send, sequence, tensor](EngineWork& work) {
    Call call = stamped({}, sequence, std::chrono::milliseconds(0));
    call.op = is_send ? Operator::kSend : Operator::kRecv;
    call.dtype = memory.dtype();
    call.count = memory.count();
    const core::LiveOperation live(monitor_->live_messages(), name_of(call.op), sequence);
    try {
      if (peer == rank_) {
        is_send ? send_to_self(tensor, tag) : recv_from_self(call, tensor, tag);
        if (!is_send) work.set_source_rank(rank_);
      } else if (is_send) {
        transport_->send(call, memory.piece(), peer, tag);
      } else {
        work.set_source_rank(transport_->recv(call, memory.piece(), peer, tag));
        memory.write_back();
      }
    } catch (const Failure& failure) {
      raise(failure);
    }
  };
  auto work = c10::make_intrusive<EngineWork>(lane, rank_, type, event_name(title), sequence,
                                              std::vector<at::Tensor>{tensor}, std::move(run),
                                              nullptr, std::vector<at::Tensor>{tensor});
  work->set_limit(limit_of(std::chrono::milliseconds(0)));
  lane->run_later(work);
  return work;
}

void EngineBackend::send_to_self(const at::Tensor& tensor, int tag) {
  at::Tensor kept = tensor.detach().clone();
  {
    const std::lock_guard lock(own_messages_mutex_);
    own_messages_[tag].push_back(std::move(kept));
  }
  own_messages_changed_.notify_all();
}

void EngineBackend::recv_from_self(const Call& call, const at::Tensor& tensor, int tag) {
  constexpr auto kLookEvery = std::chrono::milliseconds(20);
  const auto begin = Clock::now();
  const int self[] = {rank_};
  std::unique_lock lock(own_messages_mutex_);
  while (own_messages_[tag].empty()) {
    if (own_messages_changed_.wait_for(lock, kLookEvery) == std::cv_status::timeout) {
      monitor_->check_limits(call, self, Clock::now() - begin);
    }
  }
  const at::Tensor message = std::move(own_messages_[tag].front());
  own_messages_[tag].pop_front();
  lock.unlock();
  TESSERA_CHECK_VALUE(
      message.numel() == tensor.numel() && message.scalar_type() == tensor.scalar_type(),
      "comm.recv: rank ", rank_, " expects ", tensor.scalar_type(), " [", tensor.numel(),
      "] from itself, but sent ", message.scalar_type(), " [", message.numel(), "] with tag ", tag,
      ".");
  tensor.detach().copy_(message.view(tensor.sizes()));
}

c10::intrusive_ptr<c10d::Work> EngineBackend::send(std::vector<at::Tensor>& tensors,
                                                   int destination, int tag) {
  TESSERA_CHECK_VALUE(tensors.size() == 1, "comm.send: one tensor is expected, ", tensors.size(),
                      " were given.");
  return submit_point_to_point(c10d::OpType::SEND, "send", tensors[0], destination, tag, true);
}

c10::intrusive_ptr<c10d::Work> EngineBackend::recv(std::vector<at::Tensor>& tensors, int source,
                                                   int tag) {
  TESSERA_CHECK_VALUE(tensors.size() == 1, "comm.recv: one tensor is expected, ", tensors.size(),
                      " were given.");
  return submit_point_to_point(c10d::OpType::RECV, "recv", tensors[0], source, tag, false);
}

c10::intrusive_ptr<c10d::Work> EngineBackend::recvAnysource(std::vector<at::Tensor>& tensors,
                                                            int tag) {
  TESSERA_CHECK_VALUE(tensors.size() == 1, "comm.recv: one tensor is expected, ", tensors.size(),
                      " were given.");
  return submit_point_to_point(c10d::OpType::RECVANYSOURCE, "recvAnySource", tensors[0], -1, tag,
                               false);
}

}  // namespace tessera::comm

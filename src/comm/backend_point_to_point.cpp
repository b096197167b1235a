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
  TESSERA_CHECK_VALUE(peer != rank_, "comm.", op, ": rank ", rank_,
                      " cannot exchange messages with itself.");
  std::shared_ptr<Executor> lane;
  {
    std::lock_guard lock(lanes_mutex_);
    auto& slot = lanes_[{is_send, peer}];
    if (!slot) slot = make_executor(false);
    lane = slot;
  }
  const std::uint64_t sequence = point_to_point_sequence_.fetch_add(1);
  auto run = [this, memory = TensorMemory(tensor, is_send ? Use::kRead : Use::kWrite), peer, tag,
              is_send, sequence](EngineWork& work) {
    Call call = stamped({}, sequence, std::chrono::milliseconds(0));
    call.op = is_send ? Operator::kSend : Operator::kRecv;
    call.dtype = memory.dtype();
    call.count = memory.count();
    try {
      if (is_send) {
        transport_->send(call, memory.piece(), peer, tag);
      } else {
        work.set_source_rank(transport_->recv(call, memory.piece(), peer, tag));
        memory.write_back();
      }
    } catch (const Failure& failure) {
      raise(failure);
    }
  };
  auto work =
      c10::make_intrusive<EngineWork>(lane, rank_, type, title, sequence,
                                      std::vector<at::Tensor>{std::move(tensor)}, std::move(run));
  work->set_limit(limit_of(std::chrono::milliseconds(0)));
  lane->run_later(work);
  return work;
}

c10::intrusive_ptr<c10d::Work> EngineBackend::send(std::vector<at::Tensor>& tensors,
                                                   int destination, int tag) {
  TESSERA_CHECK_VALUE(tensors.size() == 1, "comm.send: one tensor is expected, ", tensors.size(),
                      " were given.");
  return submit_point_to_point(c10d::OpType::SEND, "tessera:send", tensors[0], destination, tag,
                               true);
}

c10::intrusive_ptr<c10d::Work> EngineBackend::recv(std::vector<at::Tensor>& tensors, int source,
                                                   int tag) {
  TESSERA_CHECK_VALUE(tensors.size() == 1, "comm.recv: one tensor is expected, ", tensors.size(),
                      " were given.");
  return submit_point_to_point(c10d::OpType::RECV, "tessera:recv", tensors[0], source, tag, false);
}

c10::intrusive_ptr<c10d::Work> EngineBackend::recvAnysource(std::vector<at::Tensor>& tensors,
                                                            int tag) {
  return recv(tensors, -1, tag);
}

}  // namespace tessera::comm

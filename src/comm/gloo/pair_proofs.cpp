#include "comm/gloo/pair_proofs.h"

#include <string>
#include <vector>

#include <ATen/Functions.h>

#include "tessera/comm/error.h"

namespace tessera::comm {
namespace {

constexpr int kTag = 0x7ffffffe;  // of no message of a user

std::string proof_key(int rank) { return "pair/" + std::to_string(rank); }

// What `from` says to `to`: bound to numbers that both have drawn for this group.
core::Digest proof_of(const core::Secret& secret, int from, const std::string& from_number, int to,
                      const std::string& to_number) {
  return secret.sign("gloo pair " + std::to_string(from) + " to " + std::to_string(to) + ": " +
                     from_number + to_number);
}

at::Tensor as_tensor(const core::Digest& digest) {
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(digest.size())}, at::kByte);
  std::copy(digest.begin(), digest.end(), bytes.mutable_data_ptr<std::uint8_t>());
  return bytes;
}

}  // namespace

void prove_pairs(c10d::Backend& gloo, c10d::Store& store, const core::Secret& secret,
                 std::chrono::milliseconds limit) {
  const int rank = gloo.getRank();
  const int size = gloo.getSize();
  const std::string mine = core::random_bytes(32);
  store.set(proof_key(rank), std::vector<std::uint8_t>(mine.begin(), mine.end()));
  std::vector<std::string> numbers;
  std::vector<at::Tensor> heard;
  std::vector<at::Tensor> said;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int peer = 0; peer < size; ++peer) {
    const auto number = peer == rank ? std::vector<std::uint8_t>{} : store.get(proof_key(peer));
    numbers.emplace_back(number.begin(), number.end());
    heard.push_back(as_tensor({}));
    if (peer == rank) {
      said.emplace_back();
      continue;
    }
    said.push_back(as_tensor(proof_of(secret, rank, mine, peer, numbers.back())));
    std::vector<at::Tensor> incoming{heard.back()};
    std::vector<at::Tensor> outgoing{said.back()};
    works.push_back(gloo.recv(incoming, peer, kTag));
    works.push_back(gloo.send(outgoing, peer, kTag));
  }
  for (const auto& work : works) work->wait(limit);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const core::Digest expected = proof_of(secret, peer, numbers[peer], rank, mine);
    const std::string_view got(
        reinterpret_cast<const char*>(heard[peer].const_data_ptr<std::uint8_t>()), expected.size());
    if (core::same_bytes(got, core::bytes_of(expected))) continue;
    throw Error(
        ErrorKind::kRendezvous, {peer},
        "comm.init: what Gloo takes for the connection to rank " + std::to_string(peer) +
            " does not know the secret of the job: somebody else has connected in its "
            "place, or that rank has another secret. Nothing was sent to it. Let Gloo use an "
            "interface that only the job's hosts reach (TESSERA_INTERFACE).");
  }
}

}  // namespace tessera::comm

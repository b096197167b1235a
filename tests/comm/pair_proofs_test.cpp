#include "comm/gloo/pair_proofs.h"

#include <future>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/gloo/gloo_backend.h"
#include "tessera/comm/error.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

core::Secret secret_of(char letter) {
  return core::Secret::from_text(std::string(40, letter), "the test");
}

// What each rank says after its proofs; one letter a rank names its secret.
std::vector<std::string> prove(const std::string& secrets) {
  const int size = static_cast<int>(secrets.size());
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<std::string>> ends;
  for (int rank = 0; rank < size; ++rank) {
    ends.push_back(std::async(std::launch::async, [&, rank]() -> std::string {
      const auto gloo = make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>("gloo", store),
                                          rank, size, 20s, "127.0.0.1");
      try {
        prove_pairs(*gloo, *store, secret_of(secrets[rank]), 20s);
        return "";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kRendezvous);
        EXPECT_EQ(error.ranks().size(), 1U);
        return error.what();
      }
    }));
  }
  std::vector<std::string> texts;
  for (auto& end : ends) texts.push_back(end.get());
  return texts;
}

TEST(PairProofs, RanksOfOneJobKnowEachOther) {
  for (const std::string secrets : {"ss", "sss", "sssss"}) {
    for (const std::string& text : prove(secrets)) EXPECT_EQ(text, "");
  }
}

// Who has taken a rank's place sits at the other end of Gloo's pairs and knows the protocol, but
// not the secret.
TEST(PairProofs, WhoTookAPlaceIsFoundByAllOthers) {
  const std::vector<std::string> texts = prove("sxs");
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(
        texts[rank].starts_with("comm.init: what Gloo takes for the connection to rank 1 does "
                                "not know the secret of the job: somebody else"))
        << texts[rank];
  }
  EXPECT_NE(texts[1].find("rank 0"), std::string::npos) << texts[1];
}

}  // namespace
}  // namespace tessera::comm

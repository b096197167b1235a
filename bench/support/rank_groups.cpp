#include "support/rank_groups.h"

#include <chrono>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/gloo/gloo_backend.h"

namespace tessera::bench {
namespace {

constexpr std::chrono::seconds kLimit{60};

c10::intrusive_ptr<c10d::Store> connect(const RankBench& bench) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(bench.port());
  options.waitWorkers = false;
  options.timeout = kLimit;
  if (bench.rank() == 0) {
    options.isServer = true;
    options.masterListenFd = bench.listener();
  }
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

comm::GroupOptions options_for(comm::Engine engine) {
  comm::GroupOptions options;
  options.timeout = kLimit;
  options.engine = engine;
  return options;
}

}  // namespace

RankGroups::RankGroups(const RankBench& bench)
    : rank_(bench.rank()), size_(bench.size()), store_(connect(bench)) {}

c10::intrusive_ptr<c10d::Store> RankGroups::part(const std::string& name) const {
  return c10::make_intrusive<c10d::PrefixStore>(name, store_);
}

comm::Group RankGroups::of(comm::Engine engine, const std::string& name) const {
  return comm::make_group(part(name), rank_, size_, options_for(engine));
}

comm::Group RankGroups::plain_gloo(const std::string& name) const {
  const auto store = part(name);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank_, size_);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    comm::make_gloo_backend(store, rank_, size_, kLimit, "127.0.0.1"));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return comm::Group(group);
}

comm::Group RankGroups::alone() const {
  return comm::make_group(part("alone" + std::to_string(rank_)), 0, 1,
                          options_for(comm::Engine::kShm));
}

}  // namespace tessera::bench

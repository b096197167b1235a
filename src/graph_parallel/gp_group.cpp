#include "tessera/graph_parallel/gp_group.h"

#include <algorithm>
#include <memory>
#include <string>

#include "comm/agreement.h"
#include "comm/rank_list.h"
#include "tessera/comm/error.h"
#include "tessera/comm/mesh.h"
#include "tessera/core/check.h"

namespace tessera::graph_parallel {
namespace {

constexpr const char* kDataAxis = "data";
constexpr const char* kGraphAxis = "graph";

thread_local std::unique_ptr<comm::CurrentMesh> own_mesh;

// "1, 2, 3 and 6".
std::string divisors_of(int number) {
  std::string text;
  for (int divisor = 1; divisor <= number; ++divisor) {
    if (number % divisor != 0) continue;
    if (!text.empty()) text += divisor == number ? " or " : ", ";
    text += std::to_string(divisor);
  }
  return text;
}

const comm::Group* group_along(const char* axis) noexcept {
  const comm::Mesh* mesh = comm::CurrentMesh::get();
  if (mesh == nullptr) return nullptr;
  const auto& axes = mesh->axes();
  const bool has_axis = std::any_of(axes.begin(), axes.end(),
                                    [&](const comm::Axis& other) { return other.name == axis; });
  return has_axis ? &mesh->group(axis) : nullptr;
}

}  // namespace

void ensure_div(std::int64_t a, std::int64_t b) {
  TESSERA_CHECK_VALUE(b != 0 && a % b == 0, "graph.ensure_div: ", a, " is not divisible by ", b,
                      ".");
}

std::int64_t divide_and_check_no_remainder(std::int64_t a, std::int64_t b) {
  ensure_div(a, b);
  return a / b;
}

namespace detail {

int agree_on_setup(int gp_gpus, bool is_set_up, std::int64_t backend, const comm::Group& world) {
  const auto words = comm::detail::exchange_words({gp_gpus, is_set_up ? 1 : 0, backend}, world);
  const std::vector<int> different = comm::detail::unlike_the_first(words);
  if (!different.empty()) {
    const auto& first = words[0];
    const auto& other = words[different[0]];
    const auto describe = [&](const std::vector<std::int64_t>& wish) {
      std::string text = "groups of " + std::to_string(wish[0]);
      if (first[1] != other[1]) text += wish[1] != 0 ? " and has some already" : " and has none";
      if (first[2] != other[2]) text += " on another backend";
      return text;
    };
    throw comm::Error(comm::ErrorKind::kMismatch, different,
                      "graph.setup_gp: rank 0 asks for " + describe(first) + ", " +
                          comm::list_ranks(different) + " for " + describe(other) +
                          ". Give every rank the same configuration.");
  }
  TESSERA_CHECK_VALUE(!is_set_up,
                      "graph.setup_gp: the groups are there already. Call cleanup_gp first.");
  TESSERA_CHECK_VALUE(gp_gpus >= 1, "graph.setup_gp: a group of ", gp_gpus,
                      " ranks is not possible.");
  const int size = std::min(gp_gpus, world.size());
  TESSERA_CHECK_VALUE(world.size() % size == 0, "graph.setup_gp: ", world.size(),
                      " ranks cannot be divided into groups of ", size, ". Choose ",
                      divisors_of(world.size()), ".");
  return size;
}

}  // namespace detail

void setup_gp(const GpConfig& config, const comm::Group& world) {
  const int size = detail::agree_on_setup(config.gp_gpus, initialized(), 0, world);
  own_mesh = std::make_unique<comm::CurrentMesh>(
      comm::Mesh(world, {{kDataAxis, world.size() / size}, {kGraphAxis, size}}));
}

void cleanup_gp() noexcept { own_mesh.reset(); }

bool initialized() noexcept { return get_gp_group() != nullptr; }

const comm::Group* get_dp_group() noexcept { return group_along(kDataAxis); }
const comm::Group* get_gp_group() noexcept { return group_along(kGraphAxis); }

int get_dp_rank() noexcept { return get_dp_group() != nullptr ? get_dp_group()->rank() : 0; }
int get_gp_rank() noexcept { return get_gp_group() != nullptr ? get_gp_group()->rank() : 0; }
int get_dp_world_size() noexcept { return get_dp_group() != nullptr ? get_dp_group()->size() : 1; }
int get_gp_world_size() noexcept { return get_gp_group() != nullptr ? get_gp_group()->size() : 1; }

}  // namespace tessera::graph_parallel

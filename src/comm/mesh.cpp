#include "tessera/comm/mesh.h"

#include <algorithm>
#include <map>
#include <sstream>

#include <ATen/Functions.h>

#include "comm/agreement.h"
#include "comm/rank_list.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

// "data 2 x vocab 4".
std::string describe(const std::vector<Axis>& axes) {
  std::ostringstream text;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    text << (i > 0 ? " x " : "") << axes[i].name << ' ' << axes[i].size;
  }
  return text.str();
}

void check_axes(const Group& world, const std::vector<Axis>& axes) {
  TESSERA_CHECK_VALUE(!axes.empty(), "comm.mesh: a mesh has at least one axis.");
  std::int64_t product = 1;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    TESSERA_CHECK_VALUE(!axes[i].name.empty(), "comm.mesh: axis ", i, " has no name.");
    TESSERA_CHECK_VALUE(axes[i].size >= 1, "comm.mesh: axis '", axes[i].name, "' has size ",
                        axes[i].size, ".");
    for (std::size_t j = 0; j < i; ++j) {
      TESSERA_CHECK_VALUE(axes[i].name != axes[j].name, "comm.mesh: two axes are named '",
                          axes[i].name, "'.");
    }
    product *= axes[i].size;
  }
  TESSERA_CHECK_VALUE(product == world.size(), "comm.mesh: ", describe(axes), " makes ", product,
                      " places for ", world.size(), " ranks. The sizes must multiply to ",
                      world.size(), ".");
}

// Every rank compares all descriptions, so all raise the same.
void check_agreement(const Group& world, const std::vector<Axis>& axes) {
  const auto descriptions = detail::exchange_texts(describe(axes), world);
  const std::vector<int> different = detail::unlike_the_first(descriptions);
  if (different.empty()) return;
  throw Error(ErrorKind::kMismatch, different,
              "comm.mesh: rank 0 asks for " + descriptions[0] + ", " + list_ranks(different) +
                  " for " + descriptions[different[0]] + ". Give every rank the same axes.");
}

}  // namespace

struct Mesh::State {
  Group world;
  std::vector<Axis> axes;
  std::vector<int> coordinates;
  std::vector<Group> groups;

  std::size_t index_of(const std::string& axis) const {
    for (std::size_t i = 0; i < axes.size(); ++i) {
      if (axes[i].name == axis) return i;
    }
    TESSERA_CHECK_VALUE(false, "comm.mesh: there is no axis '", axis, "' in the mesh ",
                        describe(axes), ".");
  }

  // Ranks that share this rank's coordinates in all axes but the free ones, in mesh order.
  std::vector<int> ranks_along(const std::vector<bool>& is_free) const {
    std::vector<int> ranks{0};
    for (std::size_t i = 0; i < axes.size(); ++i) {
      std::vector<int> next;
      for (const int base : ranks) {
        for (int place = 0; place < axes[i].size; ++place) {
          if (is_free[i] || place == coordinates[i]) next.push_back(base * axes[i].size + place);
        }
      }
      ranks = std::move(next);
    }
    return ranks;
  }
};

void Mesh::check(const Group& world, const std::vector<Axis>& axes) {
  check_axes(world, axes);
  check_agreement(world, axes);
}

Mesh::Mesh(const Group& world, std::vector<Axis> axes) {
  check(world, axes);
  auto state = std::make_shared<State>(State{world, std::move(axes), {}, {}});
  int rest = world.rank();
  state->coordinates.resize(state->axes.size());
  for (std::size_t i = state->axes.size(); i-- > 0;) {
    state->coordinates[i] = rest % state->axes[i].size;
    rest /= state->axes[i].size;
  }
  for (std::size_t i = 0; i < state->axes.size(); ++i) {
    std::vector<bool> is_free(state->axes.size(), false);
    is_free[i] = true;
    state->groups.push_back(*world.subgroup(state->ranks_along(is_free), state->axes[i].name));
  }
  state_ = std::move(state);
}

const Group& Mesh::world() const noexcept { return state_->world; }

const std::vector<Axis>& Mesh::axes() const noexcept { return state_->axes; }

const Group& Mesh::group(const std::string& axis) const {
  return state_->groups[state_->index_of(axis)];
}

int Mesh::coordinate(const std::string& axis) const {
  return state_->coordinates[state_->index_of(axis)];
}

int Mesh::size(const std::string& axis) const { return state_->axes[state_->index_of(axis)].size; }

Group Mesh::flatten(const std::vector<std::string>& axes) const {
  TESSERA_CHECK_VALUE(!axes.empty(), "comm.mesh: name at least one axis to flatten.");
  std::vector<bool> is_free(state_->axes.size(), false);
  for (const std::string& axis : axes) {
    const std::size_t index = state_->index_of(axis);
    TESSERA_CHECK_VALUE(!is_free[index], "comm.mesh: axis '", axis, "' is named twice.");
    is_free[index] = true;
  }
  std::string name;
  for (std::size_t i = 0; i < is_free.size(); ++i) {
    if (is_free[i]) name += (name.empty() ? "" : "+") + state_->axes[i].name;
  }
  return *state_->world.subgroup(state_->ranks_along(is_free), name);
}

namespace {
thread_local CurrentMesh* innermost = nullptr;
}

CurrentMesh::CurrentMesh(Mesh mesh) : mesh_(std::move(mesh)), outer_(innermost) {
  innermost = this;
}

CurrentMesh::~CurrentMesh() { innermost = outer_; }

const Mesh* CurrentMesh::get() noexcept {
  return innermost == nullptr ? nullptr : &innermost->mesh_;
}

}  // namespace tessera::comm

#include <algorithm>
#include <cstring>

#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "embedding/table_device.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/table_launch.h"
#include "tessera/core/check.h"

namespace tessera::embedding::detail {
namespace {

namespace cuda = kernels::cuda;

void* stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

void check(int error, const char* kernel) {
  TORCH_CHECK(error == 0, "embedding: the CUDA kernel '", kernel,
              "' did not start: ", cuda::error_text(error), ".");
}

at::Tensor bytes_on(c10::Device device, std::size_t count) {
  return at::empty({static_cast<std::int64_t>(std::max<std::size_t>(count, 1))},
                   at::TensorOptions().dtype(at::kByte).device(device));
}

/// Copies `count` bytes to place `at` of the device's memory. They are staged in pinned memory, of
/// which LibTorch keeps blocks: the host does not wait for the stream, which it may for other
/// memory.
void upload(const void* from, std::size_t count, const at::Tensor& to, std::size_t at = 0) {
  if (count == 0) return;
  const auto size = static_cast<std::int64_t>(count);
  const at::Tensor staged =
      at::empty({size}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  std::memcpy(staged.data_ptr(), from, count);
  to.narrow(0, static_cast<std::int64_t>(at), size).copy_(staged, /*non_blocking=*/true);
}

/// Work memory that is kept.
char* work(Workspace& workspace, c10::Device device, std::size_t count) {
  if (!workspace.device_bytes.defined() || workspace.device_bytes.device() != device ||
      workspace.device_bytes.numel() < static_cast<std::int64_t>(count)) {
    workspace.device_bytes = at::Tensor();
    workspace.device_bytes = bytes_on(device, count);
  }
  return static_cast<char*>(workspace.device_bytes.data_ptr());
}

std::size_t rounded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

void upload_steps(const std::vector<cuda::TableSteps>& steps, const Workspace& workspace,
                  std::size_t at) {
  upload(steps.data(), steps.size() * sizeof(steps[0]), workspace.device_bytes, at);
}

void hand_over(const cuda::TableCall& call, const cuda::SortedRows& sorted,
               const std::vector<cuda::TableSteps>& steps, char* device_steps, char* step_work,
               const float* gradient, float limit) {
  check(cuda::step_sorted_rows(
            call, sorted, reinterpret_cast<const cuda::TableSteps*>(device_steps), steps.data(),
            static_cast<int>(steps.size()), gradient, limit, step_work, stream()),
        "step rows");
}

/// The first position with an id outside its table, -1 if there is none, -2 for wrong offsets. The
/// host waits for it.
std::int64_t checked(const TablePass& pass, const cuda::TableCall& call, c10::Device device) {
  const at::Tensor result = at::empty({1}, at::TensorOptions().dtype(at::kLong).device(device));
  check(cuda::table_check(call, result.data_ptr<std::int64_t>(), stream()), "check ids");
  const auto found = result.item<std::int64_t>();
  return found == pass.num_positions ? -1 : found;
}

}  // namespace

cuda::TableCall device_call(const TablePass& pass, Workspace& workspace, c10::Device device) {
  const std::size_t features = pass.features.size() * sizeof(kernels::TableFeature);
  std::vector<char> bytes(features + pass.table_of.size() * sizeof(std::int32_t), 0);
  std::memcpy(bytes.data(), pass.features.data(), features);
  auto* table_of = reinterpret_cast<std::int32_t*>(bytes.data() + features);
  for (std::size_t f = 0; f < pass.table_of.size(); ++f) {
    table_of[f] = static_cast<std::int32_t>(pass.table_of[f]);
  }
  if (!workspace.device_features.defined() || workspace.uploaded != bytes) {
    workspace.device_features = bytes_on(device, bytes.size());
    upload(bytes.data(), bytes.size(), workspace.device_features);
    workspace.uploaded = bytes;
  }
  cuda::TableCall call;
  call.ids = pass.ids;
  call.features =
      static_cast<const kernels::TableFeature*>(workspace.device_features.const_data_ptr());
  call.num_features = static_cast<int>(pass.features.size());
  call.num_bags = pass.num_bags;
  call.num_positions = pass.num_positions;
  call.is_sequence = pass.is_sequence;
  call.bags_per_feature = pass.features.front().num_bags;
  call.has_packs = true;
  for (const auto& feature : pass.features) {
    if (feature.num_bags != call.bags_per_feature) call.bags_per_feature = 0;
    const std::int64_t apart = pass.is_sequence ? feature.rows.num_columns : feature.output_stride;
    const bool begins_at_pack = feature.output < 0 || feature.output % 4 == 0;
    call.has_packs = call.has_packs && begins_at_pack && apart % 4 == 0;
  }
  return call;
}

const std::int32_t* device_tables_of(const TablePass& pass, const Workspace& workspace) {
  return reinterpret_cast<const std::int32_t*>(
      static_cast<const char*>(workspace.device_features.const_data_ptr()) +
      pass.features.size() * sizeof(kernels::TableFeature));
}

std::int64_t cuda_lookup(const TablePass& pass, Workspace& workspace, bool is_checked,
                         const at::Tensor& output) {
  const c10::cuda::CUDAGuard guard(output.device());
  const cuda::TableCall call = device_call(pass, workspace, output.device());
  std::int64_t bad = -1;
  if (is_checked) {
    bad = checked(pass, call, output.device());
    if (bad == -2) return -2;
  }
  check(cuda::table_lookup(call, pass.features.data(), output.data_ptr<float>(), stream()),
        "look up");
  return bad;
}

std::int64_t cuda_check(const TablePass& pass, Workspace& workspace, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  return checked(pass, device_call(pass, workspace, device), device);
}

void cuda_weight_gradient(const TablePass& pass, Workspace& workspace, const at::Tensor& gradient,
                          const at::Tensor& output) {
  const c10::cuda::CUDAGuard guard(gradient.device());
  const cuda::TableCall call = device_call(pass, workspace, gradient.device());
  check(cuda::table_weight_gradient(call, gradient.const_data_ptr<float>(),
                                    output.data_ptr<float>(), stream()),
        "weight gradient");
}

void cuda_backward(const TablePass& pass, const at::Tensor& gradient, float limit,
                   Workspace& workspace, std::vector<TableTarget>& targets) {
  const c10::Device device = gradient.device();
  const c10::cuda::CUDAGuard guard(device);
  const auto options = at::TensorOptions().device(device);
  const auto make_empty = [&](TableTarget& target) {
    if (target.kind != TableTarget::Kind::kSparse) return;
    target.indices = at::empty({0}, options.dtype(at::kLong));
    target.values = at::empty({0, target.rows.num_columns}, options.dtype(at::kFloat));
  };
  if (pass.num_positions == 0) {
    std::for_each(targets.begin(), targets.end(), make_empty);
    return;
  }
  TESSERA_CHECK_VALUE(pass.num_positions < (std::int64_t{1} << 31), "embedding: there are ",
                      pass.num_positions, " ids in one call; on CUDA there may be 2147483647.");
  const cuda::TableCall call = device_call(pass, workspace, device);

  std::vector<cuda::TableSteps> steps(targets.size());
  std::vector<std::uint32_t> first_keys(targets.size());
  std::int64_t num_keys = 0;
  std::int64_t max_columns = 0;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    first_keys[i] = static_cast<std::uint32_t>(num_keys);
    num_keys += targets[i].rows.num_rows;
    max_columns = std::max(max_columns, targets[i].rows.num_columns);
  }
  TESSERA_CHECK_VALUE(num_keys < (std::int64_t{1} << 31),
                      "embedding: the tables of one batch have ", num_keys,
                      " rows together; on CUDA there may be 2147483647. Use two batches.");

  const std::size_t key_bytes = rounded(first_keys.size() * 4);
  const std::size_t step_bytes = rounded(steps.size() * sizeof(cuda::TableSteps));
  const bool keeps_bags = pass.is_weighted && !pass.is_sequence;
  // Sparse gradients: where each table's runs begin must be known here.
  const bool has_sparse = std::any_of(
      targets.begin(), targets.end(),
      [](const TableTarget& target) { return target.kind == TableTarget::Kind::kSparse; });
  std::vector<std::int64_t> first_runs(targets.size() + 1, 0);
  at::Tensor rows;
  const auto describe = [&] {
    for (std::size_t i = 0; i < targets.size(); ++i) {
      TableTarget& target = targets[i];
      cuda::TableSteps& step = steps[i];
      step.rows = target.rows;
      step.state = target.state;
      step.step = target.step;
      step.first_key = first_keys[i];
      switch (target.kind) {
        case TableTarget::Kind::kNone:
          step.rows.num_rows = 0;  // nobody's kernel takes it
          break;
        case TableTarget::Kind::kStep:
          step.target = cuda::RowTarget::kStep;
          break;
        case TableTarget::Kind::kDense:
          step.target = cuda::RowTarget::kByRow;
          step.sums = target.values.data_ptr<float>();
          break;
        case TableTarget::Kind::kSparse:
          step.target = cuda::RowTarget::kByRun;
          step.first_run = static_cast<std::uint32_t>(first_runs[i]);
          target.indices = rows.slice(0, first_runs[i], first_runs[i + 1])
                               .sub(static_cast<std::int64_t>(first_keys[i]));
          target.values = at::empty({first_runs[i + 1] - first_runs[i], target.rows.num_columns},
                                    options.dtype(at::kFloat));
          step.sums = target.values.data_ptr<float>();
          break;
      }
    }
  };
  if (!has_sparse) describe();
  const bool is_apart =
      !has_sparse && cuda::steps_apart(call, steps.data(), static_cast<int>(steps.size()));
  const std::size_t work_bytes =
      is_apart ? 0 : rounded(cuda::step_bytes(pass.num_positions, max_columns));
  const std::size_t rest_bytes = is_apart
                                     ? cuda::apart_bytes(pass.num_positions, num_keys, max_columns)
                                     : cuda::sort_bytes(pass.num_positions);
  char* const base = work(workspace, device, key_bytes + step_bytes + work_bytes + rest_bytes);
  upload(first_keys.data(), first_keys.size() * 4, workspace.device_bytes);
  if (!has_sparse) upload_steps(steps, workspace, key_bytes);
  if (is_apart) {
    check(cuda::step_rows_apart(
              call, device_tables_of(pass, workspace), reinterpret_cast<const std::uint32_t*>(base),
              num_keys, keeps_bags, reinterpret_cast<const cuda::TableSteps*>(base + key_bytes),
              steps.data(), static_cast<int>(steps.size()), gradient.const_data_ptr<float>(), limit,
              base + key_bytes + step_bytes, stream()),
          "step rows");
    return;
  }
  cuda::SortedRows sorted;
  check(cuda::sort_rows(call, device_tables_of(pass, workspace),
                        reinterpret_cast<const std::uint32_t*>(base), num_keys, keeps_bags,
                        base + key_bytes + step_bytes + work_bytes, &sorted, stream()),
        "sort rows");

  if (has_sparse) {
    std::uint32_t num_runs = 0;
    check(cudaMemcpyAsync(&num_runs, sorted.num_runs, 4, cudaMemcpyDeviceToHost,
                          static_cast<cudaStream_t>(stream())),
          "download");
    check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream())), "download");
    const auto view = [&](const std::uint32_t* data, std::int64_t count) {
      return at::from_blob(const_cast<std::uint32_t*>(data), {count}, options.dtype(at::kInt))
          .to(at::kLong);
    };
    rows = view(sorted.keys, sorted.num_entries)
               .index_select(0, view(sorted.run_starts, static_cast<std::int64_t>(num_runs)));
    std::vector<std::int64_t> bounds(first_keys.begin(), first_keys.end());
    bounds.push_back(num_keys);
    const at::Tensor found = at::searchsorted(rows, at::tensor(bounds, at::kLong).to(device)).cpu();
    for (std::size_t i = 0; i <= targets.size(); ++i) {
      first_runs[i] = found[static_cast<std::int64_t>(i)].item<std::int64_t>();
    }
  }
  if (has_sparse) {
    describe();
    upload_steps(steps, workspace, key_bytes);
  }
  hand_over(call, sorted, steps, base + key_bytes, base + key_bytes + step_bytes,
            gradient.const_data_ptr<float>(), limit);
}

void cuda_step_rows(const kernels::TableRows& table, const kernels::RowState& state,
                    const kernels::RowStep& step, const at::Tensor& rows,
                    const at::Tensor& gradients, float limit) {
  const c10::Device device = gradients.device();
  const c10::cuda::CUDAGuard guard(device);
  const std::int64_t count = gradients.size(0);
  const auto ints = at::TensorOptions().dtype(at::kInt).device(device);
  const at::Tensor order = at::arange(count, ints);
  const at::Tensor keys = rows.defined() ? rows.to(at::kInt) : order;
  const at::Tensor num_runs = at::full({1}, count, ints);
  // One feature of one width: the gradient of source i is row i.
  Workspace workspace;
  TablePass pass;
  pass.is_sequence = true;
  pass.num_positions = count;
  pass.num_tables = 1;
  pass.table_of = {0};
  kernels::TableFeature feature;
  feature.rows = table;
  feature.output = -1;
  pass.features = {feature};
  const cuda::TableCall call = device_call(pass, workspace, device);
  cuda::SortedRows sorted;
  const auto numbers = [](const at::Tensor& tensor) {
    return reinterpret_cast<const std::uint32_t*>(tensor.const_data_ptr<std::int32_t>());
  };
  sorted.keys = numbers(keys);
  sorted.values = numbers(order);
  sorted.run_starts = numbers(order);
  sorted.num_runs = numbers(num_runs);
  sorted.num_entries = count;
  sorted.count = sorted.num_runs;
  const at::Tensor spare = at::empty({count / 2 + 1}, ints);
  sorted.spare = reinterpret_cast<std::uint32_t*>(spare.data_ptr<std::int32_t>());
  std::vector<cuda::TableSteps> steps(1);
  steps[0].rows = table;
  steps[0].state = state;
  steps[0].step = step;
  const std::size_t step_bytes = rounded(sizeof(cuda::TableSteps));
  char* const base =
      work(workspace, device, step_bytes + cuda::step_bytes(count, table.num_columns));
  upload_steps(steps, workspace, 0);
  hand_over(call, sorted, steps, base, base + step_bytes, gradients.const_data_ptr<float>(), limit);
}

}  // namespace tessera::embedding::detail

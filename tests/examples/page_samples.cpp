// The C++ of the pages and of what headers say first, which are pages too, compiled; test_pages.py
// looks for it here. The program is README's.

#include <memory>
#include <optional>
#include <vector>

#include <torch/torch.h>

#include "dlrm/click_file.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/checkpoint/save.h"
#include "tessera/collision/growing_tables.h"
#include "tessera/collision/id_table.h"
#include "tessera/collision/managed_collision_tables.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/mesh.h"
#include "tessera/core/step_recorder.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/hooks.h"
#include "tessera/data_parallel/join.h"
#include "tessera/data_parallel/mixed_precision.h"
#include "tessera/data_parallel/optimizer_in_backward.h"
#include "tessera/data_parallel/powersgd.h"
#include "tessera/embedding/table_batch.h"
#include "tessera/graph_parallel/halo.h"
#include "tessera/graph_parallel/halo_plan.h"
#include "tessera/graph_parallel/partition.h"
#include "tessera/jagged/keyed_jagged_tensor.h"
#include "tessera/pipeline/read_ahead.h"
#include "tessera/pipeline/train_pipeline.h"
#include "tessera/regions/regions.h"
#include "tessera/serving/model.h"
#include "tessera/sharding/distributed_model_parallel.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"
#include "tessera/sharding/sharded_quant_embedding_bag_collection.h"
#include "tessera/vocab_parallel/cross_entropy.h"

namespace tessera::page_samples {

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};
struct Model : torch::nn::Module {
  at::Tensor forward(const jagged::KeyedJaggedTensor& batch) { return batch.values(); }
};
struct Sample {
  at::Tensor x;
  at::Tensor y;
};
struct Layer {
  at::Tensor interior(const at::Tensor& h) const { return h; }
  at::Tensor boundary(const at::Tensor& h, const at::Tensor& halo) const { return h + halo.sum(); }
  at::Tensor update(const at::Tensor& h, const at::Tensor& sums) const { return h + sums; }
};
struct Batch {
  at::Tensor dense;
  at::Tensor labels;
  jagged::KeyedJaggedTensor sparse;
};

void vocabulary(const at::Tensor& local_logits, const at::Tensor& labels, comm::Mesh& mesh) {
  auto loss = tessera::vocab_parallel::cross_entropy(local_logits, labels, mesh.group("vocab"),
                                                     {.label_smoothing = 0.1, .z_loss = 1e-4});
  loss.backward();
}

void checkpoints(const std::shared_ptr<Net>& net, torch::optim::Adam& optimizer,
                 const comm::Group& world, int64_t num_rows, int64_t first_row,
                 const at::Tensor& my_rows, int64_t step) {
  struct {
    int64_t position() { return 3; }
  } reader;
  tessera::checkpoint::State state;
  tessera::checkpoint::add_module(state, net);
  tessera::checkpoint::add_optimizer(state, optimizer, *net);
  state.add_shard("table", {num_rows, 64}, {first_row, 0}, my_rows);
  state.values["step"] = step;
  state.rank_values["position"] = reader.position();

  tessera::checkpoint::save("runs/a", step, state, world, {.keep = 3});
  auto report = tessera::checkpoint::load("runs/a", state, world);
}

int guarded_training(const comm::Group& world) {
  auto train = [](comm::Group) { return 0; };
  return tessera::comm::guarded([&] { return train(world); });
}

void hooks(const std::shared_ptr<Net>& net, const comm::Group& world) {
  using namespace tessera::data_parallel;
  auto hook = power_sgd_hook({.matrix_approximation_rank = 4, .start_step = 100});
  DistributedDataParallel model(net, world);
  model.register_comm_hook(hook);
  model.register_comm_hook(hook_then_optimizer(all_reduce_hook(), adamw_in_backward({.lr = 3e-4})));
}

void mixed_precision(const std::shared_ptr<Net>& net, const comm::Group& world) {
  using namespace tessera::data_parallel;
  DistributedDataParallel<Net> model(
      net, world, {},
      MixedPrecisionOptions{.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16});
  auto optimizer = torch::optim::Adam(model.parameters());
}

void data_parallel_loop(const std::vector<Sample>& mine) {
  auto world = tessera::comm::init();
  auto net = std::make_shared<Net>();
  tessera::data_parallel::DistributedDataParallel model(net, world,
                                                        {.gradient_as_bucket_view = true});
  torch::optim::AdamW optimizer(net->parameters());
  for (const auto& batch : mine) {
    optimizer.zero_grad();
    torch::mse_loss(model(batch.x), batch.y).backward();
    optimizer.step();
  }
}

void ddp_on_mesh(const std::shared_ptr<Net>& net, comm::Mesh& mesh) {
  using namespace tessera::data_parallel;
  DistributedDataParallel model(net, mesh, {.average = {"data"}, .sum = {"graph"}});
}

void split_graph(const at::Tensor& positions, const comm::Group& group, const at::Tensor& cell,
                 const at::Tensor& edge_index, const at::Tensor& features,
                 const std::vector<Layer>& layers) {
  auto readout = [](const at::Tensor& h) { return h; };
  const auto partition =
      graph_parallel::Partition::recursive_bisection(positions, group.size(), {.cell = cell});
  const auto mine = graph_parallel::edges_of_part(edge_index, partition, group.rank());
  const graph_parallel::HaloPlan plan(partition, edge_index.index_select(1, mine), group,
                                      {.is_symmetric = true});

  auto h = features.index_select(0, partition.nodes_of(group.rank()));
  for (const auto& layer : layers) {
    auto pending = graph_parallel::halo_exchange_async(h, plan);
    auto sums = layer.interior(h);
    sums = sums + layer.boundary(h, pending.finish());
    h = layer.update(h, sums);
  }

  auto energy = regions::reduce(readout(h).sum(), group);
}

void jagged_batch(const at::Tensor& ids, const at::Tensor& lengths) {
  auto batch = jagged::KeyedJaggedTensor::from_lengths_sync({"user", "item"}, ids, lengths);
  batch["item"].to_padded_dense();
  auto parts = batch.split({1, 1});
  auto twice = batch.permute({1, 0, 1});
}

void pipelined(torch::optim::Adam& optimizer,
               const std::shared_ptr<sharding::ShardedEmbeddingBagCollection>& tables) {
  struct {
    at::Tensor forward(const at::Tensor& d, const jagged::KeyedTensor&) { return d; }
  } model;
  auto loss_of = [](const at::Tensor& a, at::Tensor) { return a; };
  struct {
    std::optional<Batch> next() { return std::nullopt; }
  } source;
  pipeline::Steps<Batch> steps;
  steps.zero_grad = [&] { optimizer.zero_grad(); };
  steps.forward = [&](const Batch& batch, const pipeline::SparseInputs& inputs) {
    auto rows = tables->compute_and_output_dist(inputs.of(*tables)).wait();
    auto logits = model.forward(batch.dense, rows);
    return pipeline::Result{loss_of(logits, batch.labels), logits};
  };
  steps.step = [&] { optimizer.step(); };

  pipeline::TrainPipelineSparseDist<Batch> pipe(
      steps, {{"tables", tables, [](const Batch& batch) { return batch.sparse; }}});
  while (auto logits = pipe.progress([&] { return source.next(); })) {
  }
  pipeline::ReadAhead<Batch> ahead([&] { return source.next(); });
  while (auto logits = pipe.progress([&] { return ahead.next(); })) {
  }
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // what is left out uses it
void pipelined_in_short(const std::shared_ptr<sharding::ShardedEmbeddingBagCollection>& ebc,
                        const at::Tensor& losses, const at::Tensor& logits) {
  const auto features_of = [](const Batch& batch) { return batch.sparse; };
  struct {
    std::optional<Batch> next() { return std::nullopt; }
  } source;
  pipeline::Steps<Batch> steps;
  steps.forward = [&](const Batch& batch, const pipeline::SparseInputs& inputs) {
    auto rows = ebc->compute_and_output_dist(inputs.of(*ebc)).wait();
    return pipeline::Result{losses, logits};
  };
  pipeline::TrainPipelineSparseDist<Batch> pipe(steps, {{"ebc", ebc, features_of}});
  while (auto output = pipe.progress([&] { return source.next(); })) {
  }
  pipeline::ReadAhead<Batch> ahead([&] { return source.next(); });
  while (auto output = pipe.progress([&] { return ahead.next(); })) {
  }
}
#pragma GCC diagnostic pop

void uneven_batches(const std::shared_ptr<Net>& net, const comm::Group& world,
                    const std::vector<Sample>& mine) {
  using namespace tessera::data_parallel;
  DistributedDataParallel model(net, world);
  const auto step = [&](const Sample& sample) { model(sample.x).sum().backward(); };
  join({&model.replica()}, [&] {
    for (auto& batch : mine) step(batch);
  });
}

void forces_of(const at::Tensor& positions, const comm::Group& group) {
  auto my_part_of = [](const at::Tensor& x) { return x.sum(); };
  auto inside = regions::copy(positions, group);
  auto energy = regions::reduce(my_part_of(inside), group);
  auto forces = -torch::autograd::grad({energy}, {positions}, {}, {}, /*create_graph=*/true)[0];
}

void recorded(int64_t step) {
  at::Tensor loss;
  auto net = [](int) { return at::Tensor(); };
  int batch = 0;
  core::StepRecorder recorder;
  const core::UseRecorder use(recorder);
  recorder.begin_step(step);
  {
    const core::Span span(core::Phase::kDense);
    loss = net(batch);
  }

  const core::StepTotals time = recorder.end_step();
  (void)time;
}

void sharded(const std::vector<embedding::EmbeddingBagConfig>& tables, const comm::Group& group,
             const jagged::KeyedJaggedTensor& batch) {
  auto plan = sharding::make_module_plan(
      tables, {{"users", sharding::row_wise()}, {"items", sharding::column_wise({0, 1})}},
      {.world_size = 4, .local_size = 2});
  const auto& configs = tables;
  {
    sharding::ShardedEmbeddingBagCollection tables(configs, plan, group);
    const jagged::KeyedTensor pooled = tables.forward(batch);
  }
}

void model_parallel(const sharding::ShardingPlan& plan, const comm::Group& group,
                    const jagged::KeyedJaggedTensor& batch) {
  const auto loss = [](const at::Tensor& x) { return x.sum(); };
  sharding::DistributedModelParallel model(std::make_shared<Model>(), plan, group);
  torch::optim::SGD dense(sharding::dense_parameters_of(model.parts()), 0.1);
  loss(model(batch)).backward();
  dense.step();
}

void id_table(std::span<const std::int64_t> ids, std::int64_t step, std::span<std::int64_t> rows) {
  using collision::AdmissionKind;
  using collision::EvictionKind;
  collision::IdTable table({.name = "user",
                            .capacity = 1'000'000,
                            .admission = {.kind = AdmissionKind::kFrequency, .sightings = 3},
                            .eviction = {.kind = EvictionKind::kLfu},
                            .refuse_when_full = true});
  collision::IdChanges changes = table.admit(ids, /*counts=*/{}, step, rows);
  table.find(ids, rows);
}

void growing_tables(const comm::Group& world, const embedding::OptimizerOptions& adagrad,
                    const jagged::KeyedJaggedTensor& features) {
  collision::GrowingTable user;
  user.config = {.embedding_dim = 16, .name = "user", .feature_names = {"user", "friend"}};
  user.ids = {.capacity = 100'000'000, .eviction = {.kind = collision::EvictionKind::kLfu}};
  collision::GrowingEmbeddingBagCollection tables({user}, world, {.optimizer = adagrad});
  jagged::KeyedTensor pooled = tables.forward(features);  // any ids; all ranks call it
}

void managed_collision(const embedding::EmbeddingBagConfig& user,
                       const jagged::KeyedJaggedTensor& features) {
  collision::MchOptions options;
  options.zch_size = 1000;
  options.eviction_policy = std::make_shared<collision::LfuEvictionPolicy>();
  options.eviction_interval = 10;
  const auto ids = std::make_shared<collision::MCHManagedCollisionModule>(options);
  collision::ManagedCollisionEmbeddingBagCollection module({user}, {{"user", ids}});
  auto [pooled, remapped] = module.forward(features);
}

void served(const serving::Request& request, std::span<float> logits) {
  tessera::serving::Model model("pkg");
  auto lease = model.lease();
  lease.predict(request, logits);
}

void served_from_a_folder(const serving::Request& request, std::span<float> logits) {
  tessera::serving::Model model("pkg/");
  auto lease = model.lease();
  lease.predict(request, logits);
}

void sharded_rows(const embedding::EmbeddingBagCollection& bags,
                  const std::vector<at::Device>& devices,
                  const jagged::KeyedJaggedTensor& features) {
  auto rounded =
      embedding::QuantEmbeddingBagCollection::from_float(bags, embedding::DataType::kINT8);
  auto plan = sharding::make_module_plan(
      bags.embedding_bag_configs(),
      {{"user", sharding::table_wise(1)}, {"item", sharding::row_wise()}},
      {.world_size = 2, .local_size = 2});
  auto sharded = sharding::QuantEmbeddingBagCollectionSharder().shard(*rounded, plan, devices);
  auto pooled = sharded->forward(features);
}

void click_log() {
  using namespace tessera::workloads::dlrm;
  ClickFileWriter writer("clicks.click",
                         {/*num_dense=*/1, {{"user", 100}, {"tags", 10, /*bag_size=*/0}}});
  writer.append({2, {1, 0}, {2.5F, 7.0F}, {1, 1, 2, 0}, {3, 4, 1, 2}});
  writer.finish();
}

void table_batch(const at::Tensor& user, const at::Tensor& item, const at::Tensor& ids,
                 const at::Tensor& offsets, const at::Tensor& grad) {
  using namespace tessera::embedding;
  TableBatch batch({{"user", user}, {"item", item, PoolingType::kMean}},
                   {{"user", 0}, {"item", 1}, {"last_item", 1}},
                   {.gradients = GradientForm::kFused,
                    .optimizer = {.kind = OptimizerKind::kRowWiseAdagrad, .learning_rate = 0.02}});
  auto pooled = batch.pooled({.ids = ids, .offsets = offsets});
  pooled.backward(grad);
}

void cached_tables(const embedding::LookupInput& next) {
  using embedding::CachePolicy;
  using embedding::GradientForm;
  using embedding::PoolingType;
  auto rows = embedding::mapped_rows(40'000'000, 128, at::kBFloat16, at::kCUDA);
  embedding::TableBatch batch(
      {{"user", rows, PoolingType::kSum, /*cached_rows=*/4'000'000}}, {{"user", 0}},
      {.gradients = GradientForm::kFused, .cache_policy = CachePolicy::kLfu});
  batch.prefetch(next);
}

}  // namespace tessera::page_samples

int main() {
  auto world = tessera::comm::init();
  tessera::comm::Mesh mesh(world, {{"data", 2}, {"model", world.size() / 2}});
  auto mine = at::full({world.rank() + 1, 4}, world.rank());
  auto all = tessera::comm::all_gather_v(mine, world);
  auto mean = tessera::comm::all_reduce(at::rand({4096}), mesh.group("data"),
                                        tessera::comm::Reduction::kAvg);
}

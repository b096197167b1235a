// Embedding tables and collections, with the state of the optimizers that step their rows.

#include <gtest/gtest.h>

#include <map>

#include <ATen/ATen.h>

#include "checkpoint/quiet.h"
#include "checkpoint/samples.h"
#include "support/ranks.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/tables.h"
#include "tessera/embedding/embedding_bag_collection.h"
#include "tessera/embedding/embedding_collection.h"

namespace tessera::checkpoint::testing {
namespace {

using embedding::OptimizerKind;
using tessera::testing::run_ranks;
using tessera::testing::text_of;

constexpr std::int64_t kRows = 13;
constexpr std::int64_t kColumns = 8;

struct Box {
  std::int64_t row, column, rows, columns;
};

enum class Cut { kWhole, kRows, kColumns, kUnevenColumns, kGrid };
constexpr Cut kCuts[] = {Cut::kWhole, Cut::kRows, Cut::kColumns, Cut::kUnevenColumns, Cut::kGrid};

// The boxes of a rank. Later ranks may have none, and boxes may have no rows.
std::vector<Box> boxes_of(Cut cut, int rank, int size) {
  std::vector<Box> boxes;
  const auto rows_of = [&](int part, int parts) {
    const std::int64_t block = (kRows + parts - 1) / parts;
    const std::int64_t begin = std::min(kRows, part * block);
    return std::pair(begin, std::min(kRows, begin + block) - begin);
  };
  switch (cut) {
    case Cut::kWhole:
      if (rank == size - 1) boxes.push_back({0, 0, kRows, kColumns});
      break;
    case Cut::kRows: {
      // Twelve blocks of rows: the last have none.
      for (int part = rank; part < 12; part += size) {
        const auto [row, rows] = rows_of(part, 12);
        boxes.push_back({row, 0, rows, kColumns});
      }
      break;
    }
    case Cut::kColumns:
      for (int part = rank; part < 4; part += size) boxes.push_back({0, 2 * part, kRows, 2});
      break;
    case Cut::kUnevenColumns:
      if (rank == 0) boxes.push_back({0, 0, kRows, 3});
      if (rank == size / 2) boxes.push_back({0, 3, kRows, 5});
      break;
    case Cut::kGrid:
      for (const auto& [column, columns] : {std::pair(0, 5), std::pair(5, 3)}) {
        const auto [row, rows] = rows_of(rank, size);
        boxes.push_back({row, column, rows, columns});
      }
      break;
  }
  return boxes;
}

embedding::OptimizerOptions options_of(OptimizerKind kind) {
  embedding::OptimizerOptions options;
  options.kind = kind;
  options.learning_rate = 0.05;
  return options;
}

// The boxes that one rank has of a table, each stepped as a sharded collection steps its own.
class Boxes final : public TableSource {
 public:
  Boxes(Cut cut, OptimizerKind kind, int rank, int size) : boxes_(boxes_of(cut, rank, size)) {
    std::vector<std::pair<std::string, at::Tensor>> weights;
    const at::Tensor table = at::arange(kRows * kColumns, at::kFloat).cos().view({kRows, kColumns});
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
      weights.emplace_back("t" + std::to_string(i), part(table, boxes_[i]).clone());
    }
    weights_ = weights;
    if (!weights.empty()) optimizer_.emplace(std::move(weights), options_of(kind));
    if (optimizer_) optimizer_->track_rows();
  }

  static at::Tensor part(const at::Tensor& table, const Box& box) {
    return table.narrow(0, box.row, box.rows).narrow(1, box.column, box.columns);
  }

  void train(int first_step, int num_steps) {
    for (int step = first_step; step < first_step + num_steps; ++step) {
      // Rows 2 and 5 never have a gradient.
      at::Tensor gradient =
          at::arange(kRows * kColumns, at::kFloat).add(7 * step).sin().view({kRows, kColumns});
      at::Tensor rows = at::ones({kRows}, at::kBool);
      rows[2] = false;
      rows[5] = false;
      for (std::size_t i = 0; i < boxes_.size(); ++i) {
        const at::Tensor index = rows.narrow(0, boxes_[i].row, boxes_[i].rows).nonzero().squeeze(1);
        at::Tensor& weight = weights_[i].second;
        weight.mutable_grad() = at::_sparse_coo_tensor_unsafe(
            index.unsqueeze(0), part(gradient, boxes_[i]).index_select(0, index), weight.sizes());
      }
      if (optimizer_) optimizer_->step();
    }
  }

  std::vector<TableShard> shards() override {
    std::vector<TableShard> shards;
    for (std::size_t i = 0; i < boxes_.size(); ++i) {
      TableShard shard{.name = "t.weight",
                       .table_rows = kRows,
                       .table_columns = kColumns,
                       .row = boxes_[i].row,
                       .column = boxes_[i].column,
                       .weight = weights_[i].second};
      add_state(shard, *optimizer_, weights_[i].first);
      shards.push_back(std::move(shard));
    }
    return shards;
  }
  Values values() override { return optimizer_ ? values_of(*optimizer_, "t.weight") : Values(); }
  void restore(const Values& values) override {
    if (optimizer_) checkpoint::restore(*optimizer_, "t.weight", values);
  }

  embedding::RowOptimizer& optimizer() { return *optimizer_; }

 private:
  std::vector<Box> boxes_;
  std::vector<std::pair<std::string, at::Tensor>> weights_;
  std::optional<embedding::RowOptimizer> optimizer_;
};

// All tensors of a checkpoint, whole.
std::map<std::string, at::Tensor> everything(const std::string& root, std::int64_t step) {
  const Reader reader(root, step);
  std::map<std::string, at::Tensor> all;
  for (const TensorInfo& info : reader.tensors()) all[info.name] = read_tensor(reader, info);
  return all;
}

void save_boxes(const std::string& root, std::int64_t step, const std::shared_ptr<Boxes>& boxes,
                const comm::Group& group) {
  State state;
  add_tables(state, boxes);
  save(root, step, state, group, quiet());
}

constexpr OptimizerKind kKinds[] = {OptimizerKind::kSgd, OptimizerKind::kAdagrad,
                                    OptimizerKind::kRowWiseAdagrad, OptimizerKind::kAdam,
                                    OptimizerKind::kPartialRowWiseAdam};

// Saved after three steps by one cut, loaded by another, trained for two steps more.
TEST(Tables, AnyCutLoadsAsAnyOtherAtAnyWorld) {
  for (const OptimizerKind kind : kKinds) {
    // The rules that step every element by itself do not see how a table is cut.
    const bool is_row_wise =
        kind == OptimizerKind::kRowWiseAdagrad || kind == OptimizerKind::kPartialRowWiseAdam;
    const TemporaryFolder plain;
    run_ranks(1, [&](const comm::Group& group) {
      const auto boxes = std::make_shared<Boxes>(Cut::kWhole, kind, 0, 1);
      boxes->train(0, 3);
      save_boxes(plain.path(), 3, boxes, group);
      boxes->train(3, 2);
      save_boxes(plain.path(), 5, boxes, group);
    });
    const auto whole_at_3 = everything(plain.path(), 3);
    const auto whole_at_5 = everything(plain.path(), 5);
    for (int saved = 1; saved <= 4; ++saved) {
      const Cut from = kCuts[(saved + static_cast<int>(kind)) % 5];
      const TemporaryFolder root;
      run_ranks(saved, [&](const comm::Group& group) {
        const auto boxes = std::make_shared<Boxes>(from, kind, group.rank(), saved);
        boxes->train(0, 3);
        save_boxes(root.path(), 3, boxes, group);
        boxes->train(3, 2);
        save_boxes(root.path(), 4, boxes, group);  // what the same cut goes on to
      });
      const auto at_3 = everything(root.path(), 3);
      const auto at_4 = everything(root.path(), 4);
      for (int loaded = 1; loaded <= 4; ++loaded) {
        run_ranks(loaded, [&](const comm::Group& group) {
          for (const Cut to : kCuts) {
            const auto boxes = std::make_shared<Boxes>(to, kind, group.rank(), loaded);
            boxes->train(90, 1);  // to be overwritten
            State state;
            add_tables(state, boxes);
            LoadOptions options = quiet_load();
            options.step = 3;
            load(root.path(), state, group, options);
            save_boxes(root.path(), 10 + static_cast<int>(to), boxes, group);
            boxes->train(3, 2);
            save_boxes(root.path(), 20 + static_cast<int>(to), boxes, group);
          }
        });
        for (const Cut to : kCuts) {
          const auto after = everything(root.path(), 10 + static_cast<int>(to));
          const auto later = everything(root.path(), 20 + static_cast<int>(to));
          EXPECT_TRUE(at::equal(after.at("model.t.weight"), at_3.at("model.t.weight")));
          if (!is_row_wise) {
            for (const auto& [name, tensor] : whole_at_3) {
              EXPECT_TRUE(at::equal(after.at(name), tensor)) << name;
              EXPECT_TRUE(at::equal(later.at(name), whole_at_5.at(name))) << name;
            }
          } else if (to == from) {
            for (const auto& [name, tensor] : at_4) {
              EXPECT_TRUE(at::equal(later.at(name), tensor)) << name;
            }
          } else if (to == Cut::kWhole || to == Cut::kRows) {
            // Put together, cuts give the state of the whole row.
            for (const auto& [name, tensor] : whole_at_3) {
              if (name == "model.t.weight") continue;
              EXPECT_TRUE(at::allclose(after.at(name), tensor, 1e-5, 1e-7)) << name;
            }
          }
        }
      }
    }
  }
}

TEST(Tables, RowWiseStateOfColumnsTakesItsShareOfOtherCuts) {
  const TemporaryFolder root;
  run_ranks(2, [&](const comm::Group& group) {
    const auto boxes = std::make_shared<Boxes>(Cut::kUnevenColumns, OptimizerKind::kRowWiseAdagrad,
                                               group.rank(), 2);
    // 2 for the three columns of rank 0, 10 for the five of rank 1.
    boxes->shards()[0].state.at("momentum1").fill_(group.rank() == 0 ? 2 : 10);
    save_boxes(root.path(), 1, boxes, group);
  });
  const auto boxes = std::make_shared<Boxes>(Cut::kColumns, OptimizerKind::kRowWiseAdagrad, 0, 1);
  State state;
  add_tables(state, boxes);
  load(root.path(), state, std::nullopt, quiet_load());
  const float expected[] = {2, 6, 10, 10};  // columns 2 and 3 lie on both sides of the old cut
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(
        at::equal(boxes->shards()[i].state.at("momentum1"), at::full({kRows}, expected[i])));
  }
  const auto whole = std::make_shared<Boxes>(Cut::kWhole, OptimizerKind::kRowWiseAdagrad, 0, 1);
  State other;
  add_tables(other, whole);
  load(root.path(), other, std::nullopt, quiet_load());
  EXPECT_TRUE(at::equal(whole->shards()[0].state.at("momentum1"), at::full({kRows}, 7.F)));
}

TEST(Tables, DeltasHoldTheRowsThatWereStepped) {
  const TemporaryFolder root;
  run_ranks(2, [&](const comm::Group& group) {
    const auto boxes =
        std::make_shared<Boxes>(Cut::kColumns, OptimizerKind::kPartialRowWiseAdam, group.rank(), 2);
    State state;
    add_tables(state, boxes);
    save(root.path(), 1, state, group, quiet());
    boxes->optimizer().forget_rows();
    boxes->train(0, 2);
    SaveOptions options = quiet();
    options.base = 1;
    save(root.path(), 2, state, group, options);
    save(root.path(), 3, state, group, quiet());
  });
  EXPECT_EQ(everything(root.path(), 2).size(), everything(root.path(), 3).size());
  for (const auto& [name, tensor] : everything(root.path(), 3)) {
    EXPECT_TRUE(at::equal(everything(root.path(), 2).at(name), tensor)) << name;
  }
  const Reader reader(root.path(), 2);
  for (const TensorRecord& tensor : reader.manifest().tensors) {
    EXPECT_NE(tensor.name.find('@'), std::string::npos) << tensor.name << " was written whole";
    EXPECT_EQ(tensor.shape[0], kRows - 2) << tensor.name;
  }
}

TEST(Tables, WrongShardsAndMissingStateAreNamed) {
  const TemporaryFolder root;
  const auto with_sgd = std::make_shared<Boxes>(Cut::kWhole, OptimizerKind::kSgd, 0, 1);
  const auto with_adam = std::make_shared<Boxes>(Cut::kWhole, OptimizerKind::kAdam, 0, 1);
  const auto row_wise =
      std::make_shared<Boxes>(Cut::kColumns, OptimizerKind::kRowWiseAdagrad, 0, 1);
  State state;
  add_tables(state, with_sgd);
  save(root.path(), 1, state, std::nullopt, quiet());
  for (const auto& [boxes, name] :
       {std::pair<std::shared_ptr<TableSource>, std::string>(with_adam, "optimizer.t.weight."),
        {row_wise, "optimizer.t.weight.momentum1'"}}) {
    State other;
    add_tables(other, boxes);
    const std::string text =
        error_of([&] { load(root.path(), other, std::nullopt, quiet_load()); });
    EXPECT_NE(text.find("there is no tensor 'optimizer.t.weight.momentum1'"), std::string::npos)
        << text;
  }
  struct Wrong : TableSource {
    std::vector<TableShard> shards() override {
      TableShard shard{
          .name = "w", .table_rows = 4, .table_columns = 2, .weight = at::ones({4, 2})};
      shard.state["momentum1"] = at::ones({3});
      return {shard};
    }
  };
  State wrong;
  add_tables(wrong, std::make_shared<Wrong>());
  try {
    save(root.path(), 2, wrong, std::nullopt, quiet());
    FAIL();
  } catch (...) {
    EXPECT_EQ(text_of(std::current_exception()),
              "checkpoint: 'momentum1' of 'w' has neither the shape of its part [4, 2] nor one "
              "element per row.");
  }
}

// ---- collections ----

struct Model : torch::nn::Module {
  explicit Model(OptimizerKind kind) {
    embedding::TableBatchOptions options;
    options.gradients = embedding::GradientForm::kFused;
    options.optimizer = options_of(kind);
    std::vector<embedding::EmbeddingBagConfig> bag_configs(2);
    bag_configs[0].name = "users";
    bag_configs[0].num_embeddings = 40;
    bag_configs[0].embedding_dim = 4;
    bag_configs[0].feature_names = {"u"};
    bag_configs[1] = bag_configs[0];
    bag_configs[1].name = "items";
    bag_configs[1].embedding_dim = 3;
    bag_configs[1].feature_names = {"i"};
    bags = register_module("bags", std::make_shared<embedding::EmbeddingBagCollection>(
                                       bag_configs, false, at::kCPU, options));
    std::vector<embedding::EmbeddingConfig> configs(1);
    configs[0].name = "words";
    configs[0].num_embeddings = 30;
    configs[0].embedding_dim = 5;
    configs[0].feature_names = {"u"};
    rows = register_module("rows", std::make_shared<embedding::EmbeddingCollection>(
                                       configs, at::kCPU, false, options));
  }

  void train(int first_step, int num_steps) {
    for (int step = first_step; step < first_step + num_steps; ++step) {
      const at::Tensor ids = at::tensor({step % 7, 3, 9, step % 5 + 1, 3, 20}, at::kLong);
      const auto features = jagged::KeyedJaggedTensor::from_lengths_sync(
          {"u", "i"}, ids, at::tensor({2, 1, 1, 2}, at::kLong));
      at::Tensor loss = bags->forward(features).values().square().sum();
      for (const auto& [name, values] : rows->forward(features)) {
        loss = loss + values.values().pow(3).sum();
      }
      loss.backward();
    }
  }

  std::shared_ptr<embedding::EmbeddingBagCollection> bags;
  std::shared_ptr<embedding::EmbeddingCollection> rows;
};

TEST(Collections, FusedTrainingContinuesBitForBit) {
  for (const OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kRowWiseAdagrad, OptimizerKind::kAdam}) {
    const TemporaryFolder root;
    const auto model = std::make_shared<Model>(kind);
    State state;
    add_module(state, model);
    model->train(0, 3);
    model->bags->batch().optimizer()->set_learning_rate(0.2);
    save(root.path(), 3, state, std::nullopt, quiet());
    model->train(3, 3);
    const auto other = std::make_shared<Model>(kind);
    other->train(50, 1);
    State loaded;
    add_module(loaded, other);
    load(root.path(), loaded, std::nullopt, quiet_load());
    EXPECT_EQ(other->bags->batch().optimizer()->options().learning_rate, 0.2);
    EXPECT_EQ(other->rows->batch().optimizer()->num_steps(), 3);
    other->train(3, 3);
    const auto expected = model->named_parameters();
    for (const auto& item : other->named_parameters()) {
      EXPECT_TRUE(at::equal(item.value(), expected[item.key()])) << item.key();
    }
  }
}

TEST(Collections, DeltasHoldTheRowsThatWereLookedUp) {
  const TemporaryFolder root;
  const auto model = std::make_shared<Model>(OptimizerKind::kRowWiseAdagrad);
  const auto batch = model->bags->batch();
  batch.optimizer()->track_rows();
  State state;
  add_tables(state, whole_tables(batch, "bags.embedding_bags."));
  save(root.path(), 1, state, std::nullopt, quiet());
  model->train(1, 1);
  EXPECT_TRUE(
      at::equal(batch.optimizer()->stepped_rows("users"), at::tensor({1, 3, 9}, at::kLong)));
  EXPECT_TRUE(
      at::equal(batch.optimizer()->stepped_rows("items"), at::tensor({2, 3, 20}, at::kLong)));
  EXPECT_THROW((void)batch.optimizer()->stepped_rows("none"), c10::IndexError);
  SaveOptions options = quiet();
  options.base = 1;
  save(root.path(), 2, state, std::nullopt, options);
  const Reader reader(root.path(), 2);
  for (const TensorRecord& tensor : reader.manifest().tensors) {
    EXPECT_EQ(tensor.shape[0], 3) << tensor.name;
  }
  const auto other = std::make_shared<Model>(OptimizerKind::kRowWiseAdagrad);
  State loaded;
  add_tables(loaded, whole_tables(other->bags->batch(), "bags.embedding_bags."));
  load(root.path(), loaded, std::nullopt, quiet_load());
  for (const char* name : {"users", "items"}) {
    EXPECT_TRUE(at::equal(other->bags->weight(name), model->bags->weight(name)));
  }
  const auto expected = batch.optimizer()->state_dict();
  for (const auto& [name, tensor] : other->bags->batch().optimizer()->state_dict()) {
    EXPECT_TRUE(at::equal(tensor, expected.at(name))) << name;
  }
  batch.optimizer()->forget_rows();
  EXPECT_EQ(batch.optimizer()->stepped_rows("users").numel(), 0);
}

}  // namespace
}  // namespace tessera::checkpoint::testing

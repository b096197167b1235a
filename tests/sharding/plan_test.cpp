#include "tessera/sharding/plan.h"

#include <gtest/gtest.h>

#include <random>
#include <sstream>

#include "support/error_text.h"

namespace tessera::sharding {
namespace {

using embedding::EmbeddingTableConfig;
using tessera::testing::error_text;

EmbeddingTableConfig table(std::int64_t rows, std::int64_t columns, std::string name = "t") {
  EmbeddingTableConfig config;
  config.num_embeddings = rows;
  config.embedding_dim = columns;
  config.name = std::move(name);
  return config;
}

std::vector<Shard> shards(const Placement& wish, std::int64_t rows, std::int64_t columns,
                          Topology topology) {
  const ParameterSharding sharding = wish.place(table(rows, columns), topology);
  std::vector<int> ranks;
  for (const Shard& shard : sharding.shards) ranks.push_back(shard.rank);
  EXPECT_EQ(sharding.ranks, ranks);
  return sharding.shards;
}

using Shards = std::vector<Shard>;

TEST(Placement, WholeTables) {
  EXPECT_EQ(shards(table_wise(2), 10, 8, {4, 4}), (Shards{{0, 0, 10, 8, 2}}));
  EXPECT_EQ(shards(data_parallel(), 10, 8, {2, 1}), (Shards{{0, 0, 10, 8, 0}, {0, 0, 10, 8, 1}}));
  EXPECT_EQ(table_wise(0).place(table(1, 1), {1, 1}).kernel, ComputeKernel::kFused);
  EXPECT_EQ(data_parallel().place(table(1, 1), {1, 1}).kernel, ComputeKernel::kDense);
  EXPECT_EQ(row_wise().with_kernel(ComputeKernel::kDense).place(table(1, 1), {1, 1}).kernel,
            ComputeKernel::kDense);
  EXPECT_EQ(row_wise().type(), ShardingType::kRowWise);
}

TEST(Placement, RowsOverRanks) {
  EXPECT_EQ(shards(row_wise(), 10, 2, {4, 4}),
            (Shards{{0, 0, 3, 2, 0}, {3, 0, 3, 2, 1}, {6, 0, 3, 2, 2}, {9, 0, 1, 2, 3}}));
  EXPECT_EQ(shards(row_wise(), 5, 2, {4, 2}),
            (Shards{{0, 0, 2, 2, 0}, {2, 0, 2, 2, 1}, {4, 0, 1, 2, 2}, {5, 0, 0, 2, 3}}));
  EXPECT_EQ(shards(row_wise({0, 4, 1}), 5, 2, {3, 3}),
            (Shards{{0, 0, 0, 2, 0}, {0, 0, 4, 2, 1}, {4, 0, 1, 2, 2}}));
  EXPECT_EQ(shards(table_row_wise(1), 5, 2, {4, 2}), (Shards{{0, 0, 3, 2, 2}, {3, 0, 2, 2, 3}}));
}

TEST(Placement, ColumnsOverRanks) {
  EXPECT_EQ(shards(column_wise({1, 0, 1}), 5, 8, {2, 2}),
            (Shards{{0, 0, 5, 3, 1}, {0, 3, 5, 3, 0}, {0, 6, 5, 2, 1}}));
  EXPECT_EQ(shards(column_wise({0, 1}, {1, 7}), 5, 8, {2, 1}),
            (Shards{{0, 0, 5, 1, 0}, {0, 1, 5, 7, 1}}));
  EXPECT_EQ(shards(table_column_wise({3, 2}), 5, 8, {4, 2}),
            (Shards{{0, 0, 5, 4, 3}, {0, 4, 5, 4, 2}}));
}

TEST(Placement, Grid) {
  EXPECT_EQ(shards(grid_shard({1, 0}), 5, 3, {4, 2}),
            (Shards{{0, 0, 3, 2, 2}, {3, 0, 2, 2, 3}, {0, 2, 3, 1, 0}, {3, 2, 2, 1, 1}}));
}

std::string place_error(const Placement& wish, Topology topology = {4, 2}, std::int64_t rows = 5,
                        std::int64_t columns = 8) {
  return error_text([&] { wish.place(table(rows, columns), topology); });
}

TEST(Placement, RefusesWhatDoesNotFit) {
  EXPECT_EQ(place_error(table_wise(4)),
            "sharding.place: table 't', table_wise: there is no rank 4 among 4.");
  EXPECT_EQ(place_error(column_wise({0, -1})),
            "sharding.place: table 't', column_wise: there is no rank -1 among 4.");
  EXPECT_EQ(place_error(table_row_wise(2)),
            "sharding.place: table 't', table_row_wise: there is no host 2 among 2.");
  EXPECT_EQ(place_error(grid_shard({-1})),
            "sharding.place: table 't', grid_shard: there is no host -1 among 2.");
  EXPECT_EQ(
      place_error(table_column_wise({1, 2})),
      "sharding.place: table 't', table_column_wise: ranks 1 and 2 are on different hosts of 2 "
      "ranks.");
  EXPECT_EQ(place_error(column_wise({})),
            "sharding.place: table 't', column_wise: there are no parts. Name at least one place.");
  EXPECT_EQ(place_error(column_wise({0, 1, 2}), {4, 2}, 5, 2),
            "sharding.place: table 't', column_wise: 2 columns cannot be cut into 3 parts.");
  EXPECT_EQ(place_error(column_wise({0, 1}, {8})),
            "sharding.place: table 't', column_wise: there are 1 widths for 2 parts.");
  EXPECT_EQ(
      place_error(column_wise({0, 1}, {8, 0})),
      "sharding.place: table 't', column_wise: a part is 0 columns wide. It must be at least 1.");
  EXPECT_EQ(
      place_error(grid_shard({0, 1}, {4, 5})),
      "sharding.place: table 't', grid_shard: the parts have 9 columns together, the table has "
      "8.");
  EXPECT_EQ(place_error(row_wise({5})),
            "sharding.place: table 't', row_wise: there are 1 numbers of rows for 4 ranks.");
  EXPECT_EQ(place_error(row_wise({6, -1, 0, 0})),
            "sharding.place: table 't', row_wise: a rank has -1 rows. It cannot be fewer than 0.");
  EXPECT_EQ(
      place_error(row_wise({1, 1, 1, 1})),
      "sharding.place: table 't', row_wise: the ranks have 4 rows together, the table has 5.");
  EXPECT_EQ(place_error(row_wise(), {4, 3}),
            "sharding.place: table 't', row_wise: 4 ranks are not hosts of 3.");
  EXPECT_EQ(place_error(row_wise(), {0, 1}),
            "sharding.place: table 't', row_wise: there are 0 ranks. There must be at least 1.");
  EXPECT_EQ(
      place_error(row_wise(), {1, 1}, 0),
      "sharding.place: table 't', row_wise: the table is 0 x 8. It must have rows and columns.");
}

TEST(ModulePlan, HoldsEveryTable) {
  const ModulePlan plan = make_module_plan({table(10, 4, "a"), table(3, 4, "b")},
                                           {{"a", row_wise()}, {"b", table_wise(1)}}, {2, 2});
  ASSERT_EQ(plan.size(), 2);
  EXPECT_EQ(plan.at("a").shards.size(), 2);
  EXPECT_EQ(plan.at("b").ranks, std::vector<int>{1});
  EXPECT_EQ(error_text([] { make_module_plan({table(1, 1, "a")}, {}, {2, 2}); }),
            "sharding.make_module_plan: nothing is said about table 'a'.");
  EXPECT_EQ(error_text([] {
              make_module_plan({table(1, 1, "a")}, {{"a", row_wise()}, {"b", row_wise()}}, {2, 2});
            }),
            "sharding.make_module_plan: there is no table 'b'.");
}

// What check_module_plan says of a 10 x 4 table on two hosts of two ranks.
std::string plan_error(ShardingType type, Shards shards, Topology topology = {4, 2}) {
  ParameterSharding sharding{type, ComputeKernel::kFused, {}, std::move(shards)};
  for (const Shard& shard : sharding.shards) sharding.ranks.push_back(shard.rank);
  return error_text([&] { check_module_plan("op", {table(10, 4)}, {{"t", sharding}}, topology); });
}

TEST(ModulePlan, CheckNamesWhatIsWrong) {
  EXPECT_EQ(error_text([] { check_module_plan("op", {table(10, 4)}, {}, {1, 1}); }),
            "op: the plan has no table 't'.");
  EXPECT_EQ(error_text([] {
              check_module_plan("op", {}, {{"t", table_wise(0).place(table(10, 4), {1, 1})}},
                                {1, 1});
            }),
            "op: the plan has a table 't' that is not there.");
  EXPECT_EQ(error_text([] { check_module_plan("op", {}, {}, {4, 3}); }),
            "op: 4 ranks are not hosts of 3.");
  EXPECT_EQ(plan_error(ShardingType::kTableWise, {}), "op: table 't': there are no shards.");
  EXPECT_EQ(plan_error(ShardingType::kTableWise, {{0, 0, 10, 4, 4}}),
            "op: table 't': there is no rank 4 among 4.");
  EXPECT_EQ(
      plan_error(ShardingType::kTableWise, {{1, 0, 10, 4, 0}}),
      "op: table 't': the shard of rows [1, 11), columns [0, 4) is not within the table of 10 x "
      "4.");
  EXPECT_EQ(
      plan_error(ShardingType::kColumnWise, {{0, 0, 10, 4, 0}, {0, 3, 10, 0, 0}}),
      "op: table 't': the shard of rows [0, 10), columns [3, 3) is not within the table of 10 x "
      "4.");
  EXPECT_EQ(plan_error(ShardingType::kColumnWise, {{0, 0, 10, 2, 0}, {0, 1, 10, 3, 0}}),
            "op: table 't': the shard of rows [0, 10), columns [1, 4) does not begin where the one "
            "before it ends. Shards cover the table once, in order of columns, then rows.");
  EXPECT_EQ(plan_error(ShardingType::kTableWise, {{0, 0, 9, 4, 0}}),
            "op: table 't': the shards end before the table of 10 x 4 does.");
  EXPECT_EQ(plan_error(ShardingType::kColumnWise, {{0, 0, 10, 3, 0}}),
            "op: table 't': the shards end before the table of 10 x 4 does.");
  ParameterSharding wrong = table_wise(0).place(table(10, 4), {4, 2});
  wrong.ranks = {1};
  EXPECT_EQ(error_text([&] { check_module_plan("op", {table(10, 4)}, {{"t", wrong}}, {4, 2}); }),
            "op: table 't': ranks are [1], those of the shards are [0].");
}

TEST(ModulePlan, ShardsLieAsTheTypeSays) {
  const std::string begin = "op: table 't': the shards do not lie as ";
  const Shards halves = {{0, 0, 5, 4, 0}, {5, 0, 5, 4, 1}};
  const Shards sides = {{0, 0, 10, 2, 0}, {0, 2, 10, 2, 2}};
  EXPECT_EQ(plan_error(ShardingType::kTableWise, halves), begin + "table_wise says: one shard.");
  EXPECT_EQ(plan_error(ShardingType::kColumnWise, halves),
            begin + "column_wise says: all rows in every shard.");
  EXPECT_EQ(
      plan_error(ShardingType::kRowWise, halves),
      begin + "row_wise says: all columns in every shard, and one shard for every rank, in order.");
  EXPECT_EQ(plan_error(ShardingType::kTableColumnWise, sides),
            begin + "table_column_wise says: all rows in every shard, and ranks of one host.");
  EXPECT_EQ(
      plan_error(ShardingType::kTableRowWise, {{0, 0, 5, 4, 1}, {5, 0, 5, 4, 2}}),
      begin +
          "table_row_wise says: all columns in every shard, and one shard for every rank of one "
          "host, in order.");
  EXPECT_EQ(
      plan_error(ShardingType::kGrid, sides),
      begin +
          "grid_shard says: for every part of the columns one shard for every rank of one host, "
          "in order.");
  EXPECT_EQ(plan_error(ShardingType::kDataParallel, {{0, 0, 10, 4, 0}}),
            begin + "data_parallel says: the whole table once for every rank, in order.");
  EXPECT_EQ(plan_error(ShardingType::kTableRowWise, halves), "");
  EXPECT_EQ(plan_error(ShardingType::kColumnWise, sides), "");
}

// Random wishes: every element of the table is in one shard, in every rank's for data parallel.
TEST(ModulePlan, ShardsCoverTheTableOnce) {
  std::mt19937 random(7);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int round = 0; round < 300; ++round) {
    Topology topology{1, draw(1, 3)};
    topology.world_size = topology.local_size * draw(1, 3);
    const EmbeddingTableConfig config = table(draw(1, 12), draw(1, 12));
    const int parts = draw(1, static_cast<int>(config.embedding_dim));
    std::vector<int> ranks;
    std::vector<int> hosts;
    const int home = draw(0, topology.num_hosts() - 1) * topology.local_size;
    std::vector<int> neighbours;
    for (int part = 0; part < parts; ++part) {
      ranks.push_back(draw(0, topology.world_size - 1));
      hosts.push_back(draw(0, topology.num_hosts() - 1));
      neighbours.push_back(home + draw(0, topology.local_size - 1));
    }
    const std::vector<Placement> wishes = {
        data_parallel(),    table_wise(ranks[0]),     row_wise(),
        column_wise(ranks), table_row_wise(hosts[0]), table_column_wise(neighbours),
        grid_shard(hosts)};
    for (const Placement& wish : wishes) {
      const ParameterSharding sharding = wish.place(config, topology);
      check_module_plan("op", {config}, {{"t", sharding}}, topology);
      std::vector<int> covered(
          static_cast<std::size_t>(config.num_embeddings * config.embedding_dim));
      for (const Shard& shard : sharding.shards) {
        for (std::int64_t row = shard.row; row < shard.row + shard.rows; ++row) {
          for (std::int64_t c = shard.column; c < shard.column + shard.columns; ++c) {
            ++covered[static_cast<std::size_t>(row * config.embedding_dim + c)];
          }
        }
      }
      const int times = wish.type() == ShardingType::kDataParallel ? topology.world_size : 1;
      EXPECT_EQ(covered, std::vector<int>(covered.size(), times)) << name_of(wish.type());
    }
  }
}

ShardingPlan example() {
  ShardingPlan plan;
  plan.modules["sparse.ebc"] = make_module_plan(
      {table(10, 4, "a"), table(3, 4, "b"), table(5, 6, "c")},
      {{"a", row_wise()}, {"b", data_parallel()}, {"c", column_wise({1, 0})}}, {2, 2});
  plan.modules["over"] =
      make_module_plan({table(6, 4, "d")}, {{"d", grid_shard({0}, {4})}}, {2, 2});
  return plan;
}

TEST(ShardingPlan, FindsModulesAndPrints) {
  const ShardingPlan plan = example();
  EXPECT_EQ(plan.get_plan_for_module("none"), nullptr);
  EXPECT_EQ(plan.get_plan_for_module("over"), &plan.modules.at("over"));
  EXPECT_EQ(plan.str(),
            "module 'over'\n"
            "  table  type        kernel  rank  rows    columns\n"
            "  d      grid_shard  fused   0     [0, 3)  [0, 4)\n"
            "                             1     [3, 6)  [0, 4)\n"
            "\n"
            "module 'sparse.ebc'\n"
            "  table  type           kernel  rank  rows     columns\n"
            "  a      row_wise       fused   0     [0, 5)   [0, 4)\n"
            "                                1     [5, 10)  [0, 4)\n"
            "  b      data_parallel  dense   all   [0, 3)   [0, 4)\n"
            "  c      column_wise    fused   1     [0, 5)   [0, 3)\n"
            "                                0     [0, 5)   [3, 6)\n");
  EXPECT_EQ(ShardingPlan{}.str(), "no modules\n");
}

TEST(ShardingPlan, PrintsNamesInTheOrderOfTheirNumbers) {
  const std::vector<std::string> names = {"cat",
                                          "cat_",
                                          "cat_01",
                                          "cat_1",
                                          "cat_2",
                                          "cat_2b",
                                          "cat_2b3",
                                          "cat_2b20",
                                          "cat_10",
                                          "cat_010_2",
                                          "cat_10_11",
                                          "cat_99999999999999999999",
                                          "cat_100000000000000000000",
                                          "dog_1"};
  ShardingPlan plan;
  for (const auto& [path, some] : {std::pair{"m.10", 1U}, std::pair{"m.9", 0U}}) {
    std::vector<EmbeddingTableConfig> tables;
    std::map<std::string, Placement> wishes;
    for (std::size_t i = some; i < names.size(); ++i) {
      tables.push_back(table(3, 4, names[i]));
      wishes.emplace(names[i], table_wise(0));
    }
    plan.modules[path] = make_module_plan(tables, wishes, {2, 2});
  }
  std::vector<std::string> printed;
  std::istringstream lines(plan.str());
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string first;
    words >> first;
    if (first == "module") words >> first;
    if (!first.empty() && first != "table") printed.push_back(first);
  }
  std::vector<std::string> wanted = {"'m.9'"};
  wanted.insert(wanted.end(), names.begin(), names.end());
  wanted.emplace_back("'m.10'");
  wanted.insert(wanted.end(), names.begin() + 1, names.end());
  EXPECT_EQ(printed, wanted);
}

TEST(ShardingPlan, PrintsWithinTheWidth) {
  ShardingPlan plan;
  const std::string name = "a_table_with_a_rather_long_näme_of_its_own";
  plan.modules["m"] = make_module_plan({table(6, 4, name)}, {{name, row_wise()}}, {2, 2});
  for (const int width : {1, 2, 10, 40, 60, 74}) {
    std::size_t longest = 0;
    std::string line;
    for (const char letter : plan.str(width)) {
      if (letter != '\n') line.push_back(letter);
      if (letter == '\n') line.clear();
      longest = std::max(longest, line.size());
    }
    EXPECT_LE(longest, static_cast<std::size_t>(width));
  }
  EXPECT_NE(plan.str(60).find("\n  a_table_with_a_..  row_wise"), std::string::npos)
      << plan.str(60);
}

TEST(ShardingPlan, JsonRoundTrip) {
  const ShardingPlan plan = example();
  const std::string text = to_json(plan);
  EXPECT_EQ(plan_from_json(text).modules, plan.modules);
  EXPECT_EQ(to_json(plan_from_json(text)), text);
  EXPECT_EQ(plan_from_json(R"({"version": 1, "modules": {"m": {}}})").modules.at("m"),
            ModulePlan{});
  ShardingPlan bad;
  bad.modules["\xff"] = {};
  EXPECT_EQ(error_text([&] { to_json(bad); }),
            "sharding.to_json: the name of a module or table is not UTF-8.");
}

std::string json_error(const std::string& text) {
  return error_text([&] { plan_from_json(text); });
}

// The error of a plan whose one table is `table`.
std::string table_error(const std::string& table) {
  return json_error(R"({"version": 1, "modules": {"m": {"t": )" + table + "}}}");
}

TEST(ShardingPlan, JsonErrorsNameThePath) {
  const std::string begin = "sharding.plan_from_json: ";
  EXPECT_EQ(json_error("{\"version\" 1}"), begin + "the text is not JSON at byte 12.");
  EXPECT_EQ(json_error(R"({"version": 1, "version": 1})"),
            begin + "an object has the key 'version' twice.");
  EXPECT_EQ(json_error("[]"), begin + "/ is array, not an object.");
  EXPECT_EQ(json_error(R"({"version": 1})"), begin + "/modules is missing.");
  EXPECT_EQ(json_error(R"({"version": 1, "modules": {}, "x": 0})"), begin + "/x is unknown.");
  EXPECT_EQ(json_error(R"({"version": 2, "modules": {}})"),
            begin + "/version is 2; this library reads 1.");
  EXPECT_EQ(json_error(R"({"version": 1, "modules": {"m": 3}})"),
            begin + "/modules/m is number, not an object.");
  EXPECT_EQ(table_error("{}"), begin + "/modules/m/t/type is missing.");
  const std::string head = R"({"type": "row_wise", "kernel": "fused", )";
  EXPECT_EQ(table_error(R"({"type": "rows", "kernel": "fused", "ranks": [], "shards": []})"),
            begin + "/modules/m/t/type is \"rows\", which is unknown.");
  EXPECT_EQ(table_error(R"({"type": "row_wise", "kernel": 1, "ranks": [], "shards": []})"),
            begin + "/modules/m/t/kernel is number, not a string.");
  EXPECT_EQ(table_error(head + R"("ranks": 0, "shards": []})"),
            begin + "/modules/m/t/ranks is number, not an array.");
  EXPECT_EQ(table_error(head + R"("ranks": [0, 1.5], "shards": []})"),
            begin + "/modules/m/t/ranks/1 is 1.5, not a whole number.");
  EXPECT_EQ(table_error(head + R"("ranks": [4294967296], "shards": []})"),
            begin + "/modules/m/t/ranks/0 is 4294967296, not within 0 and 2147483647.");
  EXPECT_EQ(
      table_error(head + R"("ranks": [], "shards": [[0, 0, 1, 1]]})"),
      begin + "/modules/m/t/shards/0 has 4 numbers, not 5: row, column, rows, columns, rank.");
  EXPECT_EQ(table_error(head + R"("ranks": [], "shards": [[0, 0, 1, 1, 0], [0, -1, 1, 1, 0]]})"),
            begin + "/modules/m/t/shards/1/1 is -1, not within 0 and 9223372036854775807.");
}

TEST(Names, GoBothWays) {
  for (const char* name : {"data_parallel", "table_wise", "column_wise", "row_wise",
                           "table_row_wise", "table_column_wise", "grid_shard"}) {
    EXPECT_EQ(name_of(sharding_type_of(name)), name);
  }
  for (const char* name : {"dense", "fused"}) EXPECT_EQ(name_of(compute_kernel_of(name)), name);
  EXPECT_EQ(error_text([] { sharding_type_of("x"); }),
            "sharding.sharding_type_of: 'x' is not one of data_parallel, table_wise, column_wise, "
            "row_wise, table_row_wise, table_column_wise, grid_shard.");
  EXPECT_EQ(error_text([] { compute_kernel_of("quant"); }),
            "sharding.compute_kernel_of: 'quant' is not one of dense, fused.");
}

}  // namespace
}  // namespace tessera::sharding

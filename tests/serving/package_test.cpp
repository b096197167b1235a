// Packages: what rounding does, what is refused, and that one is whole or absent.

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "samples.h"
#include "tessera/checkpoint/error.h"

namespace tessera::serving {
namespace {

using checkpoint::Error;
using embedding::RowType;

template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Package, HoldsTheRowsThatWereTrained) {
  const Folder folder;
  SmallModel small;
  for (const RowType type : {RowType::kFp32, RowType::kFp16, RowType::kBf16, RowType::kFp8,
                             RowType::kInt8, RowType::kInt4, RowType::kInt2}) {
    ExportOptions options;
    options.type = type;
    const ExportReport report = export_model(small, folder, options);
    const Package package(folder / "pkg", /*verifies=*/true);
    EXPECT_EQ(package.model().step, 40);
    ASSERT_EQ(package.model().features.size(), 3U);
    double worst = 0;
    for (std::size_t t = 0; t < 3; ++t) {
      const embedding::RowTable table = package.table(t);
      ASSERT_EQ(table.num_rows, small.rows[t]);
      EXPECT_EQ(table.row_bytes, embedding::row_bytes(type, SmallModel::kDim, 4));
      const Tensor& wanted = small.table(static_cast<int>(t));
      for (std::int64_t r = 0; r < table.num_rows; ++r) {
        std::vector<std::uint8_t> row(static_cast<std::size_t>(table.row_bytes));
        const auto* values = wanted.data() + r * SmallModel::kDim;
        embedding::quantise_row(type, {values, SmallModel::kDim}, row.data());
        ASSERT_TRUE(std::equal(row.begin(), row.end(), table.data + r * table.row_bytes));
        std::vector<float> back(SmallModel::kDim);
        embedding::dequantise_row(type, row.data(), back);
        double lost = 0;
        double whole = 0;
        for (std::size_t c = 0; c < back.size(); ++c) {
          lost += std::pow(values[c] - back[c], 2);
          whole += std::pow(values[c], 2);
        }
        worst = std::max(worst, std::sqrt(lost / whole));
      }
    }
    double reported = 0;
    for (const TableReport& table : report.tables) {
      reported = std::max(reported, table.worst_error);
      EXPECT_LE(table.mean_error, table.worst_error);
    }
    EXPECT_NEAR(reported, worst, 1e-6 + 1e-5 * worst) << embedding::name_of(type);
  }
}

TEST(Package, TablesMayHaveTypesOfTheirOwn) {
  const Folder folder;
  ExportOptions options;
  options.type = RowType::kInt8;
  options.tables["t_1"] = RowType::kFp16;
  options.alignment = 16;
  export_model(SmallModel(), folder, options);
  const Package package(folder / "pkg");
  EXPECT_EQ(package.table(0).type, RowType::kInt8);
  EXPECT_EQ(package.table(1).type, RowType::kFp16);
  EXPECT_EQ(package.table(0).row_bytes, 16);
  options.tables = {{"t_9", RowType::kFp16}};
  EXPECT_NE(error_of([&] { export_model(SmallModel(), folder, options); }).find("no table 't_9'"),
            std::string::npos);
}

TEST(Package, RowsThatCannotBeKeptAreNamed) {
  const Folder folder;
  SmallModel small;
  small.table(2)[77 * SmallModel::kDim + 3] = -1e6F;
  const std::string error = error_of([&] { export_model(small, folder); });
  EXPECT_NE(error.find("row 77 of table 't_2' holds numbers that int8 cannot"), std::string::npos)
      << error;
  EXPECT_FALSE(std::filesystem::exists(folder / "pkg"));
  for (const auto& entry : std::filesystem::directory_iterator(folder / ".")) {
    EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos) << entry.path();
  }

  ExportOptions options;
  options.on_overflow = OnOverflow::kClamp;
  EXPECT_EQ(export_model(small, folder, options).tables[2].num_clamped, 1);
  const Package package(folder / "pkg");
  std::vector<float> row(SmallModel::kDim);
  embedding::dequantise_row(RowType::kInt8, package.table(2).data + 77 * package.table(2).row_bytes,
                            row);
  EXPECT_EQ(row[3], -65504);

  // Or the whole table, and no other, becomes one that holds them.
  options.on_overflow = OnOverflow::kBf16;
  const ExportReport raised = export_model(small, folder, options, "raised");
  EXPECT_TRUE(raised.tables[2].is_raised);
  EXPECT_FALSE(raised.tables[1].is_raised);
  const Package wide(folder / "raised", /*verifies=*/true);
  EXPECT_EQ(wide.model().tables[1].type, RowType::kInt8);
  ASSERT_EQ(wide.model().tables[2].type, RowType::kBf16);
  embedding::dequantise_row(RowType::kBf16, wide.table(2).data + 77 * wide.table(2).row_bytes, row);
  EXPECT_NEAR(row[3], -1e6F, 4e3F);
  options.on_overflow = OnOverflow::kClamp;

  small.table(2)[5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(error_of([&] { export_model(small, folder, options); }).find("row 0 of table 't_2'"),
            std::string::npos);
}

TEST(Package, RowsThatBecomeConstantAreCounted) {
  const Folder folder;
  SmallModel small;
  for (std::size_t c = 0; c < SmallModel::kDim; ++c) {
    small.table(0)[c] = 1 + 1e-7F * static_cast<float>(c);
  }
  const ExportReport report = export_model(small, folder);
  EXPECT_EQ(report.tables[0].num_constant, 1);
  EXPECT_EQ(report.tables[1].num_constant, 0);
}

TEST(Package, TheOrderOfFeaturesComesFromTheCheckpoint) {
  const Folder folder;
  const SmallModel small;
  const auto order_of = [&](const checkpoint::Values& values, const ExportOptions& options) {
    std::filesystem::remove_all(folder / "root");
    small.save(folder / "root", 1, values);
    std::string order;
    const auto report =
        write_package(checkpoint::Reader(folder / "root", 1), folder / "pkg", options);
    for (const auto& feature : report.model.features) order += feature.name + " ";
    return order;
  };
  EXPECT_EQ(order_of({}, {}), "t_0 t_1 t_2 ");
  const checkpoint::Values values = {{"features", std::string(R"(["t_2", "t_0", "t_1"])")}};
  EXPECT_EQ(order_of(values, {}), "t_2 t_0 t_1 ");
  ExportOptions options;
  options.features = {"t_1", "t_0", "t_2"};
  EXPECT_EQ(order_of(values, options), "t_1 t_0 t_2 ");
  options.features = {"t_1", "t_0"};
  EXPECT_NE(error_of([&] { order_of(values, options); }).find("2 features"), std::string::npos);
}

TEST(Package, BagsArePooledAsTheyWereTrained) {
  const Folder folder;
  const SmallModel small;
  small.save(folder / "root", 40, {{"mean_features", std::string(R"(["t_1"])")}});
  write_package(checkpoint::Reader(folder / "root", 40), folder / "pkg", {});
  const Package package(folder / "pkg");
  EXPECT_FALSE(package.model().features[0].is_mean);
  EXPECT_TRUE(package.model().features[1].is_mean);
}

// Tables in `down` parts of their rows times `across` of their columns, each part of another rank:
// by row, by column, or in a grid.
void save_in_parts(SmallModel& small, const std::string& root, std::int64_t down,
                   std::int64_t across) {
  std::vector<std::vector<checkpoint::Part>> parts(static_cast<std::size_t>(down * across));
  std::vector<Tensor> pieces;
  pieces.reserve(64 * parts.size());
  for (const auto& [name, tensor] : small.tensors) {
    const auto& [shape, data] = tensor;
    const bool is_table = name.starts_with("tables.");
    for (std::int64_t i = 0; i < (is_table ? down : 1); ++i) {
      for (std::int64_t j = 0; j < (is_table ? across : 1); ++j) {
        checkpoint::Part part;
        part.name = name;
        part.shape = shape;
        part.region = {std::vector<std::int64_t>(shape.size(), 0), shape};
        part.data = reinterpret_cast<const std::byte*>(data.data());
        if (is_table) {
          const auto cut = [](std::int64_t size, std::int64_t k, std::int64_t count) {
            return size * k / count;
          };
          const std::int64_t row = cut(shape[0], i, down);
          const std::int64_t column = cut(shape[1], j, across);
          part.region = {{row, column},
                         {cut(shape[0], i + 1, down) - row, cut(shape[1], j + 1, across) - column}};
          Tensor& piece = pieces.emplace_back();
          for (std::int64_t r = row; r < row + part.region.lengths[0]; ++r) {
            const auto begin = data.begin() + r * shape[1] + column;
            piece.insert(piece.end(), begin, begin + part.region.lengths[1]);
          }
          part.data = reinterpret_cast<const std::byte*>(piece.data());
        }
        parts[static_cast<std::size_t>(is_table ? i * across + j : 0)].push_back(part);
      }
    }
  }
  checkpoint::save_parts(root, 40, parts, {});
}

TEST(Package, ShardsOfAnyCutMakeTheSameRows) {
  const Folder folder;
  SmallModel small;
  export_model(small, folder, {}, "whole");
  const Package whole(folder / "whole");
  for (const auto& [down, across] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {4, 1}, {1, 3}, {2, 2}, {3, 4}}) {
    const std::string name = std::to_string(down) + "x" + std::to_string(across);
    save_in_parts(small, folder / ("root-" + name), down, across);
    write_package(checkpoint::Reader(folder / ("root-" + name), 40), folder / name);
    const Package package(folder / name, /*verifies=*/true);
    for (std::size_t t = 0; t < 3; ++t) {
      const embedding::RowTable rows = package.table(t);
      const embedding::RowTable wanted = whole.table(t);
      ASSERT_EQ(rows.num_rows, wanted.num_rows);
      ASSERT_EQ(rows.row_bytes, wanted.row_bytes);
      EXPECT_TRUE(std::equal(rows.data, rows.data + rows.num_rows * rows.row_bytes, wanted.data))
          << name;
    }
  }
}

TEST(Package, OnlyAPackageIsReplaced) {
  const Folder folder;
  SmallModel small;
  std::filesystem::create_directories(folder / "pkg");
  std::ofstream(folder / "pkg/thesis.txt") << "years";
  const std::string error = error_of([&] { export_model(small, folder); });
  EXPECT_NE(error.find("is not a package"), std::string::npos) << error;
  EXPECT_TRUE(std::filesystem::exists(folder / "pkg/thesis.txt"));

  export_model(small, folder, {}, "good");
  const std::string before = Package(folder / "good").sha256();
  small.table(0)[0] += 1;
  export_model(small, folder, {}, "good");
  EXPECT_NE(Package(folder / "good").sha256(), before);
}

TEST(Package, OneThatIsRefusedChangesNothing) {
  const Folder folder;
  SmallModel small;
  export_model(small, folder);
  const std::string before = Package(folder / "pkg").sha256();
  small.table(0)[0] += 1;
  small.save(folder / "root", 41);
  const checkpoint::Reader reader(folder / "root", 41);
  std::string seen;
  const auto refuse = [&](const std::string& path, const ExportReport& report) {
    seen = path;
    EXPECT_EQ(Package(path, /*verifies=*/true).model().step, report.model.step);
    EXPECT_EQ(Package(folder / "pkg").sha256(), before);
    throw std::logic_error("no");
  };
  EXPECT_THROW(write_package(reader, folder / "pkg", {}, refuse), std::logic_error);
  EXPECT_FALSE(std::filesystem::exists(seen));
  EXPECT_EQ(Package(folder / "pkg").sha256(), before);
  // What has come to lie there while it was judged is no package, and stays.
  const auto pass = [&](const std::string&, const ExportReport&) {
    std::filesystem::create_directories(folder / "other");
    std::ofstream(folder / "other/thesis.txt") << "years";
  };
  EXPECT_NE(
      error_of([&] { write_package(reader, folder / "other", {}, pass); }).find("is not a package"),
      std::string::npos);
  EXPECT_TRUE(std::filesystem::exists(folder / "other/thesis.txt"));
}

TEST(Package, ACheckpointOfSomethingElseIsRefused) {
  const Folder folder;
  SmallModel small;
  small.tensors.erase("model.top.layer_0.bias");
  EXPECT_NE(
      error_of([&] { export_model(small, folder); }).find("no tensor 'model.top.layer_0.bias'"),
      std::string::npos);
  SmallModel other;
  other.add("model.top.layer_0.weight", {10, 99});
  EXPECT_NE(error_of([&] { export_model(other, folder); }).find("do not fit together"),
            std::string::npos);
}

// Every byte of the small files, and many of the large ones, may be damaged.
TEST(Package, DamageIsFound) {
  const Folder folder;
  export_model(SmallModel(), folder);
  std::size_t num_tried = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "pkg")) {
    const std::string path = entry.path();
    std::string bytes;
    {
      std::ifstream in(path, std::ios::binary);
      bytes.assign(std::istreambuf_iterator<char>(in), {});
    }
    const auto write = [&](const std::string& content) {
      std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
    };
    for (std::size_t i = 0; i < bytes.size(); i += 1 + bytes.size() / 60) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ 0x20);
      write(damaged);
      EXPECT_THROW(Package(folder / "pkg", /*verifies=*/true), Error) << path << " byte " << i;
      ++num_tried;
    }
    for (const std::size_t length : {std::size_t{0}, bytes.size() / 2, bytes.size() - 1}) {
      write(bytes.substr(0, length));
      EXPECT_THROW(Package(folder / "pkg"), Error) << path << " cut at " << length;
    }
    std::filesystem::remove(path);
    EXPECT_THROW(Package(folder / "pkg"), Error) << path << " removed";
    write(bytes);
  }
  EXPECT_GT(num_tried, 200U);
  Package package(folder / "pkg", true);
}

TEST(Package, ACheckpointIsNotAPackage) {
  const Folder folder;
  SmallModel().save(folder / "root", 3);
  EXPECT_NE(error_of([&] { Package(folder / "root/step-000000000003"); }).find("is not a package"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::serving

// Logs whose ids are any 64 bits: whole, and while they come.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "data/raw_log.h"
#include "data/raw_stream.h"

namespace tessera::workloads::data {
namespace {

using dlrm::SampleBlock;
using std::chrono::milliseconds;

constexpr const char* kHead = "label,price,user,words\n";

class RawLogs : public ::testing::Test {
 protected:
  RawLogs() {
    std::string path = (std::filesystem::temp_directory_path() / "raw-XXXXXX").string();
    folder_ = mkdtemp(path.data());
    schema_.label.column = "label";
    schema_.dense = {{.column = "price"}};
    schema_.features = {{.column = "user", .kind = IdKind::kInteger, .rows = 1},
                        {.column = "words", .kind = IdKind::kHash, .rows = 1, .separator = " "}};
  }
  ~RawLogs() override { std::filesystem::remove_all(folder_); }

  std::string file(const std::string& text) const {
    const std::string path = folder_ + "/log.csv";
    std::ofstream(path) << text;
    return path;
  }

  std::string folder_;
  Schema schema_;
};

TEST(RawId, IsXxh3OfTheBytes) {
  const auto hash = [](const char* text) { return static_cast<std::uint64_t>(raw_id(text)); };
  EXPECT_EQ(hash(""), 0x2d06800538d394c2U);
  EXPECT_EQ(hash("a"), 0xe6c632b61e964e1fU);
  EXPECT_EQ(hash("große"), 0x29308c258c19589fU);
}

TEST_F(RawLogs, NumbersStayAndTextsBecomeHashes) {
  const RawLog log({file(std::string(kHead) + "1,0.5,-9223372036854775808,red blue\n"
                                              "0,x,1,red\n"
                                              "0,1,9223372036854775807,\n"
                                              "0,1,18446744073709551614,\n")},
                   schema_);
  ASSERT_EQ(log.num_samples(), 3);
  EXPECT_EQ(log.report().num_bad, 1);
  EXPECT_NE(notes_of("log", log.report()).find("'x' is not a number"), std::string::npos);
  SampleBlock block;
  log.read(0, 2, block);
  using Limits = std::numeric_limits<std::int64_t>;
  EXPECT_EQ(block.ids, (std::vector<std::int64_t>{Limits::min(), Limits::max(), raw_id("red"),
                                                  raw_id("blue")}));
  EXPECT_EQ(block.lengths, (std::vector<std::int32_t>{1, 1, 2, 0}));
  log.read(1, 1, block);
  EXPECT_EQ(block.ids, (std::vector<std::int64_t>{Limits::max()}));
  EXPECT_EQ(block.labels, (std::vector<float>{0}));
  log.read(2, 1, block);
  EXPECT_EQ(block.ids, (std::vector<std::int64_t>{-2}));  // the bits of an unsigned hash
  EXPECT_THROW(log.read(1, 3, block), DataError);
}

TEST_F(RawLogs, WithoutAGoodRecordIsAnError) {
  try {
    const RawLog log({file(std::string(kHead) + "1,x,2,\n")}, schema_);
    FAIL();
  } catch (const DataError& error) {
    EXPECT_NE(std::string(error.what()).find("no good record among 1"), std::string::npos);
  }
}

TEST_F(RawLogs, AStreamComesInBlocksAndEnds) {
  std::string text = kHead;
  for (int i = 0; i < 7; ++i) text += "1,2," + std::to_string(i) + ",a\n";
  RawStream stream(file(text), schema_, {.block_samples = 3});
  SampleBlock block;
  std::vector<std::int64_t> sizes;
  while (stream.next(block, milliseconds(10'000)) == RawStream::Next::kBlock) {
    sizes.push_back(block.num_samples);
  }
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{3, 3, 1}));
  EXPECT_EQ(stream.next(block, milliseconds(0)), RawStream::Next::kEnd);
  EXPECT_EQ(stream.report().num_samples, 7);
}

TEST_F(RawLogs, AFileThatGrowsIsFollowed) {
  const std::string path =
      file(std::string(kHead) + "1,2,3,a\n1,2,4,");  // the last line is not whole
  RawStream stream(path, schema_, {.block_samples = 1, .follows = true});
  SampleBlock block;
  ASSERT_EQ(stream.next(block, milliseconds(10'000)), RawStream::Next::kBlock);
  EXPECT_EQ(block.ids.front(), 3);
  EXPECT_EQ(stream.next(block, milliseconds(50)), RawStream::Next::kNothingYet);
  std::ofstream(path, std::ios::app) << "b\n";
  ASSERT_EQ(stream.next(block, milliseconds(10'000)), RawStream::Next::kBlock);
  EXPECT_EQ(block.ids, (std::vector<std::int64_t>{4, raw_id("b")}));
  // Nobody waits for a stream that is not wanted any more: the destructor returns.
}

TEST_F(RawLogs, WhatCannotBeReadIsToldWhereItIsMet) {
  RawStream stream(folder_ + "/none.csv", schema_, {});
  SampleBlock block;
  EXPECT_THROW(stream.next(block, milliseconds(10'000)), DataError);
}

TEST_F(RawLogs, UnsignedHashesAreGuessedToBeIds) {
  std::string text = kHead;
  for (int i = 0; i < 40; ++i) {
    text += std::to_string(i % 2) + ",0.5" + std::to_string(i % 7) + "," +
            std::to_string((std::uint64_t{1} << 63) - 20 + static_cast<std::uint64_t>(i)) +
            ",a b\n";
  }
  const Schema guessed = schema_or_guess("", file(text));
  ASSERT_FALSE(guessed.features.empty());
  EXPECT_EQ(guessed.features.front().column, "user");
  for (const DenseColumn& dense : guessed.dense) EXPECT_EQ(dense.column, "price");
}

TEST_F(RawLogs, WithoutASchemaOneIsGuessed) {
  std::string text = kHead;
  for (int i = 0; i < 40; ++i)
    text += std::to_string(i % 2) + ",0.5," + std::to_string(i) + ",a b\n";
  const std::string path = file(text);
  const RawLog log({path}, schema_or_guess("", path));
  EXPECT_EQ(log.num_samples(), 40);
}

}  // namespace
}  // namespace tessera::workloads::data

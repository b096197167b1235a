// Binary click logs: what is written comes back, and what is broken is named.

#include <fcntl.h>
#include <gtest/gtest.h>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <limits>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <thread>

#include "dlrm/click_file.h"
#include "dlrm/click_layout.h"
#include "dlrm/half.h"
#include "dlrm/open_log.h"
#include "dlrm/synthetic.h"
#include "files_fixture.h"

namespace {

using namespace tessera::workloads::dlrm;
using ClickFiles = Files;

std::string write_log(const std::string& path, const SyntheticLog& log,
                      const ClickFileOptions& options) {
  ClickFileWriter writer(path, log.schema(), options);
  SampleBlock samples;
  // Parts that do not fit the blocks.
  for (std::int64_t first = 0; first < log.num_samples(); first += 130) {
    log.read(first, std::min<std::int64_t>(130, log.num_samples() - first), samples);
    writer.append(samples);
  }
  writer.finish();
  return path;
}

TEST_F(ClickFiles, BinaryComesBackInAnyParts) {
  const SyntheticLog log(mixed_options());
  for (const std::int64_t block_samples : {64, 999, 1000, 5000}) {
    const ClickFile file(write_log(path("a"), log, {.block_samples = block_samples}));
    EXPECT_EQ(file.num_samples(), 1000);
    EXPECT_EQ(file.schema(), log.schema());
    file.verify();
    SampleBlock expected;
    SampleBlock found;
    for (const auto& [first, count] :
         {std::pair{0, 1000}, {0, 64}, {60, 10}, {63, 300}, {999, 1}, {1000, 0}}) {
      log.read(first, count, expected);
      file.read(first, count, found);
      expect_equal(found, expected);
    }
    EXPECT_EQ(error([&] { file.read(990, 11, found); }),
              "a: samples [990, 1001) were asked for, it holds 1000.");
  }
}

// How many pages of a file are in memory.
std::size_t resident_pages(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY);
  const std::size_t size = std::filesystem::file_size(path);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  ::close(fd);
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((size + page - 1) / page);
  ::mincore(data, size, pages.data());
  ::munmap(data, size);
  return static_cast<std::size_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char one) { return (one & 1) != 0; }));
}

TEST_F(ClickFiles, ExpectedSamplesComeIntoMemory) {
  SyntheticOptions options;
  options.schema = {3, equal_features(8, 1000, 10)};
  options.num_samples = 20000;
  const std::string name = write_log(path("a"), SyntheticLog(options), {.block_samples = 7000});
  const ClickFile file(name);
  const int fd = ::open(name.c_str(), O_RDONLY);
  ::fsync(fd);
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  ::close(fd);
  const std::size_t before = resident_pages(name);
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t wanted = 5000 * (8 * 10 * 4 + 3 * 4 + 1) / page;
  if (before > wanted / 10) GTEST_SKIP() << "this file system keeps its files in memory";
  file.expect(5000, 5000);  // of two blocks
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (resident_pages(name) < wanted && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_GE(resident_pages(name), wanted);
}

TEST_F(ClickFiles, WhatIsExpectedNeedNotBeThere) {
  const ClickFile varying(write_log(path("a"), SyntheticLog(mixed_options()), {}));
  SyntheticOptions options;
  options.schema = {3, equal_features(2, 50, 1)};
  options.num_samples = 100;
  const SyntheticLog log(options);
  const ClickFile even(write_log(path("b"), log, {.half_dense = true, .block_samples = 30}));
  for (const ClickLog* one :
       {static_cast<const ClickLog*>(&varying), static_cast<const ClickLog*>(&even),
        static_cast<const ClickLog*>(&log)}) {
    for (const auto& [first, count] :
         {std::pair{0, 0}, {0, 100}, {90, 100000}, {100000, 5}, {-3, 5}, {5, -1}}) {
      one->expect(first, count);
    }
  }
}

TEST_F(ClickFiles, BinaryIsTheSameForAnySequenceOfAppends) {
  const SyntheticLog log(mixed_options());
  write_log(path("a"), log, {.block_samples = 100});
  ClickFileWriter writer(path("b"), log.schema(), {.block_samples = 100});
  SampleBlock samples;
  log.read(0, 1000, samples);
  writer.append(samples);
  EXPECT_EQ(writer.num_samples(), 1000);
  writer.finish();
  EXPECT_EQ(read(path("a")), read(path("b")));
}

TEST_F(ClickFiles, ALogWithoutSamplesIsNotFinished) {
  const std::string said = "a: there is no sample in it; append some before finish.";
  write("a", "before");
  {
    ClickFileWriter writer(path("a"), mixed_options().schema);
    SampleBlock none;
    SyntheticLog(mixed_options()).read(0, 0, none);
    writer.append(none);
    EXPECT_EQ(error([&] { writer.finish(); }), said);
  }
  EXPECT_EQ(read(path("a")), "before");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
  ClickFileWriter writer(path("a"), mixed_options().schema);
  EXPECT_EQ(error([&] { writer.finish(); }), said);
  SampleBlock samples;
  SyntheticLog(mixed_options()).read(0, 10, samples);
  writer.append(samples);
  writer.finish();
  const ClickFile file(path("a"));
  EXPECT_EQ(file.num_samples(), 10);
  file.verify();
}

TEST_F(ClickFiles, ALogWithoutSamplesIsReadAndNotTrainedOn) {
  ClickFileLayout layout;
  layout.schema = mixed_options().schema;
  layout.block_samples = 100;
  const auto encoded = detail::encode_layout(layout, detail::kHeaderBytes);
  const ClickFile file(write("a", encoded.header + encoded.directory));
  EXPECT_EQ(file.num_samples(), 0);
  EXPECT_EQ(file.schema(), layout.schema);
  file.verify();
  EXPECT_EQ(error([&] { open_log(path("a"), {}); }), "a: there is no sample in it.");
}

TEST_F(ClickFiles, HalfDenseRoundsToNearest) {
  const SyntheticLog log(mixed_options());
  const ClickFile file(write_log(path("a"), log, {.half_dense = true}));
  SampleBlock expected;
  SampleBlock found;
  log.read(0, 1000, expected);
  file.read(0, 1000, found);
  EXPECT_EQ(found.ids, expected.ids);
  for (std::size_t i = 0; i < expected.dense.size(); ++i) {
    EXPECT_NEAR(found.dense[i], expected.dense[i], 0.5F * 0x1p-10F * expected.dense[i]);
  }
}

TEST_F(ClickFiles, HalvesAreExact) {
  for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {  // every finite half
    const auto half = static_cast<std::uint16_t>(bits);
    ASSERT_EQ(half_of(float_of(half)), half);
    ASSERT_EQ(half_of(-float_of(half)), half | 0x8000);
  }
  EXPECT_EQ(float_of(0x3c00), 1.0F);
  EXPECT_EQ(float_of(0x0001), 0x1p-24F);
  EXPECT_EQ(half_of(1.0F + 0x1p-11F), 0x3c00);      // a tie, to even
  EXPECT_EQ(half_of(1.0F + 3 * 0x1p-11F), 0x3c02);  // a tie, to even
  EXPECT_EQ(half_of(1.0F + 0x1p-11F + 0x1p-20F), 0x3c01);
  EXPECT_EQ(half_of(65519.0F), 0x7bff);
}

TEST_F(ClickFiles, WideIdsComeBack) {
  const ClickSchema schema{0, {{"wide", std::int64_t{1} << 40, 2}}};
  ClickFileWriter writer(path("a"), schema);
  const SampleBlock samples{2, {0, 1}, {}, {2, 2}, {0, (std::int64_t{1} << 40) - 1, 5, 1L << 33}};
  writer.append(samples);
  writer.finish();
  SampleBlock found;
  ClickFile(path("a")).read(0, 2, found);
  expect_equal(found, samples);
}

TEST_F(ClickFiles, TablesThatGrowTakeAnyIdAndHaveTheirOwnColumns) {
  const ClickSchema schema{0, {{"any", 0, 0, true, 4}, {"few", 3}}};
  ClickFileWriter writer(path("a"), schema);
  const std::int64_t least = std::numeric_limits<std::int64_t>::min();
  const SampleBlock samples{2, {0, 1}, {}, {2, 0, 1, 1}, {least, -1, 2, 0}};
  writer.append(samples);
  writer.finish();
  const ClickFile file(path("a"));
  EXPECT_EQ(file.layout().version, 3U);
  EXPECT_EQ(file.schema(), schema);
  file.verify();
  SampleBlock found;
  file.read(0, 2, found);
  expect_equal(found, samples);
  // Others are as they were.
  write_log(path("plain"), SyntheticLog(mixed_options()), {});
  EXPECT_EQ(ClickFile(path("plain")).layout().version, 1U);
}

TEST_F(ClickFiles, UnfinishedBinaryLeavesNothing) {
  {
    ClickFileWriter writer(path("a"), mixed_options().schema);
    SampleBlock samples;
    SyntheticLog(mixed_options()).read(0, 10, samples);
    writer.append(samples);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(ClickFiles, WriterRefusesWhatDoesNotFitTheSchema) {
  const ClickSchema schema{1, {{"f", 10, 1}}};
  const auto problem = [&](const SampleBlock& samples, bool half_dense = false) {
    return error([&] {
      ClickFileWriter writer(path("a"), schema, {.half_dense = half_dense});
      writer.append(samples);
    });
  };
  EXPECT_EQ(problem({1, {1}, {0.5F}, {1}, {10}}), "a: feature 'f' has id 10, its table 10 rows.");
  EXPECT_EQ(problem({1, {1}, {0.5F}, {1}, {-1}}), "a: feature 'f' has id -1, its table 10 rows.");
  EXPECT_EQ(problem({1, {1}, {0.5F}, {2}, {1, 1}}),
            "a: feature 'f' has a bag of 2 ids; the schema says 1.");
  EXPECT_EQ(problem({1, {0.5F}, {0.5F}, {1}, {1}}),
            "a: label 0.500000 of a sample is neither 0 nor 1.");
  EXPECT_EQ(problem({1, {1}, {NAN}, {1}, {1}}), "a: dense number nan is not finite.");
  EXPECT_EQ(problem({1, {1}, {70000}, {1}, {1}}, true),
            "a: dense number 70000.000000 cannot be stored in 16 bits.");
  EXPECT_EQ(problem({1, {1}, {}, {1}, {1}}),
            "a: the samples do not have the sizes that the schema says.");
  EXPECT_EQ(problem({1, {1}, {0.5F}, {1}, {}}), "a: there are fewer ids than the lengths say.");
  EXPECT_EQ(error([&] { ClickFileWriter(path("a"), {1, {{"f", 1, 1}, {"f", 1, 1}}}); }),
            "a: feature names must be different and of 1 to 1024 bytes.");
  EXPECT_EQ(error([&] { ClickFileWriter(path("a"), {1, {{"f", -1, 1}}}); }),
            "a: feature 'f' has -1 rows; 1 to 2^48 can be stored, or 0 for a table that grows.");
  EXPECT_EQ(error([&] { ClickFileWriter(path("a"), {1, {{"f", 1, 1, false, 5000}}}); }),
            "a: feature 'f' has 5000 columns; 1 to 4096 can be stored, or 0 for as many as the "
            "others.");
  EXPECT_EQ(error([&] { ClickFileWriter(path("a"), {1, {{"f", 1, -1}}}); }),
            "a: feature 'f' has bags of -1 ids; 0 (varies) to 2^20 can be stored.");
  EXPECT_EQ(error([&] { ClickFileWriter(path("a"), {-1, {}}); }),
            "a: -1 dense numbers per sample; 0 to 1048576 can be stored.");
  EXPECT_EQ(error([&] { ClickFileWriter(path("a"), schema, {.block_samples = 0}); }),
            "a: blocks of 0 samples; 1 to 2^24 can be written.");
  EXPECT_EQ(error([&] { ClickFileWriter(path("no/a"), schema); }),
            "no/a: cannot be made: No such file or directory.");
}

TEST_F(ClickFiles, ReaderNamesWhatIsWrong) {
  write_log(path("good"), SyntheticLog(mixed_options()), {.block_samples = 300});
  const std::string good = read(path("good"));
  const auto problem = [&](const std::string& bytes) {
    write("a", bytes);
    return error([&] { ClickFile file(path("a")); });
  };
  EXPECT_EQ(problem(""), "a: is not a binary click log. Make one with tessera data convert.");
  EXPECT_EQ(problem("0\t1\t2"),
            "a: is not a binary click log. Make one with tessera data convert.");
  EXPECT_EQ(problem(good.substr(0, 20)), "a: is cut short: the header has 64 bytes.");
  EXPECT_EQ(problem(good.substr(0, good.size() - 1)),
            "a: has " + std::to_string(good.size() - 1) + " bytes; the header says " +
                std::to_string(good.size()) + ". It is cut short or something was added.");
  std::string changed = good;
  changed[8] = 9;
  EXPECT_EQ(problem(changed),
            "a: has version 9 of the format; this program reads versions 1 to 3.");
  changed = good;
  changed[16] ^= 1;
  EXPECT_EQ(problem(changed), "a: the header is damaged: its sum is wrong.");
  changed = good;
  changed.back() ^= 1;
  EXPECT_EQ(problem(changed), "a: the directory is damaged: its sum is wrong.");
  EXPECT_EQ(error([&] { ClickFile file(path("none")); }),
            "none: cannot be opened: No such file or directory.");
  EXPECT_EQ(error([&] { ClickFile file(folder_.string() + "/."); }), ".: is not a regular file.");
}

TEST_F(ClickFiles, EveryDamagedByteIsFound) {
  SyntheticOptions options = mixed_options();
  options.num_samples = 40;
  write_log(path("good"), SyntheticLog(options), {.block_samples = 16});
  const std::string good = read(path("good"));
  const ClickFileLayout layout = decode_click_file(good, "good");
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string changed = good;
    changed[i] ^= 0x41;
    bool is_padding = i >= 64;
    for (const ClickFileBlock& block : layout.blocks) {
      is_padding = is_padding && !(i >= block.begin && i < block.begin + block.num_bytes);
    }
    is_padding = is_padding && i < layout.blocks.back().begin + layout.blocks.back().num_bytes + 64;
    write("a", changed);
    const std::string problem = error([&] { ClickFile(path("a")).verify(); });
    EXPECT_TRUE(is_padding || !problem.empty()) << "byte " << i;
  }
}

TEST_F(ClickFiles, DamagedBlocksAreReadWithoutHarm) {
  SyntheticOptions options = mixed_options();
  options.num_samples = 40;
  write_log(path("good"), SyntheticLog(options), {});
  const std::string good = read(path("good"));
  SampleBlock samples;
  int refused = 0;
  for (std::size_t i = 64; i < good.size() - 150; ++i) {
    std::string changed = good;
    changed[i] = '\xff';
    write("a", changed);
    refused += error([&] { ClickFile(path("a")).read(0, 40, samples); }).empty() ? 0 : 1;
    for (const std::int64_t id : samples.ids) ASSERT_LT(id, std::int64_t{1} << 32);
  }
  EXPECT_GT(refused, 100);
}

}  // namespace

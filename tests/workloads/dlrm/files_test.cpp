// Click logs in files: what is written comes back, and what is broken is named.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "dlrm/click_file.h"
#include "dlrm/criteo.h"
#include "dlrm/half.h"
#include "dlrm/synthetic.h"
#include "dlrm/text_blocks.h"

namespace {

using namespace tessera::workloads::dlrm;

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() /
              ("dlrm-files-" + std::to_string(::getpid()) + "-" + test->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  static std::string read(const std::string& name) {
    std::ifstream file(name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The error's text without the folder.
  std::string error(const std::function<void()>& work) const {
    try {
      work();
    } catch (const DataError& failure) {
      std::string text = failure.what();
      const auto at = text.find(folder_.string() + "/");
      if (at != std::string::npos) text.erase(at, folder_.string().size() + 1);
      return text;
    }
    return "";
  }
  std::filesystem::path folder_;
};

void expect_equal(const SampleBlock& a, const SampleBlock& b) {
  EXPECT_EQ(a.num_samples, b.num_samples);
  EXPECT_EQ(a.labels, b.labels);
  EXPECT_EQ(a.dense, b.dense);
  EXPECT_EQ(a.lengths, b.lengths);
  EXPECT_EQ(a.ids, b.ids);
}

SyntheticOptions mixed_options() {
  SyntheticOptions options;
  options.schema = {3, {{"one", 50, 1}, {"any", 200, 0}, {"three", 1000, 3}}};
  options.num_samples = 1000;
  return options;
}

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

TEST_F(Files, BinaryComesBackInAnyParts) {
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

TEST_F(Files, ExpectedSamplesComeIntoMemory) {
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

TEST_F(Files, WhatIsExpectedNeedNotBeThere) {
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

TEST_F(Files, BinaryIsTheSameForAnySequenceOfAppends) {
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

TEST_F(Files, EmptyBinaryIsFine) {
  ClickFileWriter(path("a"), mixed_options().schema).finish();
  const ClickFile file(path("a"));
  EXPECT_EQ(file.num_samples(), 0);
  file.verify();
}

TEST_F(Files, HalfDenseRoundsToNearest) {
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

TEST_F(Files, HalvesAreExact) {
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

TEST_F(Files, WideIdsComeBack) {
  const ClickSchema schema{0, {{"wide", std::int64_t{1} << 40, 2}}};
  ClickFileWriter writer(path("a"), schema);
  const SampleBlock samples{2, {0, 1}, {}, {2, 2}, {0, (std::int64_t{1} << 40) - 1, 5, 1L << 33}};
  writer.append(samples);
  writer.finish();
  SampleBlock found;
  ClickFile(path("a")).read(0, 2, found);
  expect_equal(found, samples);
}

TEST_F(Files, UnfinishedBinaryLeavesNothing) {
  {
    ClickFileWriter writer(path("a"), mixed_options().schema);
    SampleBlock samples;
    SyntheticLog(mixed_options()).read(0, 10, samples);
    writer.append(samples);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(Files, WriterRefusesWhatDoesNotFitTheSchema) {
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
  EXPECT_EQ(error([&] { ClickFileWriter(path("a"), {1, {{"f", 0, 1}}}); }),
            "a: feature 'f' has 0 rows; 1 to 2^48 can be stored.");
  EXPECT_EQ(error([&] { ClickFileWriter(path("a"), {1, {{"f", 1, -1}}}); }),
            "a: feature 'f' has bags of -1 ids; 0 (varies) to 2^20 can be stored.");
  EXPECT_EQ(error([&] { ClickFileWriter(path("a"), {-1, {}}); }),
            "a: -1 dense numbers per sample; 0 to 1048576 can be stored.");
  EXPECT_EQ(error([&] { ClickFileWriter(path("a"), schema, {.block_samples = 0}); }),
            "a: blocks of 0 samples; 1 to 2^24 can be written.");
  EXPECT_EQ(error([&] { ClickFileWriter(path("no/a"), schema); }),
            "no/a: cannot be made: No such file or directory.");
}

TEST_F(Files, ReaderNamesWhatIsWrong) {
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
  EXPECT_EQ(problem(changed), "a: has version 9 of the format; this program reads 1.");
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

TEST_F(Files, EveryDamagedByteIsFound) {
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

TEST_F(Files, DamagedBlocksAreReadWithoutHarm) {
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

// Criteo's text.

std::string good_line(const std::string& label = "1") {
  std::string line = label;
  for (int d = 0; d < 13; ++d) line += "\t" + std::to_string(d);
  for (int f = 0; f < 26; ++f)
    line += "\t0000000" + std::string(1, static_cast<char>('0' + f % 10));
  return line;
}

TEST_F(Files, CriteoLineIsParsed) {
  std::string line = "1\t-1\t0\t7\t\t5000000";
  for (int d = 5; d < 13; ++d) line += "\t3";
  line += "\tffffffff\t\tA\t68fd1e64";
  for (int f = 4; f < 26; ++f) line += "\t00000009";
  const CriteoLog log(write("a", line + "\r\n"));
  SampleBlock samples;
  ASSERT_EQ(log.num_samples(), 1);
  log.read(0, 1, samples);
  EXPECT_EQ(samples.labels, std::vector<float>{1});
  const std::vector<float> front(samples.dense.begin(), samples.dense.begin() + 6);
  EXPECT_EQ(front,
            (std::vector<float>{0, 0, std::log1p(7.0F), 0, std::log1p(5e6F), std::log1p(3.0F)}));
  const std::vector<std::int64_t> ids(samples.ids.begin(), samples.ids.begin() + 5);
  EXPECT_EQ(ids, (std::vector<std::int64_t>{0xffffffffL % 100000, 0, 10, 0x68fd1e64 % 100000, 9}));
  EXPECT_EQ(samples.lengths, std::vector<std::int32_t>(26, 1));
}

TEST_F(Files, BadLinesAreCountedAndNamed) {
  std::string text = good_line() + "\n";
  text += "nothing\n";
  text += good_line("2") + "\n";
  text += good_line("0") + "\n";
  text += good_line() + "\textra\n";
  text += "\n";
  std::string bad_number = good_line();
  bad_number.replace(bad_number.find("\t5\t"), 3, "\t5.5\t");
  text += bad_number + "\n";
  std::string bad_category = good_line();
  bad_category.replace(bad_category.size() - 8, 8, "xyz\x01");
  text += bad_category + "\n";
  text += good_line();  // no newline at the end
  write("a", text);
  CriteoOptions options;
  options.num_named = 6;
  const CriteoLog log(path("a"), options);
  EXPECT_EQ(log.num_samples(), 3);
  EXPECT_EQ(log.report().num_lines, 9);
  EXPECT_EQ(log.report().num_bad, 6);
  std::vector<std::string> named;
  for (const auto& bad : log.report().first_bad) {
    named.push_back(std::to_string(bad.line) + " " + bad.reason);
  }
  EXPECT_EQ(named, (std::vector<std::string>{
                       "2 has 1 fields; 40 are needed", "3 label is '2', not 0 or 1",
                       "5 has 41 fields; 40 are needed", "6 has 1 fields; 40 are needed",
                       "7 number 6 is '5.5', not an integer",
                       "8 category 26 is 'xyz?', not 0 to 8 hexadecimal digits"}));
  SampleBlock samples;
  log.read(0, 3, samples);
  EXPECT_EQ(samples.labels, (std::vector<float>{1, 0, 1}));
  options.num_named = 2;
  EXPECT_EQ(CriteoLog(path("a"), options).report().first_bad.size(), 2U);
  options.strict = true;
  EXPECT_EQ(error([&] { CriteoLog strict(path("a"), options); }),
            "a: line 2 has 1 fields; 40 are needed.");
}

TEST_F(Files, CriteoRefusesOtherFeatures) {
  write("a", good_line());
  CriteoOptions options;
  options.features.pop_back();
  EXPECT_EQ(error([&] { CriteoLog log(path("a"), options); }),
            "a: 25 features were asked for; Criteo's files have 26.");
  options = {};
  options.features[3].bag_size = 2;
  EXPECT_EQ(error([&] { CriteoLog log(path("a"), options); }),
            "a: feature 'cat_3' has 100000 rows and bags of 2; rows and bags of 1 are needed.");
}

// Several chunks, so that threads overtake each other; bad lines in all of them.
TEST_F(Files, CriteoIsTheSameForAnyNumberOfThreads) {
  const SyntheticLog log(SyntheticOptions{});
  std::string text;
  constexpr std::int64_t kParts = 50;
  for (std::int64_t part = 0; part < kParts; ++part) {
    append_criteo_lines(log, part * 1000, 1000, text);
    text += "bad\n";
  }
  ASSERT_GT(text.size(), 3U * (4 << 20));
  write("a", text);
  SampleBlock expected;
  log.read(0, kParts * 1000, expected);
  for (const int threads : {1, 2, 5}) {
    CriteoOptions options;
    options.num_threads = threads;
    const CriteoLog read_back(path("a"), options);
    EXPECT_EQ(read_back.report().num_bad, kParts);
    ASSERT_EQ(read_back.report().first_bad.size(), 5U);
    EXPECT_EQ(read_back.report().first_bad[4].line, 5005);
    SampleBlock found;
    read_back.read(0, kParts * 1000, found);
    expect_equal(found, expected);
    SampleBlock part;  // over the end of a chunk
    read_back.read(12000, 20000, part);
    log.read(12000, 20000, found);
    expect_equal(part, found);
  }
}

// Blocks of whole lines, whatever the place of their ends.
TEST_F(Files, TextComesInBlocksOfWholeLines) {
  const auto blocks_of = [&](const std::string& text, std::size_t block_bytes) {
    TextBlocks blocks(write("a", text), block_bytes);
    std::vector<char> memory;
    std::vector<std::string> found;
    while (const auto block = blocks.next(memory)) found.emplace_back(*block);
    EXPECT_EQ(blocks.num_bytes(), static_cast<std::int64_t>(text.size()));
    return found;
  };
  using Blocks = std::vector<std::string>;
  EXPECT_EQ(blocks_of("", 4), Blocks{});
  EXPECT_EQ(blocks_of("ab", 4), Blocks{"ab"});
  EXPECT_EQ(blocks_of("ab\ncd\nef\ngh", 4), (Blocks{"ab\ncd\n", "ef\ngh"}));
  EXPECT_EQ(blocks_of("abcdefgh\n\nx\n", 4), (Blocks{"abcdefgh\n", "\nx\n"}));
  const std::string wide(100000, 'w');  // more than a block and its margin
  EXPECT_EQ(blocks_of("a\n" + wide + "\nb\n", 1), (Blocks{"a\n", wide + "\n", "b\n"}));
  write("a", std::string((16U << 20) + 5000, 'x'));
  EXPECT_EQ(error([&] {
              TextBlocks blocks(path("a"), 4);
              std::vector<char> memory;
              blocks.next(memory);
            }),
            "a: a line near byte " + std::to_string((16U << 20) + 5000) +
                " has more than 16 MiB. This is no text of clicks.");
  EXPECT_EQ(error([&] { TextBlocks blocks(path("none"), 4); }),
            "none: cannot be opened: No such file or directory.");
  EXPECT_EQ(error([&] { TextBlocks blocks(folder_.string() + "/.", 4); }),
            ".: is neither a regular file nor a pipe.");
}

TEST_F(Files, CriteoComesThroughAPipe) {
  const SyntheticLog log(SyntheticOptions{});
  std::string text;
  append_criteo_lines(log, 0, 3000, text);
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  // Open at both ends before anybody reads: an unopened pipe is an empty text.
  const int writer = ::open(path("pipe").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(writer, 0);
  std::thread sender([&] {
    for (std::size_t sent = 0; sent < text.size();) {
      const ssize_t done = ::write(writer, text.data() + sent, text.size() - sent);
      if (done <= 0) break;
      sent += static_cast<std::size_t>(done);
    }
    ::close(writer);
  });
  const CriteoLog read_back(path("pipe"));
  sender.join();
  SampleBlock expected;
  log.read(0, 3000, expected);
  SampleBlock found;
  read_back.read(0, 3000, found);
  expect_equal(found, expected);
}

// The reader of a pipe that says nothing more does not hold up the error of what it said.
TEST_F(Files, AnErrorDoesNotWaitForASilentPipe) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  const int writer = ::open(path("pipe").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(writer, 0);
  std::atomic<bool> is_done{false};
  TextBlocks text(path("pipe"), 4);
  std::thread reader([&] {
    std::vector<char> memory;
    EXPECT_FALSE(text.next(memory));
    is_done = true;
  });
  EXPECT_FALSE(is_done);
  text.stop();
  reader.join();
  ::close(writer);
}

TEST_F(Files, OnlyCriteosSchemaIsWrittenAsLines) {
  std::string text;
  EXPECT_EQ(error([&] { append_criteo_lines(SyntheticLog(mixed_options()), 0, 1, text); }),
            "synthetic: only 13 numbers and 26 bags of 1 id can be written as lines.");
}

}  // namespace

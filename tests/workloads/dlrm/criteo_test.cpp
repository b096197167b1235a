// Criteo's text: lines, blocks of lines, files and pipes.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <thread>

#include "dlrm/click_file.h"
#include "dlrm/criteo.h"
#include "dlrm/synthetic.h"
#include "dlrm/text_blocks.h"
#include "files_fixture.h"
#include "support/refused_threads.h"

namespace {

using namespace tessera::workloads::dlrm;
using CriteoFiles = Files;

std::string good_line(const std::string& label = "1") {
  std::string line = label;
  for (int d = 0; d < 13; ++d) line += "\t" + std::to_string(d);
  for (int f = 0; f < 26; ++f)
    line += "\t0000000" + std::string(1, static_cast<char>('0' + f % 10));
  return line;
}

TEST_F(CriteoFiles, CriteoLineIsParsed) {
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

TEST_F(CriteoFiles, BadLinesAreCountedAndNamed) {
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

TEST_F(CriteoFiles, CriteoRefusesOtherFeatures) {
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
TEST_F(CriteoFiles, CriteoIsTheSameForAnyNumberOfThreads) {
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

// Fewer threads parse then, or the one that asks.
TEST_F(CriteoFiles, EveryThreadMayBeRefused) {
  const SyntheticLog log(SyntheticOptions{});
  std::string text;
  append_criteo_lines(log, 0, 30'000, text);
  ASSERT_GT(text.size(), 4U << 20);  // more than a block
  write("a", text);
  SampleBlock expected;
  log.read(0, 30'000, expected);
  CriteoOptions options;
  options.num_threads = 3;
  for (std::int64_t n = 1; n <= 4; ++n) {
    std::optional<CriteoLog> read_back;
    {
      const tessera::testing::RefusedThread refused(n);
      read_back.emplace(path("a"), options);
      EXPECT_EQ(refused.was_refused(), n <= 3);
    }
    SampleBlock found;
    read_back->read(0, 30'000, found);
    expect_equal(found, expected);
  }
}

// A mask of one core: one thread parses, as many as the machine has.
TEST_F(CriteoFiles, ThreadsAreAsManyAsTheMaskHasCores) {
  const auto num_threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  std::thread([&] {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    ASSERT_EQ(::sched_getaffinity(0, sizeof(cores), &cores), 0);
    for (int core = 0; CPU_COUNT(&cores) > 1; ++core) CPU_CLR(core, &cores);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(cores), &cores), 0);
    // A text without an end until they are counted: none of them is through before.
    std::atomic<bool> is_counted{false};
    CriteoOptions options;
    options.unpack = [&](const std::string&) -> ReadText {
      return
          [&, line = good_line() + "\n", at = std::size_t{0}](char* to, std::size_t room) mutable {
            if (is_counted && at == 0) return std::size_t{0};
            const std::size_t size = std::min(room, line.size() - at);
            std::memcpy(to, line.data() + at, size);
            at = (at + size) % line.size();
            return size;
          };
    };
    // Threads of earlier tests are listed for a moment after they were joined.
    auto before = num_threads();
    for (int same = 0; same < 20;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const auto now = num_threads();
      same = now == before ? same + 1 : 0;
      before = now;
    }
    read_criteo("endless", options, [&](SampleBlock&) {
      EXPECT_TRUE(is_counted || num_threads() == before + 1) << num_threads() - before;
      is_counted = true;
    });
    EXPECT_TRUE(is_counted);
  }).join();
}

// Blocks of whole lines, whatever the place of their ends.
TEST_F(CriteoFiles, TextComesInBlocksOfWholeLines) {
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

TEST_F(CriteoFiles, CriteoComesThroughAPipe) {
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
TEST_F(CriteoFiles, AnErrorDoesNotWaitForASilentPipe) {
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

TEST_F(CriteoFiles, OnlyCriteosSchemaIsWrittenAsLines) {
  std::string text;
  EXPECT_EQ(error([&] { append_criteo_lines(SyntheticLog(mixed_options()), 0, 1, text); }),
            "synthetic: only 13 numbers and 26 bags of 1 id can be written as lines.");
}

}  // namespace

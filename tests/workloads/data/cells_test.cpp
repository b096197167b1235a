// What reads cells many at a time does what reads them one by one does.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <random>

#include "data/delimited.h"
#include "data/logarithm.h"
#include "data/numbers.h"
#include "data/read_table.h"
#include "data/schema.h"
#include "files_fixture.h"

namespace {

using namespace tessera::workloads;

// A text with what the functions for buffers may read around it.
class Nearby {
 public:
  explicit Nearby(const std::string& text) : memory_(16, '7') {
    memory_ += text + std::string(16, '7');
    text_ = std::string_view(memory_).substr(16, text.size());
  }
  operator std::string_view() const { return text_; }

 private:
  std::string memory_;
  std::string_view text_;
};

TEST(CellNumbers, IdsAreOf64BitsSignedOrNot) {
  const auto id_of = [](std::string_view text) -> std::optional<std::int64_t> {
    std::int64_t id = 7;
    return data::parse_id(text, id) ? std::optional(id) : std::nullopt;
  };
  using Limits = std::numeric_limits<std::int64_t>;
  EXPECT_EQ(id_of("9223372036854775807"), Limits::max());
  EXPECT_EQ(id_of("9223372036854775808"), Limits::min());
  EXPECT_EQ(id_of("-9223372036854775808"), Limits::min());
  EXPECT_EQ(id_of(" 18446744073709551615.0 "), -1);
  EXPECT_EQ(id_of("3.0"), 3);
  for (const char* none : {"18446744073709551616", "-9223372036854775809", "99999999999999999999",
                           "", "1e19", "9223372036854775808.5", "-", "x"}) {
    EXPECT_EQ(id_of(none), std::nullopt) << none;
  }
  // Rows of a table are signed numbers as they were.
  std::int64_t row = 0;
  EXPECT_FALSE(data::parse_whole("9223372036854775808", row));
}

TEST(CellNumbers, AreTheSameFromABuffer) {
  std::mt19937 random(11);
  const std::string letters = "00123456789..-+e x/:";
  for (int i = 0; i < 300000; ++i) {
    std::string text;
    for (std::size_t size = random() % 12; size > 0; --size) {
      text += letters[random() % letters.size()];
    }
    double real = 0;
    double wanted_real = 0;
    const bool is_real = data::parse_real(text, wanted_real);
    ASSERT_EQ(data::parse_real_nearby(Nearby(text), real), is_real) << text;
    if (is_real && !std::isnan(wanted_real)) {
      ASSERT_EQ(real, wanted_real) << text;
    }
    std::int64_t whole = 0;
    std::int64_t wanted_whole = 0;
    const bool is_whole = data::parse_whole(text, wanted_whole);
    ASSERT_EQ(data::parse_whole_nearby(Nearby(text), whole), is_whole) << text;
    if (is_whole) {
      ASSERT_EQ(whole, wanted_whole) << text;
    }
  }
  double real = 0;
  ASSERT_TRUE(data::parse_real_nearby(Nearby("-0"), real));
  EXPECT_TRUE(std::signbit(real));
  EXPECT_FALSE(data::parse_real_nearby(Nearby("."), real));
  EXPECT_FALSE(data::parse_real_nearby(Nearby("-"), real));
  EXPECT_FALSE(data::parse_real_nearby(Nearby(""), real));
  ASSERT_TRUE(data::parse_real_nearby(Nearby("1234567."), real));
  EXPECT_EQ(real, 1234567);
}

TEST(CellHashes, AreTheSameFromABuffer) {
  std::mt19937 random(12);
  for (std::size_t size = 0; size < 40; ++size) {
    for (int i = 0; i < 50; ++i) {
      std::string text;
      for (std::size_t c = 0; c < size; ++c) text += static_cast<char>(random());
      ASSERT_EQ(data::hash_of_nearby(Nearby(text)), data::hash_of(text)) << size;
    }
  }
}

TEST(CellLogarithms, AreTheNearestIn32Bits) {
  const auto wanted = [](double x) { return static_cast<float>(std::log1p(x)); };
  const auto found = [](double x) { return static_cast<float>(data::logarithm(x)); };
  for (int i = 0; i < 1000000; ++i) {
    ASSERT_EQ(found(i), wanted(i));
    ASSERT_EQ(found(i / 1000.0), wanted(i / 1000.0));
  }
  std::mt19937 random(13);
  std::uniform_real_distribution<double> exponents(-200, 1000);
  for (int i = 0; i < 1000000; ++i) {
    const double x = std::exp2(exponents(random));
    ASSERT_EQ(found(x), wanted(x)) << x;
  }
  EXPECT_EQ(found(-0.5), 0);
  EXPECT_EQ(found(0), 0);
}

class CellRuns : public dlrm::Files {
 protected:
  using Records = std::vector<std::vector<std::string>>;

  // In runs as long as there are any, each record by line; `next` gives the others.
  Records in_runs(const std::string& text, std::size_t width, std::size_t most) const {
    data::Input input(write("cells.csv", text));
    data::Delimited reader(input, ',');
    Records records;
    std::vector<std::string_view> views;
    for (;;) {
      const data::CellRun run = reader.next_run(width, most);
      for (std::size_t i = 0; i < run.num_records; ++i) {
        std::vector<std::string> record{std::to_string(run.first_line + std::int64_t(i))};
        for (std::size_t c = 0; c < width; ++c) record.emplace_back(run.cell(i, c));
        records.push_back(std::move(record));
      }
      if (run.num_records > 0) {
        num_in_runs_ += run.num_records;
        continue;
      }
      if (!reader.next(views)) return records;
      records.push_back({std::to_string(reader.line())});
      records.back().insert(records.back().end(), views.begin(), views.end());
    }
  }
  Records one_by_one(const std::string& text) const {
    data::Input input(write("cells.csv", text));
    data::Delimited reader(input, ',');
    Records records;
    std::vector<std::string_view> views;
    while (reader.next(views)) {
      records.push_back({std::to_string(reader.line())});
      records.back().insert(records.back().end(), views.begin(), views.end());
    }
    return records;
  }

  mutable std::size_t num_in_runs_ = 0;
};

TEST_F(CellRuns, HoldTheSameCellsAndLines) {
  std::mt19937 random(14);
  const std::string letters = "ab\"; 123";
  for (const bool has_odd_cells : {false, true}) {
    std::string text = "\xef\xbb\xbf";
    while (text.size() < 700000) {
      const std::size_t width = random() % 50 == 0 ? random() % 6 : 4;
      for (std::size_t c = 0; c < width; ++c) {
        if (c > 0) text += ',';
        std::string cell;
        for (std::size_t size = random() % 12; size > 0; --size) {
          cell += letters[random() % letters.size()];
        }
        if (has_odd_cells && random() % 40 == 0) {
          cell += random() % 2 == 0 ? "\n" : ",\r";
        }
        // A quote at the beginning, separators and ends of lines need quotes around.
        const bool must = cell.starts_with('"') || cell.find_first_of(",\n\r") != std::string::npos;
        if (!must && random() % 6 != 0) {
          text += cell;
          continue;
        }
        text += '"';
        for (const char one : cell) {
          if (one == '"' && has_odd_cells) text += '"';
          if (one != '"' || has_odd_cells) text += one;
        }
        text += '"';
      }
      text += random() % 3 == 0 ? "\r\n" : "\n";
    }
    if (has_odd_cells) text += "the,\"last\",has,no end";
    const Records wanted = one_by_one(text);
    for (const std::size_t most : {1, 3, 256}) {
      num_in_runs_ = 0;
      const Records found = in_runs(text, 4, most);
      ASSERT_EQ(found.size(), wanted.size());
      for (std::size_t i = 0; i < found.size(); ++i) ASSERT_EQ(found[i], wanted[i]) << i;
      EXPECT_GT(num_in_runs_, wanted.size() / 3);
    }
  }
}

}  // namespace

// Tables of text as samples: quoting, ends of lines, missing values, and what is said of bad ones.

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "data/delimited.h"
#include "data/numbers.h"
#include "data/read_table.h"
#include "dlrm/click_file.h"
#include "files_fixture.h"

namespace {

using namespace tessera::workloads;
using data::Schema;
using dlrm::SampleBlock;

constexpr const char* kSchema = R"(
missing = ["", "NA"]
[label]
column = "y"
[[dense]]
column = "price"
log1p = true
clip = [0, 1000]
[[dense]]
column = "age"
missing = -1.5
[[feature]]
column = "user"
kind = "hash"
rows = 1000
[[feature]]
column = "item"
kind = "integer"
rows = 50
[[feature]]
column = "tags"
kind = "hash"
rows = 64
separator = "|"
pooling = "mean"
)";

struct Read {
  SampleBlock samples;  // of all blocks
  data::TableReport report;
};

class Tables : public dlrm::Files {
 protected:
  static Read read(const std::vector<std::string>& paths, const Schema& schema,
                   data::TableOptions options = {}) {
    Read all;
    std::vector<std::vector<std::int32_t>> lengths(schema.features.size());
    std::vector<std::vector<std::int64_t>> ids(schema.features.size());
    all.report = data::read_tables(paths, schema, options, [&](SampleBlock& block) {
      all.samples.num_samples += block.num_samples;
      const auto add = [](auto& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      add(all.samples.labels, block.labels);
      add(all.samples.dense, block.dense);
      const auto n = static_cast<std::size_t>(block.num_samples);
      std::size_t place = 0;
      for (std::size_t f = 0; f < lengths.size(); ++f) {
        for (std::size_t s = 0; s < n; ++s) {
          const std::int32_t length = block.lengths[f * n + s];
          lengths[f].push_back(length);
          for (std::int32_t i = 0; i < length; ++i) ids[f].push_back(block.ids[place++]);
        }
      }
    });
    for (std::size_t f = 0; f < lengths.size(); ++f) {
      all.samples.lengths.insert(all.samples.lengths.end(), lengths[f].begin(), lengths[f].end());
      all.samples.ids.insert(all.samples.ids.end(), ids[f].begin(), ids[f].end());
    }
    return all;
  }
  Read read_text(const std::string& text, const std::string& schema = kSchema,
                 data::TableOptions options = {}) const {
    return read({write("table.csv", text)}, data::parse_schema(schema, "schema.toml"), options);
  }
  std::string problem(const std::string& text, const std::string& schema = kSchema) const {
    return error([&] { read_text(text, schema); });
  }
  std::vector<std::vector<std::string>> cells(const std::string& text, char separator = ',') const {
    data::Input input(write("cells.csv", text));
    data::Delimited reader(input, separator);
    std::vector<std::string_view> views;
    std::vector<std::vector<std::string>> records;
    while (reader.next(views)) records.emplace_back(views.begin(), views.end());
    return records;
  }
};

using Records = std::vector<std::vector<std::string>>;

TEST_F(Tables, CellsAreCutAtSeparatorsOutsideQuotes) {
  EXPECT_EQ(cells("a,b\n1,2\n"), (Records{{"a", "b"}, {"1", "2"}}));
  EXPECT_EQ(cells("a,b\r\n1,2\r\n"), (Records{{"a", "b"}, {"1", "2"}}));
  EXPECT_EQ(cells("a,b\n1,2"), (Records{{"a", "b"}, {"1", "2"}}));
  EXPECT_EQ(cells("a,b\r\n1,"), (Records{{"a", "b"}, {"1", ""}}));
  EXPECT_EQ(cells("\xef\xbb\xbf"
                  "a,b\n,\n"),
            (Records{{"a", "b"}, {"", ""}}));
  EXPECT_EQ(cells("\"a,b\",\"say \"\"x\"\"\"\n\"two\nlines\",\n"),
            (Records{{"a,b", "say \"x\""}, {"two\nlines", ""}}));
  EXPECT_EQ(cells("a b,c\"d\"e,\"\"\n"), (Records{{"a b", "c\"d\"e", ""}}));
  EXPECT_EQ(cells("\"x\"\r\n\"y\""), (Records{{"x"}, {"y"}}));
  EXPECT_EQ(cells("a\tb,c\n", '\t'), (Records{{"a", "b,c"}}));
  EXPECT_EQ(cells("a,b\n\n1,2\n"), (Records{{"a", "b"}, {""}, {"1", "2"}}));
  EXPECT_EQ(cells(""), Records{});
}

TEST_F(Tables, QuotesThatDoNotFitAreNamedByLine) {
  EXPECT_EQ(error([&] { cells("a,b\n1,2\n3,\"open\n4,5\n"); }),
            "cells.csv: line 3 begins a quoted cell that has no end.");
  EXPECT_EQ(error([&] { cells("a,b\n\"1\"x,2\n"); }),
            "cells.csv: line 2 has text after a quoted cell: 'x'.");
}

TEST_F(Tables, WhatIsWrittenByTheRulesComesBackWhateverTheBuffers) {
  // Longer than a few buffers, so that every kind of cell is cut somewhere.
  std::mt19937 random(7);
  const std::string letters = "ab,\"\n\r; 1";
  Records wanted;
  std::string text;
  while (text.size() < 1200000) {
    std::vector<std::string> record;
    const std::size_t width = 1 + random() % 5;
    for (std::size_t c = 0; c < width; ++c) {
      std::string cell;
      const std::size_t length = random() % 40 == 0 ? random() % 3000 : random() % 9;
      for (std::size_t i = 0; i < length; ++i) cell += letters[random() % letters.size()];
      const bool needs_quotes = cell.find_first_of(",\"\n\r") != std::string::npos;
      if (c > 0) text += ',';
      if (needs_quotes || random() % 8 == 0) {
        std::string doubled;
        for (const char one : cell) doubled += one == '"' ? "\"\"" : std::string(1, one);
        text += '"' + doubled + '"';
      } else {
        text += cell;
      }
      record.push_back(std::move(cell));
    }
    text += random() % 2 == 0 ? "\n" : "\r\n";
    wanted.push_back(std::move(record));
  }
  const Records found = cells(text);
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < found.size(); ++i) ASSERT_EQ(found[i], wanted[i]) << "record " << i;
}

TEST_F(Tables, CellsBecomeSamples) {
  const Read all = read_text(
      "user,y,price,unused,item,tags,age\n"
      "ann,1,3,x,7,a|b,40\n"
      "\"bob, jr\",0,,x,0,,\n"
      "NA,1.0,2.5e3,x,49.0, a | |c,-7.25\n");
  EXPECT_EQ(all.samples.num_samples, 3);
  EXPECT_EQ(all.samples.labels, (std::vector<float>{1, 0, 1}));
  const auto log = [](double x) { return static_cast<float>(std::log1p(x)); };
  EXPECT_EQ(all.samples.dense, (std::vector<float>{log(3), 40, 0, -1.5F, log(1000), -7.25F}));
  EXPECT_EQ(all.samples.lengths, (std::vector<std::int32_t>{1, 1, 1, 1, 1, 1, 2, 0, 2}));
  const auto user = [](const char* text) { return data::hashed_row(text, 1000); };
  const auto tag = [](const char* text) { return data::hashed_row(text, 64); };
  EXPECT_EQ(all.samples.ids,
            (std::vector<std::int64_t>{user("ann"), user("bob, jr"), user(""), 7, 0, 49, tag("a"),
                                       tag("b"), tag("a"), tag("c")}));
}

TEST_F(Tables, TheHashIsWhatTheDocumentationSays) {
  // By the description of docs/your_data.md, worked out in another language.
  EXPECT_EQ(data::hash_of(""), 0x2ad0938b4c26d017U);
  EXPECT_EQ(data::hash_of("ann"), 0x81e09e5868651defU);
  EXPECT_EQ(data::hash_of("a longer text than eight"), 0xab0ab00e0ed9c766U);
}

TEST_F(Tables, BadCellsAreNamedByLineAndColumn) {
  const std::string head = "y,price,age,user,item,tags\n1,2,3,u,4,t\n";
  EXPECT_EQ(problem(head + "1,cheap,3,u,4,t\n"),
            "table.csv: line 3, column 'price' (2): 'cheap' is not a number.");
  EXPECT_EQ(problem(head + "1,nan,3,u,4,t\n"),
            "table.csv: line 3, column 'price' (2): 'nan' is not a finite number.");
  EXPECT_EQ(problem(head + "\"1\",2,\"-inf\",u,4,t\n"),
            "table.csv: line 3, column 'age' (3): '-inf' is not a finite number.");
  EXPECT_EQ(problem(head + "1,1e999,3,u,4,t\n"),
            "table.csv: line 3, column 'price' (2): '1e999' is not a finite number.");
  EXPECT_EQ(problem(head + "1,2,1e39,u,4,t\n"),
            "table.csv: line 3, column 'age' (3): '1e39' is too large for 32 bits.");
  EXPECT_EQ(
      problem(head + "2,2,3,u,4,t\n"),
      "table.csv: line 3, column 'y' (1): label '2' is neither 0 nor 1; positive or threshold "
      "in [label] say what else counts as 1.");
  EXPECT_EQ(problem(head + ",2,3,u,4,t\n"),
            "table.csv: line 3, column 'y' (1): the label is missing.");
  EXPECT_EQ(
      problem(head + "1,2,3,u,50,t\n"),
      "table.csv: line 3, column 'item' (5): id 50 is not in a table of 50 rows; give it more "
      "rows, or outside = \"wrap\", or kind = \"hash\".");
  EXPECT_EQ(problem(head + "1,2,3,u,,t\n"),
            "table.csv: line 3, column 'item' (5): there is no value; missing = \"empty\" allows "
            "that.");
  EXPECT_EQ(problem(head + "1,2,3,u,4.5,t\n"),
            "table.csv: line 3, column 'item' (5): '4.5' is not a whole number.");
  // Lines are counted as an editor counts them.
  EXPECT_EQ(problem(head + "1,2,3,\"u\nv\",4,t\n\n1,2,3,u,4\n"),
            "table.csv: line 6 has 5 cells; there are 6 columns.");
  EXPECT_EQ(problem(head + "1,2,3,u,4,t,9\n"),
            "table.csv: line 3 has 7 cells; there are 6 columns.");
  EXPECT_EQ(
      problem("y,price,age,user,itm,tags\n"),
      "table.csv: there is no column 'item': did you mean itm? There are y, price, age, user, "
      "itm, tags.");
  EXPECT_EQ(problem("y,price,age,user,item,tags,y\n"), "table.csv: two columns are named 'y'.");
}

TEST_F(Tables, BadRecordsCanBeLeftOut) {
  const Read all = read_text(
      "y,price,age,user,item,tags\n1,2,3,u,4,a|b\n1,x,3,u,4,a|b\n0,2,3\n0,2,3,u,99,c\n0,2,3,u,5,"
      "c\n",
      kSchema, {.skips_bad = true, .num_named = 2});
  EXPECT_EQ(all.report.num_records, 5);
  EXPECT_EQ(all.report.num_bad, 3);
  EXPECT_EQ(all.report.first_bad.size(), 2U);
  EXPECT_EQ(all.samples.labels, (std::vector<float>{1, 0}));
  // Nothing of a record that was begun stays.
  EXPECT_EQ(all.samples.lengths, (std::vector<std::int32_t>{1, 1, 1, 1, 2, 1}));
  EXPECT_EQ(all.samples.ids.size(), 7U);
}

TEST_F(Tables, JsonLinesGiveTheSameSamplesAsCsv) {
  const Read csv =
      read_text("y,price,age,user,item,tags\n1,3.5,40,ann,7,a|b\n0,,,12,0,\ntrue,2,NA,x,3,c\n");
  const Read json = read_text(
      "{\"y\": 1, \"price\": 3.5, \"age\": 40, \"user\": \"ann\", \"item\": 7, \"tags\": [\"a\", "
      "\"b\"], \"more\": {}}\n\n"
      "{\"y\": false, \"price\": null, \"user\": 12, \"item\": 0, \"tags\": []}\r\n"
      "{\"y\": true, \"price\": \"2\", \"age\": \"NA\", \"user\": \"x\", \"item\": 3, \"tags\": "
      "\"c\"}");
  dlrm::expect_equal(csv.samples, json.samples);
  EXPECT_EQ(
      problem("{\"y\": 1}\n{\"y\"\n"),
      "table.csv: line 1, column 'item': there is no value; missing = \"empty\" allows that.");
  EXPECT_EQ(problem("{\"y\" 1}\n"), "table.csv: line 1 is not a JSON object.");
}

TEST_F(Tables, AnArrayOfJsonIsNamed) {
  const std::string says =
      "table.csv: is one JSON array, not JSON lines. Write an object per line, as jq -c '.[]' "
      "does.";
  for (const char* array :
       {R"([{"y": 1, "price": 2}])", "\xef\xbb\xbf[\n  {\n    \"y\": 1\n  }\n]\n"}) {
    EXPECT_EQ(problem(array), says);
    EXPECT_EQ(problem(array, std::string("format = \"jsonl\"\n") + kSchema), says);
    EXPECT_EQ(error([&] { data::guess_schema(path("table.csv")); }), says);
  }
  // A name of a column may begin so.
  EXPECT_EQ(problem("[y],price\n").find("table.csv: there is no column 'y'"), 0U);
}

TEST_F(Tables, GuessesCountLists) {
  const std::string guess =
      data::guess_schema(write("t.jsonl",
                               "{\"y\": 0, \"tags\": [\"a\", \"b\"]}\n{\"y\": 1, \"tags\": []}\n"
                               "{\"y\": 1, \"tags\": null}\n{\"y\": 0, \"tags\": [\"b\"]}\n"));
  EXPECT_NE(guess.find("\n# 3 lists, 1 missing, of 2 parts\n[[feature]]\ncolumn = \"tags\"\n"),
            std::string::npos)
      << guess;
}

TEST_F(Tables, NumbersOfJsonThatAreNotFiniteAreNamedByLineAndColumn) {
  const auto line = [](const std::string& price, const std::string& age = "3") {
    return R"({"y": 1, "price": )" + price + R"(, "age": )" + age +
           R"(, "user": "a \" NaN \\", "item": 4, "tags": ["NaN"]})" + "\n";
  };
  const std::string at = "table.csv: line 2, column ";
  for (const char* number : {"NaN", "-Infinity", "Infinity", "1e999", "-1.5e400"}) {
    EXPECT_EQ(problem(line("2") + line(number)),
              at + "'price': '" + number + "' is not a finite number.");
  }
  EXPECT_EQ(problem(line("2") + line("2", "1e39")),
            at + "'age': '1e+39' is too large for 32 bits.");
  EXPECT_EQ(problem(line("2") + line("Nan1")), "table.csv: line 2 is not a JSON object.");
  EXPECT_EQ(problem(line("2") + line("NaN NaN")), "table.csv: line 2 is not a JSON object.");
  // As in cells, a schema may say that they stand for no value; texts stay as they are.
  const std::string schema = "missing = [\"\", \"NaN\"]\n" +
                             std::string(kSchema).substr(std::string(kSchema).find("[label]"));
  const Read gap = read_text(line("NaN") + line("1"), schema);
  const Read null = read_text(line("null") + line("1"), schema);
  ASSERT_EQ(gap.samples.num_samples, 2);
  dlrm::expect_equal(gap.samples, null.samples);
  EXPECT_EQ(gap.samples.ids[0], data::hashed_row("a \" NaN \\", 1000));
}

TEST_F(Tables, VocabulariesLabelsAndColumnsWithoutNames) {
  write("colours.txt", "red\nblue\r\ngreen\n");
  const std::string schema = write("schema.toml", R"(
columns = ["colour", "stars", "many"]
separator = ";"
[label]
column = "stars"
threshold = 4
[[feature]]
column = "colour"
kind = "vocabulary"
vocabulary = "colours.txt"
[[feature]]
column = "many"
kind = "integer"
rows = 10
outside = "wrap"
separator = " "
most = 2
)");
  const Read all =
      read({write("t.csv", "blue;5;1 12 3\nblack;3.5;-1\n;4;\n")}, data::read_schema(schema));
  EXPECT_EQ(all.samples.labels, (std::vector<float>{1, 0, 1}));
  EXPECT_EQ(all.samples.ids, (std::vector<std::int64_t>{1, 3, 3, 1, 2, 9}));
  EXPECT_EQ(data::read_schema(schema).click_schema().features[0].num_rows, 4);
}

TEST_F(Tables, SeveralFilesMayOrderTheirColumnsDifferently) {
  const Schema schema = data::parse_schema(kSchema, "schema.toml");
  write("day_1.csv", "y,price,age,user,item,tags\n1,2,3,u,4,t\n");
  write("day_2.csv", "tags,item,user,age,price,y\nt,4,u,3,2,1\n");
  const auto files = data::expand({path("day_*.csv")});
  ASSERT_EQ(files.size(), 2U);
  const Read all = read(files, schema);
  EXPECT_EQ(all.samples.dense[0], all.samples.dense[2]);
  EXPECT_EQ(all.samples.ids[0], all.samples.ids[1]);
  EXPECT_EQ(error([&] { data::expand({path("week_*.csv")}); }),
            "week_*.csv: no file has such a name.");
}

TEST_F(Tables, OtherFilesAreRefusedByWhatTheyHold) {
  const auto refused = [&](const std::string& bytes) {
    return error([&] { data::Input input(write("file.csv", bytes)); });
  };
  EXPECT_NE(refused("PAR1\x15\x04").find("file.csv: is a Parquet file, not text"),
            std::string::npos);
  EXPECT_NE(refused("TSRCLICK\x01").find("is a click log already"), std::string::npos);
  EXPECT_NE(refused(std::string("a,b\n1,\0,2\n", 10)).find("binary file"), std::string::npos);
  EXPECT_NE(refused("\xff\xfe"
                    "a")
                .find("UTF-16"),
            std::string::npos);
  EXPECT_NE(refused("PK\x03\x04").find("zip or npz"), std::string::npos);
  // Cut short, not taken for an end.
  EXPECT_NE(refused("\x1f\x8b\x08").find("file.csv: is cut short"), std::string::npos);
  EXPECT_NE(error([&] { data::Input input(path("none.csv")); }).find("cannot be opened"),
            std::string::npos);
  EXPECT_NE(error([&] { data::Input input(folder_.string()); }).find("is a folder"),
            std::string::npos);
}

TEST_F(Tables, SchemasAreCheckedByLineAndKey) {
  const auto wrong = [&](const std::string& text) {
    return error([&] { data::parse_schema(text, "s.toml"); });
  };
  const std::string label = "[label]\ncolumn = \"y\"\n";
  EXPECT_EQ(wrong("[[feature]]\ncolumn = \"a\"\nrows = 5\n"),
            "s.toml: there is no [label] with column = \"...\".");
  EXPECT_EQ(wrong(label), "s.toml: there is no [[feature]]; a recommender needs one or more.");
  EXPECT_EQ(wrong(label + "[[feature]]\ncolumn = \"a\"\nrow = 5\n"),
            "s.toml: line 5: there is no key 'row' in [[feature]]: did you mean rows?");
  EXPECT_EQ(wrong(label + "[[feature]]\ncolumn = \"a\"\nkind = \"text\"\nrows = 5\n"),
            "s.toml: line 5: kind is one of hash, integer, vocabulary, not 'text'.");
  EXPECT_EQ(wrong(label + "[[feature]]\ncolumn = \"a\"\n"),
            "s.toml: line 3: feature 'a' needs rows = N, or growing = true.");
  EXPECT_EQ(wrong(label + "[[feature]]\ncolumn = \"a\"\ngrowing = true\nrows = 5\n"),
            "s.toml: line 6: feature 'a': growing = true and rows do not go together; a growing "
            "table takes every id.");
  EXPECT_EQ(wrong(label + "[[feature]]\ncolumn = \"a\"\ngrowing = true\nkind = \"vocabulary\"\n"),
            "s.toml: line 6: feature 'a': growing = true is for kind = \"hash\" and \"integer\".");
  EXPECT_EQ(wrong(label + "[[feature]]\ncolumn = \"a\"\nrows = 5\ndim = 0\n"),
            "s.toml: line 6: dim is a whole number from 1 to 4096.");
  EXPECT_EQ(wrong(label + "[[dense]]\ncolumn = \"a\"\nclip = [3, 1]\n"),
            "s.toml: line 5: clip has its lowest number above the highest.");
  EXPECT_EQ(wrong("[label\n").substr(0, 15), "s.toml: line 1:");
  // What a schema says as a text is the same schema.
  const Schema schema = data::parse_schema(kSchema, "s.toml");
  EXPECT_EQ(data::parse_schema(schema.text(), "s.toml").text(), schema.text());
}

TEST_F(Tables, GuessesCanBeReadAndRead) {
  const std::string table =
      write("shop.csv",
            "clicked,user_id,city,price,tags,empty\n0,17,Oslo,2.5,a|b,\n1,99,Rome,120,b,\n"
            "1,3,\"Oslo\",NA,a|c|b,\n0,3,Rome,7,,\n");
  const Schema schema = data::parse_schema(data::guess_schema(table), "guess.toml");
  EXPECT_EQ(schema.label.column, "clicked");
  ASSERT_EQ(schema.dense.size(), 1U);
  EXPECT_EQ(schema.dense[0].column, "price");
  EXPECT_TRUE(schema.dense[0].log1p);
  ASSERT_EQ(schema.features.size(), 3U);
  EXPECT_EQ(schema.features[0].rows, 100);
  EXPECT_EQ(schema.features[2].separator, "|");
  EXPECT_EQ(schema.missing, (std::vector<std::string>{"", "NA"}));
  EXPECT_EQ(read({table}, schema).samples.num_samples, 4);
}

TEST_F(Tables, GuessesTakeInfinitiesForNumbers) {
  const std::string json = write("t.jsonl",
                                 "{\"clicked\": 0, \"price\": 2.5, \"city\": \"Oslo\"}\n"
                                 "{\"clicked\": 1, \"price\": NaN, \"city\": \"Rome\"}\n"
                                 "{\"clicked\": 1, \"price\": -Infinity, \"city\": \"Rome\"}\n");
  const std::string csv =
      write("t.csv", "clicked,price,city\n0,2.5,Oslo\n1,NaN,Rome\n1,-Infinity,Rome\n");
  for (const std::string& table : {json, csv}) {
    const std::string guess = data::guess_schema(table);
    EXPECT_NE(guess.find(", 1 missing, 1 not finite, 2.5 to 2.5\n"), std::string::npos) << guess;
    const Schema schema = data::parse_schema(guess, "guess.toml");
    ASSERT_EQ(schema.dense.size(), 1U);
    EXPECT_EQ(schema.dense[0].column, "price");
    EXPECT_EQ(schema.missing, (std::vector<std::string>{"", "NaN"}));
    const std::string said = error([&] { read({table}, schema); });
    EXPECT_NE(said.find("column 'price'"), std::string::npos) << said;
    EXPECT_NE(said.find("'-Infinity' is not a finite number."), std::string::npos) << said;
  }
}

TEST_F(Tables, NumbersAreTheNearestDoubles) {
  for (const char* text :
       {"0", "-0", "7", "-12.5", "0.1", "3.14159265358979", "123456789012345", ".5", "5.", "1e-3",
        " 42 ", "+8", "0.30000000000000004", "12345678901234567"}) {
    double value = 0;
    ASSERT_TRUE(data::parse_real(text, value)) << text;
    EXPECT_EQ(value, std::strtod(text, nullptr)) << text;
  }
  double value = 0;
  for (const char* text :
       {"1e999", "-1e400", "1e9223372036854775807", "1e99999999999999999999", "+123.5e308"}) {
    ASSERT_TRUE(data::parse_real(text, value)) << text;
    EXPECT_EQ(value, text[0] == '-' ? -HUGE_VAL : HUGE_VAL) << text;
  }
  const std::string many(400, '0');
  for (const std::string& text : std::vector<std::string>{
           "1e-999", "0.1e-9223372036854775808", "-1e-99999999999999999999", "0." + many + "1"}) {
    ASSERT_TRUE(data::parse_real(text, value)) << text;
    EXPECT_EQ(value, 0) << text;
  }
  ASSERT_TRUE(data::parse_real("1" + many, value));
  EXPECT_EQ(value, HUGE_VAL);
  for (const char* text : {"", "-", ".", "1.2.3", "1,5", "0x10", "1e", "--1", "1 2"}) {
    EXPECT_FALSE(data::parse_real(text, value)) << text;
  }
}

TEST_F(Tables, AFeatureMayGrowAndHaveItsOwnColumns) {
  const Schema schema = data::parse_schema(R"(
[label]
column = "y"
[[feature]]
column = "user"
growing = true
dim = 4
[[feature]]
column = "item"
kind = "integer"
growing = true
[[feature]]
column = "shop"
rows = 7
dim = 2
)",
                                           "s.toml");
  EXPECT_EQ(data::parse_schema(schema.text(), "s.toml").text(), schema.text());
  const dlrm::ClickSchema click = schema.click_schema();
  EXPECT_TRUE(click.features[0].grows());
  EXPECT_EQ(click.features[0].dim, 4);
  EXPECT_TRUE(click.features[1].grows());
  EXPECT_EQ(click.features[1].dim_or(16), 16);
  EXPECT_FALSE(click.features[2].grows());
  const Read all =
      read({write("t.csv", "y,user,item,shop\n1,ann,-7,s\n0,bob,9000000000,t\n")}, schema);
  const std::vector<std::int64_t> expected = {
      data::raw_id("ann"), data::raw_id("bob"),      -7,
      9'000'000'000,       data::hashed_row("s", 7), data::hashed_row("t", 7)};
  EXPECT_EQ(all.samples.ids, expected);
}

TEST_F(Tables, ALogRemembersItsSchema) {
  const Schema schema = data::parse_schema(kSchema, "schema.toml");
  const std::string log = path("log.click");
  dlrm::ClickFileWriter writer(log, schema.click_schema());
  data::read_tables({write("t.csv", "y,price,age,user,item,tags\n1,2,3,u,4,t|u\n")}, schema, {},
                    [&](SampleBlock& samples) { writer.append(samples); });
  writer.finish();
  const dlrm::ClickFile file(log);
  EXPECT_EQ(file.layout().version, 2U);
  EXPECT_EQ(file.schema(), schema.click_schema());
  EXPECT_TRUE(file.schema().features[2].means);
  EXPECT_EQ(data::parse_schema(file.schema().origin, "log").text(), schema.text());
  file.verify();
}

}  // namespace

// Settings that are written once: values, help, files, and what a run may go on with.

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "dlrm/settings.h"
#include "gnn/settings.h"
#include "lm/settings.h"
#include "settings/flags.h"
#include "settings/help_text.h"
#include "settings/usage.h"
#include "tessera/launch/launch_error.h"

namespace tessera::settings {
namespace {

struct Values {
  int ranks = 1;
  std::int64_t steps = 100;
  double rate = 0.05;
  std::string name = "a";
  bool is_fast = false;
  bool print_config = false;
  bool wants_help = false;

  Table table() {
    Table table("prog [flags]\n\n", "More: here\n");
    table.group("first");
    table.add("ranks", ranks, "N", "how many").range(1, 8).short_flag('n');
    table.add("steps", steps, "N", "steps").range(0, 1000).beside();
    table.group("second");
    table.add("rate", rate, "X", "of it").not_negative().told().section("of_values", "rate");
    table.add("name", name, "S", "")
        .one_of({"a", "b", "say \"x\"", "C:\\d", ""})
        .fixed()
        .section("of_values", "title");
    table.add("fast", is_fast, "", "hurry");
    table.add_common(print_config, wants_help);
    return table;
  }
};

class File {
 public:
  explicit File(const std::string& text) {
    char name[] = "/tmp/tessera_settings_XXXXXX";
    close(mkstemp(name));
    path = name;
    std::ofstream(path) << text;
  }
  ~File() { std::filesystem::remove(path); }
  std::string path;
};

Values read_values(const std::vector<std::string>& words) {
  Values values;
  read("verb", values.table(), words);
  return values;
}

std::string refusal(const std::string& text) {
  const File file(text);
  try {
    read_values({"--config", file.path});
  } catch (const launch::LaunchError& error) {
    return std::string(error.what()).substr(std::string("verb: ").size() + file.path.size() + 2);
  }
  return "";
}

TEST(Settings, FlagsWinOverTheFileAndTheFileOverDefaults) {
  const File file("steps = 7  # a comment\nrate = 1e-3\nname = \"b\"\nfast = true\n");
  const Values values = read_values({"--config", file.path, "--steps", "9", "-n", "3"});
  EXPECT_EQ(values.ranks, 3);
  EXPECT_EQ(values.steps, 9);
  EXPECT_EQ(values.rate, 0.001);
  EXPECT_EQ(values.name, "b");
  EXPECT_TRUE(values.is_fast);
}

TEST(Help, FitsItsColumns) {
  const std::string fits = "tessera x\n\n  --flag N   what it is\nMore: docs/x.md\n";
  EXPECT_EQ(fitted_help(fits, 40), fits);
  // A flag's text goes on below its beginning, with the lines that already did.
  EXPECT_EQ(fitted_help("  --flag N          one two three four five\n"
                        "                    six\n",
                        32),
            "  --flag N          one two\n"
            "                    three four\n"
            "                    five six\n");
  // A paragraph is filled anew; where to read more stays together, on a line of its own.
  EXPECT_EQ(fitted_help(
                "\none two three four\nfive\nMore: docs/x.md\n\nsix seven. More: docs/y.md\n", 15),
            "\none two three\nfour five\nMore: docs/x.md\n\nsix seven.\nMore: docs/y.md\n");
  // A word above flags is their title, and ends the paragraph before it.
  EXPECT_EQ(fitted_help("one two three four\nranks\n  --ranks N\n", 15),
            "one two three\nfour\nranks\n  --ranks N\n");
}

TEST(Settings, AFileIsToml) {
  const File file("'steps' = 0x1_0\n\"rate\" = +2.5e-1\nname = 'C:\\d'\n");
  const Values values = read_values({"--config", file.path});
  EXPECT_EQ(values.steps, 16);
  EXPECT_EQ(values.rate, 0.25);
  EXPECT_EQ(values.name, "C:\\d");
  const File escaped("name = \"say \\u0022x\\u0022\"\nsteps = 1_000\n");
  EXPECT_EQ(read_values({"--config", escaped.path}).name, "say \"x\"");
  const File bare("name = b\n");  // not TOML, and meant as what it says
  EXPECT_EQ(read_values({"--config", bare.path}).name, "b");
}

TEST(Settings, ASectionHasOtherNamesOfItsKeys) {
  const File file("steps = 7\n[of_values]\nrate = 1e-3\ntitle = b\n");
  const Values values = read_values({"--config", file.path});
  EXPECT_EQ(values.steps, 7);
  EXPECT_EQ(values.rate, 0.001);
  EXPECT_EQ(values.name, "b");
  EXPECT_EQ(read_values({"--config", file.path, "--name", "a"}).name, "a");
  EXPECT_EQ(refusal("name = \"b\"\n[of_values]\ntitle = \"a\"\n"), "line 3: name is set again");
  EXPECT_EQ(refusal("[of_values]\nname = \"b\"\n"), "line 2: there is no key 'of_values.name'");
  EXPECT_EQ(refusal("[of_values]\nrate = -1\n"), "line 2: rate cannot be '-1'");
  EXPECT_EQ(refusal("[of_values.deeper]\nrate = 1\n"), "line 1: a section [of_values.deeper]");
}

TEST(Settings, WhatIsWrongInAFileIsNamedByLine) {
  EXPECT_EQ(refusal("\nrate = [1]\n"), "line 2: rate has a list or a table");
  EXPECT_EQ(refusal("rate = { a = 1 }\n"), "line 1: rate has a list or a table");
  EXPECT_EQ(refusal("rate = 1\n[more]\nsteps = 2\n"), "line 2: a section [more]");
  EXPECT_EQ(refusal("steps = 1\n\nsteps = 2\n"), "line 3: steps is set again");
  EXPECT_EQ(refusal("steps = 2000\n"), "line 1: steps cannot be '2000'");
  EXPECT_EQ(refusal("rate = inf\n"), "line 1: rate cannot be 'inf'");
  EXPECT_EQ(refusal("# no end\nname = \"b\n"), "line 2: name has a text without an end");
  EXPECT_EQ(refusal("speed = 1\n"), "line 1: there is no key 'speed'");
  EXPECT_EQ(refusal("print-config = true\n"), "line 1: 'print-config' cannot be set in a file");
  EXPECT_EQ(refusal("steps = 1979-05-27\n"), "line 1: steps has a list or a table");
}

TEST(Settings, WhatIsPrintedReadsBackTheSame) {
  Values values = read_values({"--rate", "0.1", "--name", "say \"x\"", "--fast"});
  const std::string text = values.table().config();
  EXPECT_EQ(text, "ranks=1\nsteps=100\nrate=0.1\nname='say \"x\"'\nfast=true\n");
  const File file(text);
  EXPECT_EQ(read_values({"--config", file.path}).table().config(), text);
  values.name = "";
  values.rate = 1e-300;
  const File small(values.table().config());
  EXPECT_EQ(read_values({"--config", small.path}).table().config(), values.table().config());
}

TEST(Settings, HelpComesFromTheTable) {
  EXPECT_EQ(Values{}.table().help(),
            "prog [flags]\n\n"
            "first\n"
            "  -n, --ranks N --steps N   how many (1), steps (100)\n"
            "second\n"
            "  --rate X                  of it (0.05)\n"
            "  --name S                  a, b, say \"x\", C:\\d or (a)\n"
            "  --fast                    hurry\n"
            "  --config FILE             read flags from a TOML file; --print-config shows the "
            "result\n"
            "More: here\n");
}

TEST(Settings, DifferencesFollowTheRules) {
  Values before;
  Values now = read_values({"--rate", "0.5", "--name", "b", "--steps", "3"});
  EXPECT_TRUE(difference(before.table(), before.table(), OnResume::kTold).is_empty());
  EXPECT_EQ(difference(before.table(), now.table(), OnResume::kTold).changes,
            "--rate 0.5 (was 0.05)");
  const Difference fixed = difference(before.table(), now.table(), OnResume::kFixed);
  EXPECT_EQ(fixed.saved, "--name a");
  EXPECT_EQ(fixed.given, "--name b");
}

TEST(Settings, WrongWordsGetOneLine) {
  const auto text = [](const std::vector<std::string>& words) -> std::string {
    try {
      read_values(words);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(text({"--step", "3"}), "verb: unknown flag --step: did you mean --steps?");
  EXPECT_EQ(text({"--steps"}), "verb: --steps needs a value");
  EXPECT_EQ(text({"more"}), "verb: takes flags only, not 'more'");
  EXPECT_EQ(text({"--rate", "-1"}), "verb: --rate: '-1' is not a number from 0 on");
}

template <class T>
class Workloads : public testing::Test {};
using Kinds =
    testing::Types<workloads::dlrm::Settings, workloads::lm::Settings, workloads::gnn::Settings>;
TYPED_TEST_SUITE(Workloads, Kinds);

// Every setting of a run is in its file, and every flag in the help.
TYPED_TEST(Workloads, TablesAreWhole) {
  TypeParam given;
  const Table table = given.table();
  const std::string help = table.help();
  const std::string config = table.config();
  for (const Setting& setting : table.settings()) {
    // Who reads the help has found --help.
    const bool is_shown = help.find("--" + setting.name) != std::string::npos;
    EXPECT_TRUE(is_shown || setting.name == "help") << setting.name;
    const bool is_kept = ("\n" + config).find("\n" + setting.name + "=") != std::string::npos;
    EXPECT_EQ(is_kept, setting.on_resume != OnResume::kOneCall) << setting.name;
  }
  const File file(config);
  TypeParam again;
  read("train", again.table(), {"--config", file.path});
  EXPECT_EQ(again.table().config(), config);
}

}  // namespace
}  // namespace tessera::settings

// Texts that share an id are found, each once, by a second hash.

#include "dlrm/text_check.h"

#include <gtest/gtest.h>

#include <string>

#include "data/schema.h"

namespace tessera::workloads::dlrm {
namespace {

TEST(TextCheck, CountsTextsThatShareTheIdOfAnother) {
  TextCheck check;
  for (int round = 0; round < 3; ++round) {
    check.see("red", 5);
    check.see("green", 6);
    check.see("blue", 5);    // another text, the same id
    check.see("yellow", 5);  // and a third one
  }
  EXPECT_EQ(check.found().texts, 2);
  EXPECT_EQ(check.found().clashes, 2);
  check.see("green", 6);
  EXPECT_EQ(check.found().clashes, 2);
}

TEST(TextCheck, HashesOfManyTextsDoNotClash) {
  TextCheck check;
  constexpr int kTexts = 20000;  // more than are looked up together
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < kTexts; ++i) {
      const std::string text = "text " + std::to_string(i);
      check.see(text, data::raw_id(text));
    }
  }
  EXPECT_EQ(check.found().texts, kTexts);
  EXPECT_EQ(check.found().clashes, 0);
}

}  // namespace
}  // namespace tessera::workloads::dlrm

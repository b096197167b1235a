#include "tessera/launch/options.h"

#include <stdexcept>

#include <gtest/gtest.h>

namespace tessera::launch {
namespace {

TEST(StreamRule, OneValueCoversAllRanks) {
  const StreamRule rule = parse_stream_rule("2");
  EXPECT_EQ(rule.of(0), 2);
  EXPECT_EQ(rule.of(99), 2);
  EXPECT_TRUE(parse_stream_rule("0").is_empty());
}

TEST(StreamRule, PairsCoverTheirRanksOnly) {
  const StreamRule rule = parse_stream_rule("0:3,2:1");
  EXPECT_EQ(rule.of(0), 3);
  EXPECT_EQ(rule.of(1), 0);
  EXPECT_EQ(rule.of(2), 1);
  EXPECT_FALSE(rule.is_empty());
}

TEST(StreamRule, RefusesOtherWords) {
  for (const char* text : {"", "4", "-1", "x", "0:4", "0:1,", "0:1,2", "a:1", ":", "1:"}) {
    EXPECT_THROW(parse_stream_rule(text), std::invalid_argument) << text;
  }
}

TEST(EndpointText, IsReadAndWritten) {
  EXPECT_EQ(parse_endpoint("host:1").host, "host");
  EXPECT_EQ(parse_endpoint("host:65535").port, 65535);
  EXPECT_EQ(parse_endpoint("[::1]:80").host, "::1");
  EXPECT_EQ(parse_endpoint("[::1]:80").text(), "[::1]:80");
  EXPECT_EQ(parse_endpoint("host", 29500).text(), "host:29500");
  for (const char* text :
       {"", ":1", "host", "host:", "host:x", "host:65536", "host:-1", "[::1", "::1"}) {
    EXPECT_THROW(parse_endpoint(text), std::invalid_argument) << text;
  }
}

TEST(RankCount, IsAPositiveNumberOrAName) {
  EXPECT_EQ(parse_rank_count("8"), 8);
  EXPECT_GE(parse_rank_count("cpu"), 1);
  EXPECT_GE(parse_rank_count("auto"), 1);
  for (const char* text : {"", "0", "-1", "1.5", "two", "5000", "99999999999", " 1"}) {
    EXPECT_THROW(parse_rank_count(text), std::invalid_argument) << text;
  }
}

TEST(Seconds, MayHaveAFraction) {
  EXPECT_EQ(parse_seconds("10").count(), 10'000);
  EXPECT_EQ(parse_seconds("0.05").count(), 50);
  EXPECT_EQ(parse_seconds("60s").count(), 60'000);
  for (const char* text : {"", "s", "-1", "nan", "inf", "1e9", "1 s", "1m"}) {
    EXPECT_THROW(parse_seconds(text), std::invalid_argument) << text;
  }
}

TEST(RankList, IsNumbersWithCommas) {
  EXPECT_EQ(parse_rank_list("0,2,5"), (std::vector<int>{0, 2, 5}));
  for (const char* text : {"", ",", "1,", "a", "-1"}) {
    EXPECT_THROW(parse_rank_list(text), std::invalid_argument) << text;
  }
}

}  // namespace
}  // namespace tessera::launch

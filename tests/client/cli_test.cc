// Flags, percentiles and JSON of the command line.
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "client/bench/bench_report.h"
#include "client/bench/commands.h"
#include "client/bench/load.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/fake_server.h"
#include "tests/client/unused_port.h"

namespace flashcore::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(FlagTest, BenchShape) {
  BenchShape shape;
  std::string error;
  ASSERT_TRUE(AbslParseFlag("4x32/8x1024x128", &shape, &error));
  EXPECT_EQ(shape.batch, 4u);
  EXPECT_EQ(shape.num_heads, 32u);
  EXPECT_EQ(shape.num_kv_heads, 8u);
  EXPECT_EQ(shape.rows, 1024u);
  EXPECT_EQ(shape.head_dim, 128u);
  EXPECT_EQ(AbslUnparseFlag(shape), "4x32/8x1024x128");
  ASSERT_TRUE(AbslParseFlag("1x8x512x64", &shape, &error));
  EXPECT_EQ(shape.num_kv_heads, 8u);
  EXPECT_EQ(AbslUnparseFlag(shape), "1x8x512x64");
  for (const char* bad : {"", "1x8x512", "1x8x512x64x1", "1x8x512xD", "0x8x512x64", "1x8/3x512x64",
                          "1x8/x512x64", "1x8/2/2x512x64", "-1x8x512x64", "1x8x 512x64",
                          "99999999999x8x512x64", "1x8x0x64", "1X8X512X64"}) {
    EXPECT_FALSE(AbslParseFlag(bad, &shape, &error)) << bad;
    EXPECT_FALSE(error.empty());
  }
}

TEST(FlagTest, Mask) {
  Mask mask;
  std::string error;
  for (const char* good :
       {"none", "causal", "window:127,0", "window:,8", "window:3,", "window:,"}) {
    ASSERT_TRUE(AbslParseFlag(good, &mask, &error)) << good;
    EXPECT_EQ(AbslUnparseFlag(mask), good);
  }
  for (const char* bad : {"", "Causal", "window", "window:", "window:1", "window:-1,0",
                          "window:1,2,3", "window:1e99,0"}) {
    EXPECT_FALSE(AbslParseFlag(bad, &mask, &error)) << bad;
  }
  ASSERT_TRUE(AbslParseFlag("window:99999999999,0", &mask, &error)) << "longer than any K/V";
  EXPECT_EQ(AbslUnparseFlag(mask), "window:,0");
  ASSERT_TRUE(AbslParseFlag("window:2147483648,2147483647", &mask, &error));
  EXPECT_EQ(AbslUnparseFlag(mask), "window:,2147483647");
}

TEST(FlagTest, BenchMode) {
  std::string error;
  for (const char* good : {"attend", "decode", "prefill", "mixed"}) {
    BenchMode mode;
    ASSERT_TRUE(AbslParseFlag(good, &mode, &error)) << good;
    EXPECT_EQ(AbslUnparseFlag(mode), good);
  }
  BenchMode mode;
  for (const char* bad : {"", "Decode", "decod", "all"}) {
    EXPECT_FALSE(AbslParseFlag(bad, &mode, &error)) << bad;
  }
}

TEST(FlagTest, SequenceIds) {
  const std::string a = "000102030405060708090a0b0c0d0e0f", b = "ffffffffffffffffffffffffffffffff";
  SequenceIds ids;
  std::string error;
  ASSERT_TRUE(AbslParseFlag(a + "," + b, &ids, &error));
  EXPECT_FALSE(ids.all);
  ASSERT_EQ(ids.ids.size(), 2u);
  EXPECT_EQ(ids.ids[0].size(), 16u);
  EXPECT_EQ(ids.ids[0][15], '\x0f');
  EXPECT_EQ(AbslUnparseFlag(ids), a + "," + b);
  ASSERT_TRUE(AbslParseFlag("all", &ids, &error));
  EXPECT_TRUE(ids.all);
  EXPECT_TRUE(ids.ids.empty());
  EXPECT_EQ(AbslUnparseFlag(ids), "all");
  ASSERT_TRUE(AbslParseFlag("", &ids, &error));
  EXPECT_FALSE(ids.all);
  for (const std::string& bad : {std::string("All"), a + ",", a + a, a.substr(1), "g" + a.substr(1),
                                 a + " ," + b, a + ",all"}) {
    EXPECT_FALSE(AbslParseFlag(bad, &ids, &error)) << bad;
  }
}

int Main(const std::vector<std::string>& args) {
  return cli::Main(
      {InfoCommand(), AttendCommand(), VerifyCommand(), BenchCommand(), HealthCommand()}, args);
}

TEST(FlagTest, CommandLine) {
  absl::FlagSaver saver;
  bool help = false;
  const auto parse = [&](std::vector<std::string> args) {
    return ParseFlags(BenchCommand(), args, &help);
  };
  EXPECT_EQ(parse({"--json", "--dtype=bf16", "--layout", "HND", "--nojson"}), absl::OkStatus());
  EXPECT_FALSE(absl::GetFlag(FLAGS_json));
  EXPECT_EQ(absl::GetFlag(FLAGS_dtype), DType::kBFloat16);
  EXPECT_EQ(absl::GetFlag(FLAGS_layout), Layout::kHND);
  EXPECT_EQ(parse({"--help", "--bogus"}), absl::OkStatus());
  EXPECT_TRUE(help);
  EXPECT_THAT(parse({"--bogus=1"}).message(), HasSubstr("unknown flag --bogus"));
  EXPECT_THAT(parse({"--query=x"}).message(), HasSubstr("unknown flag"));  // attend's
  EXPECT_THAT(parse({"--noshape"}).message(), HasSubstr("unknown flag"));
  EXPECT_THAT(parse({"--shape"}).message(), HasSubstr("no value"));
  EXPECT_THAT(parse({"--duration=fast"}).message(),
              HasSubstr("--duration=fast: not a time, such as 500ms, 2s or 5m"));
  EXPECT_THAT(parse({"--context=-1"}).message(), HasSubstr("not a whole number, not negative"));
  EXPECT_THAT(parse({"--pin=maybe"}).message(), HasSubstr("not true or false"));
  EXPECT_THAT(parse({"--dtype=int4"}).message(), HasSubstr("want float16 or bfloat16"));
  EXPECT_THAT(parse({"stray"}).message(), HasSubstr("stray"));
  EXPECT_EQ(Main({}), kExitUsage);
  EXPECT_EQ(Main({"nonsense"}), kExitUsage);
  EXPECT_EQ(Main({"info", "--bogus"}), kExitUsage);
  EXPECT_EQ(Main({"info", "--target=nonsense"}), kExitUsage);
  EXPECT_EQ(Main({"attend"}), kExitUsage);
  EXPECT_EQ(Main({"bench", "--help"}), kExitOk);
}

// stderr of a command that fails.
std::string ErrorOf(const std::vector<std::string>& args) {
  ::testing::internal::CaptureStderr();
  EXPECT_NE(Main(args), kExitOk);
  return ::testing::internal::GetCapturedStderr();
}

TEST(CliTest, AnErrorNamesTheVariableThatTheTargetCameFrom) {
  absl::FlagSaver saver;
  const UnusedPort nobody;
  const std::string target = nobody.target();
  const std::string words = absl::StrCat("(target ", target, ", of $FLASHCORE_TARGET)");
  setenv("FLASHCORE_TARGET", target.c_str(), 1);
  EXPECT_THAT(ErrorOf({"info", "--timeout=100ms"}), HasSubstr(words));
  EXPECT_THAT(ErrorOf({"bench", "--transport=local"}), HasSubstr(words));
  setenv("FLASHCORE_TARGET", "nonsense", 1);
  EXPECT_THAT(ErrorOf({"info"}), HasSubstr("(target nonsense, of $FLASHCORE_TARGET)"));
  EXPECT_THAT(ErrorOf({"info", "--target=" + target}), Not(HasSubstr("FLASHCORE_TARGET")));
  unsetenv("FLASHCORE_TARGET");
}

TEST(CliTest, ExitCodesAgainstAServer) {
  absl::FlagSaver saver;
  FakeServer server;
  const std::string target = "--target=" + server.target();
  EXPECT_EQ(Main({"info", target}), kExitOk);
  EXPECT_EQ(Main({"health", target}), kExitOk);
  EXPECT_EQ(Main({"verify", target}), kExitFailure);  // it names no head_dim
  // The fake answers at once, with its query: as a kernel that skips its work would.
  EXPECT_EQ(Main({"bench", target, "--shape=1x2x16x32", "--duration=50ms", "--warmup=0"}),
            kExitFailure);
  const UnusedPort nobody;
  EXPECT_EQ(Main({"info", "--target=" + nobody.target()}), kExitFailure);
  EXPECT_EQ(Main({"health", "--target=" + nobody.target()}), kExitFailure);
}

TEST(BenchReportTest, PercentilesAreOfNearestRank) {
  std::vector<float> samples;
  for (int i = 1000; i >= 1; --i) samples.push_back(static_cast<float>(i));
  const nlohmann::ordered_json p = Percentiles(samples);
  EXPECT_EQ(p.at("p50"), 500);
  EXPECT_EQ(p.at("p90"), 900);
  EXPECT_EQ(p.at("p99"), 990);
  EXPECT_EQ(p.at("p999"), 999);
  EXPECT_EQ(p.at("max"), 1000);
  EXPECT_EQ(p.at("mean"), 500.5);
  EXPECT_EQ(
      Percentiles({738.5050048828125f}).dump(),
      R"({"p50":738.505,"p90":738.505,"p99":738.505,"p999":738.505,"max":738.505,"mean":738.505})");
  EXPECT_EQ(NearestRank({7}, 0.5), 7);
  EXPECT_EQ(NearestRank({7}, 0.999), 7);
  EXPECT_EQ(NearestRank({1, 2, 3}, 0.5), 2);
  EXPECT_EQ(NearestRank({1, 2}, 0.5), 1);
  EXPECT_TRUE(std::isnan(NearestRank({}, 0.5)));
}

TEST(JsonTest, EscapesAndNests) {
  nlohmann::ordered_json json;
  json["a"] = "q\"\\\n\xff";
  json["b"] = 1.5;
  json["nan"] = std::nan("");
  json["t"] = true;
  json["list"] = {{{"n", 1}}, nlohmann::ordered_json::object()};
  absl::FlagSaver saver;
  testing::internal::CaptureStdout();
  Print(json, "text\n");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "text\n");
  absl::SetFlag(&FLAGS_json, true);
  testing::internal::CaptureStdout();
  Print(json, "text\n");
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            R"({"a":"q\"\\\n�","b":1.5,"nan":null,"t":true,"list":[{"n":1},{}]})"
            "\n");
}

TEST(LoadTest, FlopCountsWhatTheMaskShows) {
  AttendRequest shape;
  shape.num_heads = 2;
  shape.head_dim = 8;
  EXPECT_EQ(AttentionFlop(shape, 4, 4), 4.0 * 16 * 2 * 8);
  shape.mask = Mask::Causal();
  EXPECT_EQ(AttentionFlop(shape, 4, 4), 4.0 * 10 * 2 * 8);
  EXPECT_EQ(AttentionFlop(shape, 4, 2), 4.0 * 3 * 2 * 8);  // the first two rows see nothing
  EXPECT_EQ(AttentionFlop(shape, 2, 6), 4.0 * 11 * 2 * 8);
}

}  // namespace
}  // namespace flashcore::cli

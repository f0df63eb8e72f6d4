#include "server/telemetry/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/telemetry/json.h"

namespace flashcore::server {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

std::string Json(absl::string_view text) {
  std::string out;
  AppendJsonString(text, &out);
  return out;
}

std::string Number(double value) {
  std::string out;
  AppendJsonNumber(value, &out);
  return out;
}

Logger::Options Into(std::vector<std::string>* records, LogFormat format) {
  Logger::Options options;
  options.format = format;
  options.sink = [records](absl::string_view record) { records->emplace_back(record); };
  options.now = [] {
    return std::chrono::system_clock::time_point(std::chrono::microseconds(1795254000000042));
  };
  return options;
}

TEST(Json, EscapesWhatJsonAndTerminalsMind) {
  EXPECT_EQ(Json("plain / text"), R"("plain / text")");
  EXPECT_EQ(Json("\"\\\n\r\t"), R"("\"\\\n\r\t")");
  EXPECT_EQ(Json(absl::string_view("\0\x01\x1b\x1f\x7f", 5)),
            R"("\u0000\u0001\u001b\u001f\u007f")");
  EXPECT_EQ(Json("\xC2\x9B"), R"("\u009b")");  // a terminal's control sequence introducer
}

TEST(Json, KeepsValidUtf8) {
  for (const char* text : {"\xC2\xA0", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80",
                           "\xEF\xBF\xBF", "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_EQ(Json(text), absl::StrCat("\"", text, "\""));
  }
}

TEST(Json, ReplacesInvalidUtf8) {
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(Json("a\x80z"), "\"a" + r + "z\"");                      // no lead
  EXPECT_EQ(Json("\xC0\xAF"), "\"" + r + r + "\"");                  // overlong
  EXPECT_EQ(Json("\xE0\x80\xAF"), "\"" + r + r + r + "\"");          // overlong
  EXPECT_EQ(Json("\xED\xA0\x80"), "\"" + r + r + r + "\"");          // surrogate
  EXPECT_EQ(Json("\xF4\x90\x80\x80"), "\"" + r + r + r + r + "\"");  // above U+10FFFF
  EXPECT_EQ(Json("\xFF"), "\"" + r + "\"");
  EXPECT_EQ(Json("\xF0\x9F\x98"), "\"" + r + "\"");  // cut off: one maximal part
  EXPECT_EQ(Json("\xE2\x82z"), "\"" + r + "z\"");
}

TEST(Json, Numbers) {
  EXPECT_EQ(Number(12.5), "12.5");
  EXPECT_EQ(Number(0.1), "0.1");
  EXPECT_EQ(Number(-0.0), "-0");
  EXPECT_EQ(Number(1e300), "1e+300");
  EXPECT_EQ(Number(std::numeric_limits<double>::quiet_NaN()), "null");
  EXPECT_EQ(Number(-std::numeric_limits<double>::infinity()), "null");
}

TEST(Logger, JsonRecord) {
  std::vector<std::string> records;
  Logger logger(Into(&records, LogFormat::kJson));
  const std::string id = "r\"1";
  logger.Log(LogLevel::kWarning, "request failed",
             {{"request_id", id},
              {"code", 3},
              {"bytes", std::numeric_limits<uint64_t>::max()},
              {"low", std::numeric_limits<int64_t>::min()},
              {"duration_us", 12.5},
              {"retry", true},
              {"text", "char pointer"},
              {"view", absl::string_view("view")}});
  EXPECT_THAT(records,
              ElementsAre("{\"ts\":\"2026-11-21T09:40:00.000042Z\",\"level\":\"warning\","
                          "\"msg\":\"request failed\",\"request_id\":\"r\\\"1\",\"code\":3,"
                          "\"bytes\":18446744073709551615,\"low\":-9223372036854775808,"
                          "\"duration_us\":12.5,\"retry\":true,\"text\":\"char pointer\","
                          "\"view\":\"view\"}\n"));
}

TEST(Logger, TextRecord) {
  std::vector<std::string> records;
  Logger logger(Into(&records, LogFormat::kText));
  logger.Log(LogLevel::kInfo, "two\nlines \"quoted\"",
             {{"id", "r-1"}, {"empty", ""}, {"spaced", "a b"}, {"escape", "\x1b[2J"}, {"n", 3}});
  EXPECT_THAT(records,
              ElementsAre("09:40:00.000042 info two\\nlines \\\"quoted\\\" id=r-1 empty=\"\" "
                          "spaced=\"a b\" escape=\"\\u001b[2J\" n=3\n"));
}

TEST(Logger, Threshold) {
  std::vector<std::string> records;
  Logger::Options options = Into(&records, LogFormat::kText);
  options.min_level = LogLevel::kWarning;
  Logger logger(options);
  logger.Log(LogLevel::kDebug, "debug");
  logger.Log(LogLevel::kInfo, "info");
  EXPECT_THAT(records, IsEmpty());
  logger.Log(LogLevel::kWarning, "warning");
  logger.Log(LogLevel::kError, "error");
  EXPECT_THAT(records, SizeIs(2));
}

TEST(Logger, DefaultLoggerCanBeReplaced) {
  std::vector<std::string> records;
  SetDefaultLogger(Into(&records, LogFormat::kText));
  LogInfo("one", {{"n", 1}});
  LogDebug("below the threshold");
  LogError("two");
  SetDefaultLogger({});
  EXPECT_THAT(records,
              ElementsAre("09:40:00.000042 info one n=1\n", "09:40:00.000042 error two\n"));
}

// Through the real sink: standard error is a pipe that fills while its reader is slow.
TEST(Logger, ThreadsDoNotInterleave) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int standard_error = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  close(ends[1]);
  std::string output;
  std::thread reader([&] {
    char buffer[1000];
    ssize_t bytes;
    while ((bytes = read(ends[0], buffer, sizeof(buffer))) > 0) {
      output.append(buffer, static_cast<size_t>(bytes));
    }
  });

  constexpr int kThreads = 4;
  constexpr int kRecords = 100;
  Logger::Options options;
  options.format = LogFormat::kJson;
  Logger logger(options);
  const std::string long_text(6000, 'x');  // more than what a pipe takes as a whole
  std::vector<std::thread> writers;
  for (int i = 0; i < kThreads; ++i) {
    writers.emplace_back([&] {
      for (int n = 0; n < kRecords; ++n) logger.Log(LogLevel::kInfo, "m", {{"text", long_text}});
    });
  }
  for (std::thread& writer : writers) writer.join();
  dup2(standard_error, STDERR_FILENO);
  close(standard_error);
  reader.join();
  close(ends[0]);

  const std::vector<std::string> lines = absl::StrSplit(output, '\n', absl::SkipEmpty());
  EXPECT_THAT(lines, SizeIs(kThreads * kRecords));
  EXPECT_THAT(lines, Each(StartsWith("{\"ts\":\"")));
  EXPECT_THAT(lines, Each(EndsWith(absl::StrCat("\"text\":\"", long_text, "\"}"))));
}

TEST(LogLimiter, AdmitsSoManyASecondAndCountsTheRest) {
  std::chrono::steady_clock::time_point now{};
  LogLimiter limiter(2, [&] { return now; });
  EXPECT_TRUE(limiter.Admit());
  now += std::chrono::milliseconds(999);
  EXPECT_TRUE(limiter.Admit());
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(limiter.Admit());
  now += std::chrono::milliseconds(1);
  const LogLimiter::Pass pass = limiter.Admit();
  EXPECT_TRUE(pass);
  EXPECT_EQ(pass.suppressed, 5u);
  EXPECT_EQ(limiter.Admit().suppressed, 0u);
  EXPECT_FALSE(limiter.Admit());
}

TEST(LogLimiter, CountsOverThreads) {
  LogLimiter limiter(10, [] { return std::chrono::steady_clock::time_point{}; });
  std::atomic<int> admitted{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 1000; ++n) admitted += limiter.Admit() ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(admitted, 10);
}

TEST(LogNames, Parse) {
  LogLevel level = LogLevel::kInfo;
  EXPECT_TRUE(ParseLogLevel("error", &level));
  EXPECT_EQ(level, LogLevel::kError);
  EXPECT_FALSE(ParseLogLevel("loud", &level));
  LogFormat format = LogFormat::kAuto;
  EXPECT_TRUE(ParseLogFormat("json", &format));
  EXPECT_EQ(format, LogFormat::kJson);
  EXPECT_FALSE(ParseLogFormat("xml", &format));
}

}  // namespace
}  // namespace flashcore::server

#include "server/telemetry/log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace flashcore::server {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

Logger::Options Into(std::vector<std::string>* records, LogFormat format) {
  Logger::Options options;
  options.format = format;
  options.sink = [records](absl::string_view record) { records->emplace_back(record); };
  options.now = [] {
    return std::chrono::system_clock::time_point(std::chrono::microseconds(1795254000000042));
  };
  return options;
}

// How a JSON record shows `value`.
template <typename T>
std::string Json(const T& value) {
  std::vector<std::string> records;
  Logger(Into(&records, LogFormat::kJson)).Log(LogLevel::kInfo, "m", {{"v", value}});
  const std::string& record = records.at(0);
  const size_t start = record.find("\"v\":") + 4;
  return record.substr(start, record.size() - 2 - start);
}

// The text that a reader of the JSON record gets for `text`.
std::string ReadBack(absl::string_view text) { return nlohmann::json::parse(Json(text)); }

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
    EXPECT_EQ(ReadBack(text), text);
  }
}

TEST(Json, ReplacesInvalidUtf8) {
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(ReadBack("a\x80z"), "a" + r + "z");            // no lead
  EXPECT_EQ(ReadBack("\xC0\xAF"), r + r);                  // overlong
  EXPECT_EQ(ReadBack("\xE0\x80\xAF"), r + r + r);          // overlong
  EXPECT_EQ(ReadBack("\xED\xA0\x80"), r + r + r);          // surrogate
  EXPECT_EQ(ReadBack("\xF4\x90\x80\x80"), r + r + r + r);  // above U+10FFFF
  EXPECT_EQ(ReadBack("\xFF"), r);
  EXPECT_EQ(ReadBack("\xF0\x9F\x98"), r);  // cut off: one maximal part
  EXPECT_EQ(ReadBack("\xE2\x82z"), r + "z");
}

TEST(Json, Numbers) {
  EXPECT_EQ(Json(12.5), "12.5");
  EXPECT_EQ(Json(0.1), "0.1");
  EXPECT_EQ(Json(-0.0), "-0.0");
  EXPECT_EQ(Json(1e300), "1e+300");
  EXPECT_EQ(Json(std::numeric_limits<double>::quiet_NaN()), "null");
  EXPECT_EQ(Json(-std::numeric_limits<double>::infinity()), "null");
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

// Standard error as a pipe, until this is destroyed.
class StandardErrorPipe {
 public:
  StandardErrorPipe() {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    read_end_ = ends[0];
  }
  ~StandardErrorPipe() {
    Restore();
    CloseReadEnd();
  }

  void CloseReadEnd() {
    if (read_end_ >= 0) close(read_end_);
    read_end_ = -1;
  }
  void Restore() { dup2(standard_error_, STDERR_FILENO); }

  // Writes until the pipe takes no more. Returns how many bytes it took.
  size_t Fill() {
    const int flags = fcntl(STDERR_FILENO, F_GETFL);
    fcntl(STDERR_FILENO, F_SETFL, flags | O_NONBLOCK);
    size_t bytes = 0;
    while (write(STDERR_FILENO, "x", 1) == 1) ++bytes;
    fcntl(STDERR_FILENO, F_SETFL, flags);
    return bytes;
  }

  // Reads until `bytes` have come or, after Restore, until the end.
  std::string Read(size_t bytes = std::numeric_limits<size_t>::max()) {
    std::string output;
    char buffer[1000];
    ssize_t got = 1;
    while (output.size() < bytes && got > 0) {
      got = read(read_end_, buffer, std::min(sizeof(buffer), bytes - output.size()));
      if (got > 0) output.append(buffer, static_cast<size_t>(got));
    }
    return output;
  }

 private:
  const int standard_error_ = dup(STDERR_FILENO);
  int read_end_ = -1;
};

Logger::Options ToStandardError(size_t queue_bytes) {
  Logger::Options options;
  options.format = LogFormat::kJson;
  options.queue_bytes = queue_bytes;
  return options;
}

// The pipe fills while its reader is slow.
TEST(Logger, ThreadsDoNotInterleave) {
  StandardErrorPipe standard_error;
  std::string output;
  std::thread reader([&] { output = standard_error.Read(); });

  constexpr int kThreads = 4;
  constexpr int kRecords = 100;
  Logger logger(ToStandardError(8 << 20));
  const std::string long_text(6000, 'x');  // more than what a pipe takes as a whole
  std::vector<std::thread> writers;
  for (int i = 0; i < kThreads; ++i) {
    writers.emplace_back([&] {
      for (int n = 0; n < kRecords; ++n) logger.Log(LogLevel::kInfo, "m", {{"text", long_text}});
    });
  }
  for (std::thread& writer : writers) writer.join();
  logger.Flush(std::chrono::seconds(60));
  standard_error.Restore();
  reader.join();

  const std::vector<std::string> lines = absl::StrSplit(output, '\n', absl::SkipEmpty());
  EXPECT_THAT(lines, SizeIs(kThreads * kRecords));
  EXPECT_THAT(lines, Each(StartsWith("{\"ts\":\"")));
  EXPECT_THAT(lines, Each(EndsWith(absl::StrCat("\"text\":\"", long_text, "\"}"))));
  EXPECT_EQ(logger.dropped(), 0u);
}

TEST(Logger, DropsAndCountsWhileTheReaderStalls) {
  constexpr uint64_t kRecords = 1000;
  StandardErrorPipe standard_error;
  const size_t filled = standard_error.Fill();
  Logger logger(ToStandardError(64 << 10));
  const std::string text(1000, 'x');
  std::future<void> logged = std::async(std::launch::async, [&] {
    for (uint64_t n = 0; n < kRecords; ++n) logger.Log(LogLevel::kInfo, "m", {{"text", text}});
  });
  EXPECT_EQ(logged.wait_for(std::chrono::minutes(1)), std::future_status::ready);
  const uint64_t dropped = logger.dropped();
  EXPECT_GT(dropped, kRecords / 2);
  EXPECT_LT(dropped, kRecords);

  EXPECT_THAT(standard_error.Read(filled), SizeIs(filled));  // the reader goes on
  std::future<std::string> output =
      std::async(std::launch::async, [&] { return standard_error.Read(); });
  logged.wait();
  logger.Flush(std::chrono::seconds(60));
  logger.Log(LogLevel::kInfo, "after");
  logger.Flush(std::chrono::seconds(60));
  standard_error.Restore();
  uint64_t written = 0;
  uint64_t reported = 0;
  std::string last;
  for (absl::string_view line : absl::StrSplit(output.get(), '\n', absl::SkipEmpty())) {
    const auto record = nlohmann::json::parse(line);
    last = record["msg"];
    if (last == "m") ++written;
    if (last != "log records dropped") continue;
    EXPECT_EQ(record["level"], "warning");
    reported += record["dropped"].get<uint64_t>();
  }
  EXPECT_EQ(written, kRecords - dropped);
  EXPECT_EQ(reported, dropped);
  EXPECT_EQ(last, "after");
  EXPECT_EQ(logger.dropped(), dropped);
}

TEST(Logger, EndsWhileTheReaderStalls) {
  StandardErrorPipe standard_error;
  standard_error.Fill();
  std::future<void> ended = std::async(std::launch::async, [] {
    Logger logger(ToStandardError(1 << 20));
    logger.Log(LogLevel::kInfo, "m");
    logger.Flush(std::chrono::milliseconds(1));
  });
  EXPECT_EQ(ended.wait_for(std::chrono::minutes(1)), std::future_status::ready);
  standard_error.CloseReadEnd();  // which ends it in any case
}

TEST(Logger, OutlivesAClosedPipe) {
  StandardErrorPipe standard_error;
  standard_error.CloseReadEnd();
  Logger logger(ToStandardError(1 << 20));
  for (uint64_t n = 1; n <= 3; ++n) {
    logger.Log(LogLevel::kInfo, "m");
    logger.Flush(std::chrono::seconds(60));
    EXPECT_EQ(logger.dropped(), n);
  }
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

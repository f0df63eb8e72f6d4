// Structured logs: one record a line, JSON for machines or text for a terminal.
//
//   LogInfo("request failed", {{"request_id", id}, {"code", code}, {"duration_us", 12.5}});
#ifndef FLASHCORE_SERVER_TELEMETRY_LOG_H_
#define FLASHCORE_SERVER_TELEMETRY_LOG_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <variant>

#include "absl/strings/string_view.h"
#include "server/base/mutex.h"
#include "server/telemetry/log_writer.h"

namespace flashcore::server {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat {
  kAuto,  // text if standard error is a terminal, else JSON
  kJson,
  kText
};

// A key and a typed value. Views of the caller's data: use only as an argument of a Log function.
// "ts", "level" and "msg" are reserved keys.
class LogField {
 public:
  using Value = std::variant<absl::string_view, int64_t, uint64_t, double, bool>;

  template <typename T>
  LogField(absl::string_view key, const T& value) : key_(key), value_(Convert(value)) {}

  absl::string_view key() const { return key_; }
  const Value& value() const { return value_; }

 private:
  template <typename T>
  static Value Convert(const T& value) {
    if constexpr (std::is_unsigned_v<T> && !std::is_same_v<T, bool>) {
      return static_cast<uint64_t>(value);
    } else {
      return value;
    }
  }

  absl::string_view key_;
  Value value_;
};

using LogFields = std::initializer_list<LogField>;

// Thread-safe. Records do not interleave.
class Logger {
 public:
  struct Options {
    LogFormat format = LogFormat::kAuto;
    LogLevel min_level = LogLevel::kInfo;
    size_t queue_bytes = 1 << 20;  // records waiting for standard error; more are dropped
    // For tests: receives each record with its newline, one call at a time, instead of standard
    // error.
    std::function<void(absl::string_view)> sink;
    // Unset: the system clock.
    std::function<std::chrono::system_clock::time_point()> now;
  };

  explicit Logger(Options options);
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  bool Enabled(LogLevel level) const { return level >= options_.min_level; }
  // Does not wait for the reader of standard error. Strings come out in ASCII: other characters and
  // control characters are escaped, so that no client can send commands to a terminal, and invalid
  // UTF-8 becomes U+FFFD. Infinity and NaN come out as null.
  void Log(LogLevel level, absl::string_view message, LogFields fields = {});
  // Waits until the records so far have reached standard error, at most `timeout`.
  void Flush(std::chrono::milliseconds timeout) { writer_.Flush(timeout); }
  // Records that standard error did not take.
  uint64_t dropped() const { return writer_.dropped(); }

 private:
  std::string Record(LogLevel level, absl::string_view message, LogFields fields) const;

  Options options_;
  Mutex sink_mutex_;
  LogWriter writer_;
};

// The process's logger, which the functions below write to. Until SetDefaultLogger it has default
// options. Replaced loggers are never destroyed, because other threads may still use them.
Logger& DefaultLogger();
void SetDefaultLogger(Logger::Options options);

inline void LogDebug(absl::string_view message, LogFields fields = {}) {
  DefaultLogger().Log(LogLevel::kDebug, message, fields);
}
inline void LogInfo(absl::string_view message, LogFields fields = {}) {
  DefaultLogger().Log(LogLevel::kInfo, message, fields);
}
inline void LogWarning(absl::string_view message, LogFields fields = {}) {
  DefaultLogger().Log(LogLevel::kWarning, message, fields);
}
inline void LogError(absl::string_view message, LogFields fields = {}) {
  DefaultLogger().Log(LogLevel::kError, message, fields);
}

// Admits at most `per_second` records in any second, so that a flood of bad requests does not flood
// the log. Use one per call site:
//
//   static LogLimiter limiter(10);
//   if (const auto pass = limiter.Admit()) {
//     LogWarning("request rejected", {{"code", code}, {"suppressed", pass.suppressed}});
//   }
//
// Thread-safe.
class LogLimiter {
 public:
  using Now = std::function<std::chrono::steady_clock::time_point()>;

  struct Pass {
    bool admitted = false;
    uint64_t suppressed = 0;  // records refused since the last admitted one
    explicit operator bool() const { return admitted; }
  };

  explicit LogLimiter(int per_second, Now now = std::chrono::steady_clock::now);
  Pass Admit();

 private:
  const int per_second_;
  const Now now_;
  Mutex mutex_;
  std::chrono::steady_clock::time_point window_start_ ABSL_GUARDED_BY(mutex_);
  int admitted_in_window_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t suppressed_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Parses "debug", "info", "warning", "error" and "auto", "json", "text". False for any other text.
bool ParseLogLevel(absl::string_view text, LogLevel* level);
bool ParseLogFormat(absl::string_view text, LogFormat* format);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_LOG_H_

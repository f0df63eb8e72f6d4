// Structured logs: one record a line, JSON for machines or text for a terminal.
//
//   LogInfo("request failed", {{"request_id", id}, {"code", code}, {"duration_us", 12.5}});
#ifndef FLASHCORE_SERVER_TELEMETRY_LOG_H_
#define FLASHCORE_SERVER_TELEMETRY_LOG_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <string>
#include <type_traits>

#include "absl/strings/string_view.h"
#include "absl/types/variant.h"

namespace flashcore::server {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat {
  kAuto,  // text if standard error is a terminal, else JSON
  kJson,
  kText
};

// A key and a typed value, both only looked at: they live in the caller's expression. Keys should
// be none of "ts", "level", "msg".
class LogField {
 public:
  using Value = absl::variant<absl::string_view, int64_t, uint64_t, double, bool>;

  template <typename T>
  LogField(absl::string_view key, const T& value) : key_(key), value_(Convert(value)) {}

  absl::string_view key() const { return key_; }
  const Value& value() const { return value_; }

 private:
  template <typename T>
  static Value Convert(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      return Value(value);
    } else if constexpr (std::is_floating_point_v<T>) {
      return Value(static_cast<double>(value));
    } else if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
      return Value(static_cast<int64_t>(value));
    } else if constexpr (std::is_integral_v<T>) {
      return Value(static_cast<uint64_t>(value));
    } else {
      return Value(absl::string_view(value));
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
    // Takes one record, its newline included; calls do not overlap. Unset: one write(2) to standard
    // error.
    std::function<void(absl::string_view)> sink;
    // Unset: the system's clock.
    std::function<std::chrono::system_clock::time_point()> now;
  };

  explicit Logger(Options options);
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  bool Enabled(LogLevel level) const { return level >= options_.min_level; }
  // Invalid UTF-8 in strings comes out as U+FFFD; numbers that JSON lacks as null.
  void Log(LogLevel level, absl::string_view message, LogFields fields = {});

 private:
  Options options_;
  std::mutex mutex_;  // held while a record is written
};

// The process's logger, which the functions below write to. Until SetDefaultLogger it is one with
// default options. The old one lives on, for threads that may still write to it.
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

// Lets at most `per_second` records through in any one second of the clock, so that a flood of bad
// requests is no flood of records. One per call site:
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
    uint64_t suppressed = 0;  // records refused since the last one admitted
    explicit operator bool() const { return admitted; }
  };

  explicit LogLimiter(int per_second, Now now = std::chrono::steady_clock::now);
  Pass Admit();

 private:
  const int per_second_;
  const Now now_;
  std::mutex mutex_;  // guards what follows
  std::chrono::steady_clock::time_point window_start_;
  int admitted_in_window_ = 0;
  uint64_t suppressed_ = 0;
};

// "debug", "info", "warning", "error" and "auto", "json", "text"; false if `text` is none of them.
bool ParseLogLevel(absl::string_view text, LogLevel* level);
bool ParseLogFormat(absl::string_view text, LogFormat* format);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_LOG_H_

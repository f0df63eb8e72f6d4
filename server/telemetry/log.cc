#include "server/telemetry/log.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <deque>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/telemetry/json.h"

namespace flashcore::server {
namespace {

constexpr absl::string_view kLevelNames[] = {"debug", "info", "warning", "error"};

absl::string_view LevelName(LogLevel level) { return kLevelNames[static_cast<int>(level)]; }

void WriteToStandardError(absl::string_view record) {
  // One write does it, unless a pipe is full.
  while (!record.empty()) {
    const ssize_t written = write(STDERR_FILENO, record.data(), record.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // nobody to tell
    record.remove_prefix(static_cast<size_t>(written));
  }
}

// As a JSON value.
void AppendJson(const LogField::Value& value, std::string* out) {
  if (const auto* text = absl::get_if<absl::string_view>(&value)) {
    AppendJsonString(*text, out);
  } else if (const auto* signed_number = absl::get_if<int64_t>(&value)) {
    absl::StrAppend(out, *signed_number);
  } else if (const auto* unsigned_number = absl::get_if<uint64_t>(&value)) {
    absl::StrAppend(out, *unsigned_number);
  } else if (const auto* number = absl::get_if<double>(&value)) {
    AppendJsonNumber(*number, out);
  } else {
    out->append(absl::get<bool>(value) ? "true" : "false");
  }
}

bool IsPlainWord(absl::string_view text) {
  for (const char c : text) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c)) || c == '"' || c == '\\' || c == '=') {
      return false;
    }
  }
  return !text.empty();
}

// As JSON, but a string that is one plain word goes without its quotes.
void AppendText(const LogField::Value& value, std::string* out) {
  const auto* text = absl::get_if<absl::string_view>(&value);
  if (text != nullptr && IsPlainWord(*text)) {
    absl::StrAppend(out, *text);
  } else {
    AppendJson(value, out);
  }
}

std::string FormatTime(const char* format, std::chrono::system_clock::time_point time) {
  return absl::FormatTime(format, absl::FromChrono(time), absl::UTCTimeZone());
}

std::string JsonRecord(absl::string_view timestamp, LogLevel level, absl::string_view message,
                       LogFields fields) {
  std::string record =
      absl::StrCat("{\"ts\":\"", timestamp, "\",\"level\":\"", LevelName(level), "\",\"msg\":");
  AppendJsonString(message, &record);
  for (const LogField& field : fields) {
    record.push_back(',');
    AppendJsonString(field.key(), &record);
    record.push_back(':');
    AppendJson(field.value(), &record);
  }
  record.append("}\n");
  return record;
}

std::string TextRecord(absl::string_view timestamp, LogLevel level, absl::string_view message,
                       LogFields fields) {
  std::string record = absl::StrCat(timestamp, " ", LevelName(level), " ");
  std::string escaped;  // of the message, which is text but must not break the line
  AppendJsonString(message, &escaped);
  record.append(escaped, 1, escaped.size() - 2);
  for (const LogField& field : fields) {
    absl::StrAppend(&record, " ", field.key(), "=");
    AppendText(field.value(), &record);
  }
  record.push_back('\n');
  return record;
}

// All that were ever the default one: threads may still hold an old one.
struct DefaultLoggers {
  DefaultLoggers() : current(&all.emplace_back(Logger::Options())) {}

  std::mutex mutex;  // guards all
  std::deque<Logger> all;
  std::atomic<Logger*> current;
};

DefaultLoggers& Defaults() {
  static auto* defaults = new DefaultLoggers;  // never destroyed: logging works until the very end
  return *defaults;
}

}  // namespace

Logger::Logger(Options options) : options_(std::move(options)) {
  if (options_.format == LogFormat::kAuto) {
    options_.format = isatty(STDERR_FILENO) ? LogFormat::kText : LogFormat::kJson;
  }
  if (!options_.sink) options_.sink = WriteToStandardError;
  if (!options_.now) options_.now = std::chrono::system_clock::now;
}

void Logger::Log(LogLevel level, absl::string_view message, LogFields fields) {
  if (!Enabled(level)) return;
  const auto now = options_.now();
  const std::string record =
      options_.format == LogFormat::kJson
          ? JsonRecord(FormatTime("%Y-%m-%d%ET%H:%M:%E6SZ", now), level, message, fields)
          : TextRecord(FormatTime("%H:%M:%E6S", now), level, message, fields);
  std::lock_guard<std::mutex> lock(mutex_);
  options_.sink(record);
}

Logger& DefaultLogger() { return *Defaults().current.load(std::memory_order_acquire); }

void SetDefaultLogger(Logger::Options options) {
  DefaultLoggers& defaults = Defaults();
  std::lock_guard<std::mutex> lock(defaults.mutex);
  defaults.current.store(&defaults.all.emplace_back(std::move(options)), std::memory_order_release);
}

LogLimiter::LogLimiter(int per_second, Now now)
    : per_second_(per_second), now_(std::move(now)), window_start_(now_()) {}

LogLimiter::Pass LogLimiter::Admit() {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto time = now_();
  if (time - window_start_ >= std::chrono::seconds(1)) {
    window_start_ = time;
    admitted_in_window_ = 0;
  }
  if (admitted_in_window_ >= per_second_) {
    ++suppressed_;
    return {};
  }
  ++admitted_in_window_;
  return {true, std::exchange(suppressed_, 0)};
}

bool ParseLogLevel(absl::string_view text, LogLevel* level) {
  for (const LogLevel candidate :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    if (text == LevelName(candidate)) {
      *level = candidate;
      return true;
    }
  }
  return false;
}

bool ParseLogFormat(absl::string_view text, LogFormat* format) {
  if (text == "auto") {
    *format = LogFormat::kAuto;
  } else if (text == "json") {
    *format = LogFormat::kJson;
  } else if (text == "text") {
    *format = LogFormat::kText;
  } else {
    return false;
  }
  return true;
}

}  // namespace flashcore::server

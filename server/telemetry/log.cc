#include "server/telemetry/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace flashcore::server {
namespace {

using Json = nlohmann::ordered_json;

constexpr absl::string_view kLevelNames[] = {"debug", "info", "warning", "error"};
constexpr absl::string_view kFormatNames[] = {"auto", "json", "text"};

absl::string_view LevelName(LogLevel level) { return kLevelNames[static_cast<int>(level)]; }

Json ToJson(absl::string_view text) { return std::string(text); }
Json ToJson(const LogField::Value& value) {
  if (const auto* text = std::get_if<absl::string_view>(&value)) return ToJson(*text);
  return std::visit([](const auto& number) { return Json(number); }, value);
}

std::string Dump(const Json& value) {
  return value.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
}

// JSON, but without the quotes around a plain word.
std::string TextValue(const LogField::Value& value) {
  const std::string json = Dump(ToJson(value));
  const auto* text = std::get_if<absl::string_view>(&value);
  if (text == nullptr || text->empty() || absl::StrContains(*text, ' ') ||
      absl::StrContains(*text, '=') || json.size() != text->size() + 2) {
    return json;
  }
  return std::string(*text);
}

std::string FormatTime(const char* format, std::chrono::system_clock::time_point time) {
  return absl::FormatTime(format, absl::FromChrono(time), absl::UTCTimeZone());
}

std::string JsonRecord(std::string timestamp, LogLevel level, absl::string_view message,
                       LogFields fields) {
  Json record;
  record["ts"] = std::move(timestamp);
  record["level"] = ToJson(LevelName(level));
  record["msg"] = ToJson(message);
  for (const LogField& field : fields) record[std::string(field.key())] = ToJson(field.value());
  return Dump(record) + "\n";
}

std::string TextRecord(absl::string_view timestamp, LogLevel level, absl::string_view message,
                       LogFields fields) {
  const std::string quoted = Dump(ToJson(message));
  std::string record = absl::StrCat(timestamp, " ", LevelName(level), " ",
                                    absl::string_view(quoted).substr(1, quoted.size() - 2));
  for (const LogField& field : fields) {
    absl::StrAppend(&record, " ", field.key(), "=", TextValue(field.value()));
  }
  return record + "\n";
}

// `names` are those of the enumerators, in their order.
template <typename Enum, size_t n>
bool ParseName(const absl::string_view (&names)[n], absl::string_view text, Enum* value) {
  const auto* found = std::find(names, names + n, text);
  if (found != names + n) *value = static_cast<Enum>(found - names);
  return found != names + n;
}

// All default loggers so far. Never destroyed, so that logging works until the process ends.
struct DefaultLoggers {
  DefaultLoggers() : current(&all.emplace_back(Logger::Options())) {}

  Mutex mutex;
  std::deque<Logger> all ABSL_GUARDED_BY(mutex);
  std::atomic<Logger*> current;
};

DefaultLoggers& Defaults() {
  static auto* defaults = new DefaultLoggers;
  return *defaults;
}

}  // namespace

Logger::Logger(Options options)
    : options_(std::move(options)),
      writer_(STDERR_FILENO, options_.queue_bytes, [this](uint64_t dropped) {
        return Record(LogLevel::kWarning, "log records dropped", {{"dropped", dropped}});
      }) {
  if (options_.format == LogFormat::kAuto) {
    options_.format = isatty(STDERR_FILENO) ? LogFormat::kText : LogFormat::kJson;
  }
  if (!options_.now) options_.now = std::chrono::system_clock::now;
}

std::string Logger::Record(LogLevel level, absl::string_view message, LogFields fields) const {
  const auto now = options_.now();
  return options_.format == LogFormat::kJson
             ? JsonRecord(FormatTime("%Y-%m-%d%ET%H:%M:%E6SZ", now), level, message, fields)
             : TextRecord(FormatTime("%H:%M:%E6S", now), level, message, fields);
}

void Logger::Log(LogLevel level, absl::string_view message, LogFields fields) {
  if (!Enabled(level)) return;
  const std::string record = Record(level, message, fields);
  if (!options_.sink) return writer_.Write(record);
  MutexLock lock(&sink_mutex_);
  options_.sink(record);
}

Logger& DefaultLogger() { return *Defaults().current.load(std::memory_order_acquire); }

void SetDefaultLogger(Logger::Options options) {
  DefaultLoggers& defaults = Defaults();
  MutexLock lock(&defaults.mutex);
  defaults.current.store(&defaults.all.emplace_back(std::move(options)), std::memory_order_release);
}

LogLimiter::LogLimiter(int per_second, Now now)
    : per_second_(per_second), now_(std::move(now)), window_start_(now_()) {}

LogLimiter::Pass LogLimiter::Admit() {
  MutexLock lock(&mutex_);
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
  return ParseName(kLevelNames, text, level);
}

bool ParseLogFormat(absl::string_view text, LogFormat* format) {
  return ParseName(kFormatNames, text, format);
}

}  // namespace flashcore::server

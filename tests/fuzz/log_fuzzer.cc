// Writes log records of any strings and numbers, as clients choose them in request ids and names. A
// record is one line of printable ASCII; in JSON it reads back as what was logged.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/telemetry/log.h"
#include "tests/fuzz/require.h"

namespace flashcore::fuzz {
namespace {

using server::LogFormat;
using server::Logger;
using server::LogLevel;

struct Values {
  std::string message, text;
  int64_t integer;
  uint64_t number;
  double real;
  bool flag;
};

std::string& LastRecord() {
  static std::string record;
  return record;
}

Logger& LoggerOf(LogFormat format) {
  const auto make = [](LogFormat of) {
    Logger::Options options;
    options.format = of;
    options.sink = [](absl::string_view record) { LastRecord() = std::string(record); };
    options.now = [] { return std::chrono::system_clock::time_point(); };
    return new Logger(options);  // lives until the process ends
  };
  static Logger* const kJson = make(LogFormat::kJson);
  static Logger* const kText = make(LogFormat::kText);
  return format == LogFormat::kJson ? *kJson : *kText;
}

// The record of `values`, without the newline at its end.
std::string Write(LogFormat format, const Values& values) {
  LastRecord().clear();
  LoggerOf(format).Log(LogLevel::kWarning, values.message,
                       {{"text", absl::string_view(values.text)},
                        {"integer", values.integer},
                        {"number", values.number},
                        {"real", values.real},
                        {"flag", values.flag}});
  std::string record = LastRecord();
  Require(!record.empty() && record.back() == '\n', "a record that is no line");
  record.pop_back();
  const bool printable =
      std::all_of(record.begin(), record.end(), [](char c) { return ' ' <= c && c <= '~'; });
  Require(printable, "a record with other than printable ASCII");
  return record;
}

// Whether a reader gets `text` as `read`: the same, or with U+FFFD for bytes that are not UTF-8.
bool SameText(const std::string& text, const std::string& read) {
  return read == text || absl::StrContains(read, "\xEF\xBF\xBD");
}

void CheckJson(const Values& values) {
  const std::string record = Write(LogFormat::kJson, values);
  const auto json = nlohmann::json::parse(record, nullptr, /*allow_exceptions=*/false);
  Require(json.is_object() && json.size() == 8, "a record that is not a JSON object of 8 members");
  Require(json["ts"] == "1970-01-01T00:00:00.000000Z" && json["level"] == "warning", "ts, level");
  Require(SameText(values.message, json["msg"].get<std::string>()), "msg");
  Require(SameText(values.text, json["text"].get<std::string>()), "text");
  Require(json["integer"] == values.integer && json["number"] == values.number, "a number");
  Require(std::isfinite(values.real) ? json["real"] == values.real : json["real"].is_null(),
          "real");
  Require(json["flag"] == values.flag, "flag");
}

void CheckText(const Values& values) {
  const std::string record = Write(LogFormat::kText, values);
  Require(absl::StartsWith(record, "00:00:00.000000 warning "), "the start of a text record");
  Require(absl::EndsWith(record, absl::StrCat(" flag=", values.flag ? "true" : "false")),
          "the end of a text record");
}

}  // namespace
}  // namespace flashcore::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  flashcore::fuzz::Values values;
  values.flag = input.ConsumeBool();
  values.integer = input.ConsumeIntegral<int64_t>();
  values.number = input.ConsumeIntegral<uint64_t>();
  values.real = input.ConsumeFloatingPoint<double>();
  values.message = input.ConsumeRandomLengthString();
  values.text = input.ConsumeRemainingBytesAsString();
  flashcore::fuzz::CheckJson(values);
  flashcore::fuzz::CheckText(values);
  return 0;
}

#include "client/bench/bench_report.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"

namespace flashcore::cli {
namespace {

using Json = nlohmann::ordered_json;

double P50(const Json& percentiles) { return percentiles.at("p50"); }

// Percentiles of what `value` makes of each sample.
template <typename Value>
Json PercentilesOf(const Series& series, Value value) {
  std::vector<float> values;
  for (const Sample& sample : series.samples) values.push_back(value(sample));
  return Percentiles(std::move(values));
}

void AddKind(const Series& series, Json* json) {
  const auto count = static_cast<double>(series.samples.size());
  const double per_second = static_cast<double>(series.ended) / series.turn_seconds;
  (*json)["latency_us"] =
      PercentilesOf(series, [](const Sample& sample) { return sample.latency_us; });
  (*json)["outside_kernel_us"] = PercentilesOf(
      series, [](const Sample& s) { return s.latency_us - s.phase_us[kKernelPhase]; });
  for (size_t i = 0; i < kPhases.size(); ++i) {
    (*json)["server_phase_us"][kPhases[i]] =
        PercentilesOf(series, [i](const Sample& sample) { return sample.phase_us[i]; });
  }
  (*json)["turn_seconds"] = series.turn_seconds;
  (*json)["requests_per_second"] = per_second;
  (*json)["query_rows_per_second"] = per_second * static_cast<double>(series.query_rows) / count;
  (*json)["tflops"] = per_second * series.flop / count * 1e-12;
  (*json)["request_bytes"] = static_cast<double>(series.request_bytes) / count;
  (*json)["response_bytes"] = static_cast<double>(series.response_bytes) / count;
  (*json)["ok"] = series.samples.size();
}

Json LoadJson(const LoadOptions& options, const std::string& shape, const LoadResult& result) {
  Json json = {{"server", result.server},
               {"target", absl::StrJoin(options.targets, ",")},
               {"transport", AbslUnparseFlag(TransportOf(options.targets.front()))},
               {"mode", AbslUnparseFlag(options.mode)},
               {"shape", shape},
               {"dtype", AbslUnparseFlag(options.shape.dtype)},
               {"layout", AbslUnparseFlag(options.shape.layout)}};
  if (options.mode == BenchMode::kAttend) {
    json["query_rows"] = options.shape.spans[0].query_rows;
    json["mask"] = AbslUnparseFlag(options.shape.mask);
  } else {
    json["sequences"] = options.resident.sequences;
    json["context"] = options.resident.context;
    json["fork_from_prefix"] = options.resident.fork_from_prefix;
    json["kv_dtype"] = AbslUnparseFlag(options.resident.kv_dtype);
    json["precision"] = AbslUnparseFlag(options.shape.precision);
    json["pin"] = options.resident.pin;
  }
  json["concurrency"] = options.concurrency;
  json["connections"] = options.connections;
  json["stream"] = options.stream;
  json["rate"] = options.rate;
  json["duration_seconds"] = absl::ToDoubleSeconds(options.duration);
  json["window_seconds"] = result.window_seconds;
  json["interrupted"] = result.interrupted;
  return json;
}

std::string Row(const std::string& name, const Json& percentiles) {
  std::string out = absl::StrFormat("%-22s", name);
  for (const double value : percentiles) {
    out += std::isnan(value) ? absl::StrFormat(" %10s", "-") : absl::StrFormat(" %10.1f", value);
  }
  return out + "\n";
}

std::string KindRows(const std::string& name, const Json& kind) {
  std::string out = Row(name, kind.at("latency_us"));
  out += Row("  outside the kernel", kind.at("outside_kernel_us"));
  for (const auto& [phase, percentiles] : kind.at("server_phase_us").items()) {
    out += Row("  server: " + phase, percentiles);
  }
  return out;
}

std::string KindSummary(const std::string& name, const Json& kind) {
  const auto number = [&kind](const char* key) { return kind.at(key).get<double>(); };
  return absl::StrFormat(
      "%-10s %.1f req/s, %.1f query rows/s, %.4f TFLOP/s; %.0f bytes sent, %.0f received per "
      "request\n",
      name, number("requests_per_second"), number("query_rows_per_second"), number("tflops"),
      number("request_bytes"), number("response_bytes"));
}

// The run's settings: every scalar of the report up to the first kind's numbers.
std::string Header(const Json& report) {
  std::string out;
  for (const auto& [key, value] : report.items()) {
    if (value.is_structured()) break;
    const char* separator = out.empty() ? "" : key == "concurrency" ? "\n" : ", ";
    absl::StrAppend(&out, separator, key, " ",
                    value.is_string() ? value.get<std::string>() : value.dump());
  }
  return out + "\n\n";
}

}  // namespace

double NearestRank(const std::vector<float>& sorted, double share) {
  if (sorted.empty()) return std::numeric_limits<double>::quiet_NaN();
  const double rank = std::ceil(share * static_cast<double>(sorted.size()) - 1e-9);
  const size_t index = static_cast<size_t>(std::max(rank, 1.0)) - 1;
  return sorted[std::min(index, sorted.size() - 1)];
}

Json Percentiles(std::vector<float> samples) {
  std::sort(samples.begin(), samples.end());
  const double sum = std::accumulate(samples.begin(), samples.end(), 0.0);
  Json out = {
      {"p50", NearestRank(samples, 0.5)},  {"p90", NearestRank(samples, 0.9)},
      {"p99", NearestRank(samples, 0.99)}, {"p999", NearestRank(samples, 0.999)},
      {"max", NearestRank(samples, 1)},    {"mean", sum / static_cast<double>(samples.size())}};
  for (Json& value : out) value = std::round(value.get<double>() * 1e3) / 1e3;
  return out;
}

Json BenchJson(const LoadOptions& options, const std::string& shape, const LoadResult& result) {
  Json json = LoadJson(options, shape, result);
  const std::string first =
      options.mode == BenchMode::kMixed ? "decode" : AbslUnparseFlag(options.mode);
  AddKind(result.series.at(first), &json);
  for (const auto& [kind, series] : result.series) {
    if (kind != first) AddKind(series, &json[kind]);
  }
  json["failed"] = result.Failed();
  json["wrong_replies"] = result.wrong_replies;
  json["not_sent"] = result.not_sent;
  json["errors"] = result.errors;
  const double p50 = P50(json.at("latency_us"));
  if (json.contains("unary")) {
    json["stream_to_unary_p50_ratio"] = p50 / P50(json["unary"]["latency_us"]);
  }
  if (json.contains("grpc")) {
    const Json& grpc = json["grpc"];
    json["latency_to_grpc_p50_ratio"] = p50 / P50(grpc["latency_us"]);
    json["outside_kernel_to_grpc_p50_ratio"] =
        P50(json["outside_kernel_us"]) / P50(grpc["outside_kernel_us"]);
  }
  if (json.contains("inline")) {
    const double sent = json["inline"]["request_bytes"];
    json["inline_to_decode_p50_ratio"] = P50(json["inline"]["latency_us"]) / p50;
    json["inline_to_decode_request_bytes_ratio"] = sent / json["request_bytes"].get<double>();
  }
  return json;
}

std::string BenchTable(const Json& report) {
  const std::string mode = report.at("mode");
  std::vector<std::pair<std::string, const Json*>> kinds = {
      {mode == "mixed" ? "decode" : mode, &report}};
  for (const char* other : {"prefill", "inline", "unary", "grpc"}) {
    if (report.contains(other)) kinds.emplace_back(other, &report.at(other));
  }
  std::string out = Header(report);
  absl::StrAppendFormat(&out, "%-22s %10s %10s %10s %10s %10s %10s\n", "microseconds", "p50", "p90",
                        "p99", "p99.9", "max", "mean");
  for (const auto& [name, kind] : kinds) out += KindRows(name, *kind);
  out += "\n";
  uint64_t ok = 0;
  for (const auto& [name, kind] : kinds) {
    out += KindSummary(name, *kind);
    ok += kind->at("ok").get<uint64_t>();
  }
  absl::StrAppend(&out, "requests   ", ok, " ok, ", report.at("failed").dump(), " failed ",
                  report.at("errors").dump(), ", ", report.at("wrong_replies").dump(),
                  " wrong replies, ", report.at("not_sent").dump(), " due but not sent\n");
  for (const auto& [key, value] : report.items()) {
    if (!absl::EndsWith(key, "_ratio")) continue;
    absl::StrAppendFormat(&out, "%s = %.2f\n", key, value.get<double>());
  }
  return out;
}

}  // namespace flashcore::cli

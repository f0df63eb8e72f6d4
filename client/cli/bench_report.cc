#include "client/cli/bench_report.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace flashcore::cli {
namespace {

std::string Row(absl::string_view name, const Percentiles& p) {
  std::string out = absl::StrFormat("%-22s", name);
  for (const double value : {p.p50, p.p90, p.p99, p.p999, p.max, p.mean}) {
    if (std::isnan(value)) {  // no samples
      absl::StrAppendFormat(&out, " %10s", "-");
    } else {
      absl::StrAppendFormat(&out, " %10.1f", value);
    }
  }
  return out + "\n";
}

JsonObject PercentilesJson(const Percentiles& p) {
  JsonObject json;
  json.Add("p50", p.p50).Add("p90", p.p90).Add("p99", p.p99).Add("p999", p.p999);
  return json.Add("max", p.max).Add("mean", p.mean);
}

}  // namespace

BenchReport::BenchReport(const LoadOptions& options, std::string shape, LoadResult* result)
    : options_(options),
      result_(*result),
      shape_(std::move(shape)),
      echo_(ComputePercentiles(&result->echo_us)) {
  for (const char* name : {"attend", "decode", "prefill", "inline", "unary"}) {
    const auto it = result->series.find(name);
    if (it == result->series.end()) continue;
    Series& series = it->second;
    Kind kind{name,
              &series,
              ComputePercentiles(&series.latency_us),
              ComputePercentiles(&series.outside_kernel_us),
              {}};
    for (size_t i = 0; i < kPhases.size(); ++i) {
      kind.phases[i] = ComputePercentiles(&series.phase_us[i]);
    }
    kinds_.push_back(std::move(kind));
  }
}

const BenchReport::Kind* BenchReport::Find(const std::string& name) const {
  for (const Kind& kind : kinds_) {
    if (kind.name == name) return &kind;
  }
  return nullptr;
}

std::string BenchReport::Header() const {
  std::string out = absl::StrCat("target ", options_.target, " (", TransportName(), "), mode ",
                                 AbslUnparseFlag(options_.mode), ", shape ", shape_, ", ");
  const ResidentOptions& resident = options_.resident;
  if (options_.mode == BenchMode::kAttend) {
    absl::StrAppend(&out, options_.shape.spans[0].query_rows, " query rows, mask ",
                    AbslUnparseFlag(options_.shape.mask), ", ");
  }
  absl::StrAppend(&out, AbslUnparseFlag(options_.shape.dtype), ", ",
                  AbslUnparseFlag(options_.shape.layout), "\n");
  if (options_.mode != BenchMode::kAttend) {
    absl::StrAppend(&out, resident.sequences, " sequences, context ", resident.context,
                    " rows, of which ", resident.fork_from_prefix, " are shared",
                    resident.pin ? ", pinned" : "", "\n");
  }
  absl::StrAppend(
      &out,
      options_.rate > 0 ? absl::StrCat("open loop at ", options_.rate, " req/s") : "closed loop",
      ", ", options_.concurrency, " in flight, ", options_.connections, " connections",
      options_.stream ? ", streams" : "", ", ", absl::FormatDuration(options_.duration),
      result_.interrupted ? " (interrupted)" : "", "\n\n");
  return out;
}

std::string BenchReport::KindRows(const Kind& kind) const {
  std::string out = Row(kind.name, kind.latency);
  out += Row("  outside the kernel", kind.outside_kernel);
  for (size_t i = 0; i < kPhases.size(); ++i) {
    out += Row(absl::StrCat("  server: ", kPhases[i]), kind.phases[i]);
  }
  return out;
}

std::string BenchReport::KindSummary(const Kind& kind) const {
  return absl::StrFormat(
      "%-10s %.1f req/s, %.1f query rows/s, %.4f TFLOP/s; %.0f bytes sent, %.0f received per "
      "request\n",
      kind.name, kind.series->per_second, kind.rows_per_second(), kind.tflops(),
      kind.request_bytes(), kind.response_bytes());
}

std::string BenchReport::Counts() const {
  std::string out = absl::StrCat("requests   ", result_.Ok(), " ok, ", result_.Failed(), " failed");
  for (const auto& [code, count] : result_.errors) absl::StrAppend(&out, ", ", code, " ", count);
  if (result_.wrong_replies > 0) absl::StrAppend(&out, ", wrong reply ", result_.wrong_replies);
  if (result_.not_sent > 0) {
    absl::StrAppend(&out, ", ", result_.not_sent,
                    " due but not sent (the percentiles are too low)");
  }
  return out + "\n";
}

std::string BenchReport::TransportName() const {
  return AbslUnparseFlag(options_.shared_memory ? Transport::kShm : TransportOf(options_.target));
}

double BenchReport::EchoAndKernelRatio() const {
  constexpr size_t kKernel = 3;  // of kPhases
  return kinds_[0].latency.p50 / (echo_.p50 + kinds_[0].phases[kKernel].p50);
}

std::string BenchReport::Comparisons() const {
  std::string out;
  if (options_.echo && !kinds_.empty()) {
    const Kind& kind = kinds_[0];
    absl::StrAppendFormat(&out,
                          "echo       p50 of %s outside the kernel / p50 of echo = %.2f; p50 / "
                          "(echo + kernel) = %.2f%s\n",
                          kind.name, kind.outside_kernel.p50 / echo_.p50, EchoAndKernelRatio(),
                          options_.stream ? "; echoes are unary" : "");
  }
  if (const Kind* unary = Find("unary"); unary != nullptr) {
    absl::StrAppendFormat(&out, "stream     / unary: p50 %.1f / %.1f us = %.2f\n",
                          kinds_[0].latency.p50, unary->latency.p50,
                          kinds_[0].latency.p50 / unary->latency.p50);
  }
  const Kind* decode = Find("decode");
  const Kind* with_inline = Find("inline");
  if (decode != nullptr && with_inline != nullptr) {
    absl::StrAppendFormat(
        &out, "inline     / decode: p50 %.1f / %.1f us = %.2f; bytes sent %.0f / %.0f = %.1f\n",
        with_inline->latency.p50, decode->latency.p50,
        with_inline->latency.p50 / decode->latency.p50, with_inline->request_bytes(),
        decode->request_bytes(), with_inline->request_bytes() / decode->request_bytes());
  }
  return out;
}

std::string BenchReport::Table() const {
  std::string out = Header();
  absl::StrAppendFormat(&out, "%-22s %10s %10s %10s %10s %10s %10s\n", "microseconds", "p50", "p90",
                        "p99", "p99.9", "max", "mean");
  for (const Kind& kind : kinds_) out += KindRows(kind);
  if (options_.echo) out += Row("echo", echo_);
  out += "\n";
  for (const Kind& kind : kinds_) out += KindSummary(kind);
  return out + Counts() + Comparisons();
}

void BenchReport::AddKind(const Kind& kind, JsonObject* json) const {
  JsonObject phases;
  for (size_t i = 0; i < kPhases.size(); ++i) {
    phases.Add(kPhases[i], PercentilesJson(kind.phases[i]));
  }
  json->Add("latency_us", PercentilesJson(kind.latency))
      .Add("outside_kernel_us", PercentilesJson(kind.outside_kernel))
      .Add("server_phase_us", phases)
      .Add("requests_per_second", kind.series->per_second)
      .Add("query_rows_per_second", kind.rows_per_second())
      .Add("tflops", kind.tflops())
      .Add("request_bytes", kind.request_bytes())
      .Add("response_bytes", kind.response_bytes())
      .Add("ok", uint64_t{kind.series->latency_us.size()});
}

void BenchReport::AddLoad(JsonObject* json) const {
  json->Add("target", options_.target)
      .Add("transport", TransportName())
      .Add("mode", AbslUnparseFlag(options_.mode))
      .Add("shape", shape_)
      .Add("dtype", AbslUnparseFlag(options_.shape.dtype))
      .Add("layout", AbslUnparseFlag(options_.shape.layout));
  if (options_.mode == BenchMode::kAttend) {
    json->Add("query_rows", uint64_t{options_.shape.spans[0].query_rows})
        .Add("mask", AbslUnparseFlag(options_.shape.mask));
  } else {
    const ResidentOptions& resident = options_.resident;
    json->Add("sequences", static_cast<uint64_t>(resident.sequences))
        .Add("context", uint64_t{resident.context})
        .Add("fork_from_prefix", uint64_t{resident.fork_from_prefix})
        .Add("pin", resident.pin);
  }
  json->Add("concurrency", options_.concurrency)
      .Add("connections", options_.connections)
      .Add("stream", options_.stream)
      .Add("rate", options_.rate)
      .Add("duration_seconds", absl::ToDoubleSeconds(options_.duration))
      .Add("interrupted", result_.interrupted);
}

std::string BenchReport::Json() const {
  JsonObject json, errors;
  AddLoad(&json);
  if (!kinds_.empty()) AddKind(kinds_[0], &json);
  for (size_t i = 1; i < kinds_.size(); ++i) {
    JsonObject kind;
    AddKind(kinds_[i], &kind);
    json.Add(kinds_[i].name, kind);
  }
  for (const auto& [code, count] : result_.errors) errors.Add(code, count);
  json.Add("failed", result_.Failed())
      .Add("wrong_replies", result_.wrong_replies)
      .Add("not_sent", result_.not_sent)
      .Add("errors", errors);
  if (options_.echo && !kinds_.empty()) {
    json.Add("echo_us", PercentilesJson(echo_))
        .Add("echoes", uint64_t{result_.echo_us.size()})
        .Add("outside_kernel_to_echo_p50_ratio", kinds_[0].outside_kernel.p50 / echo_.p50)
        .Add("latency_to_echo_and_kernel_p50_ratio", EchoAndKernelRatio());
  }
  if (const Kind* unary = Find("unary"); unary != nullptr) {
    json.Add("stream_to_unary_p50_ratio", kinds_[0].latency.p50 / unary->latency.p50);
  }
  const Kind* decode = Find("decode");
  const Kind* with_inline = Find("inline");
  if (decode != nullptr && with_inline != nullptr) {
    json.Add("inline_to_decode_p50_ratio", with_inline->latency.p50 / decode->latency.p50)
        .Add("inline_to_decode_request_bytes_ratio",
             with_inline->request_bytes() / decode->request_bytes());
  }
  return json.ToString() + "\n";
}

}  // namespace flashcore::cli

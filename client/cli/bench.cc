// flashcore bench: flags in, load run, report out.
#include <unistd.h>

#include <cmath>
#include <cstdio>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/command.h"
#include "client/cli/json.h"
#include "client/cli/load.h"
#include "client/cli/stats.h"

ABSL_DECLARE_FLAG(absl::Duration, timeout);
ABSL_FLAG(flashcore::cli::BenchShape, shape, {},
          "BxHxSxD or BxHq/HkvxSxD: B spans of S query rows and S K/V rows");
ABSL_FLAG(uint32_t, query_rows, 0, "query rows per span; 0: as many as K/V rows");
ABSL_FLAG(bool, causal, false, "causal mask");
ABSL_FLAG(int32_t, concurrency, 1, "requests in flight at most, each with its own thread");
ABSL_FLAG(int32_t, connections, 1, "connections that they share");
ABSL_FLAG(absl::Duration, duration, absl::Seconds(5), "how long to measure");
ABSL_FLAG(absl::Duration, warmup, absl::Seconds(1), "how long to run before that");
ABSL_FLAG(double, rate, 0, "requests a second, sent when they are due (open loop); 0: closed loop");
ABSL_FLAG(bool, stream, false, "send on one AttendStream per connection instead of unary calls");
ABSL_FLAG(bool, echo, false,
          "alternate with a bare echo of the same sizes (the server needs --enable_echo)");
ABSL_FLAG(bool, allow_errors, false, "exit 0 although some requests failed");

namespace flashcore::cli {
namespace {

absl::Status ReadOptions(LoadOptions* options) {
  const BenchShape shape = absl::GetFlag(FLAGS_shape);
  const uint32_t query_rows = absl::GetFlag(FLAGS_query_rows);
  options->shape.spans.assign(shape.batch, {query_rows == 0 ? shape.rows : query_rows, shape.rows});
  options->shape.num_heads = shape.num_heads;
  options->shape.num_kv_heads = shape.num_kv_heads;
  options->shape.head_dim = shape.head_dim;
  options->shape.dtype = absl::GetFlag(FLAGS_dtype);
  options->shape.layout = absl::GetFlag(FLAGS_layout);
  if (absl::GetFlag(FLAGS_causal)) options->shape.mask = Mask::Causal();
  options->target = Target();
  options->concurrency = absl::GetFlag(FLAGS_concurrency);
  options->connections = absl::GetFlag(FLAGS_connections);
  options->duration = absl::GetFlag(FLAGS_duration);
  options->warmup = absl::GetFlag(FLAGS_warmup);
  options->rate = absl::GetFlag(FLAGS_rate);
  options->stream = absl::GetFlag(FLAGS_stream);
  options->echo = absl::GetFlag(FLAGS_echo);
  options->timeout = absl::GetFlag(FLAGS_timeout);
  options->progress = isatty(STDERR_FILENO) == 1;
  if (options->concurrency < 1 || options->concurrency > 4096) {
    return absl::InvalidArgumentError("--concurrency: want 1 to 4096");
  }
  if (options->connections < 1 || options->connections > options->concurrency) {
    return absl::InvalidArgumentError("--connections: want 1 to --concurrency");
  }
  if (options->duration <= absl::ZeroDuration() || options->duration > absl::Hours(24) ||
      options->warmup < absl::ZeroDuration() || options->warmup > absl::Hours(1)) {
    return absl::InvalidArgumentError("--duration and --warmup: want up to 24h and 1h");
  }
  if (!(options->rate >= 0 && options->rate <= 1e6)) {
    return absl::InvalidArgumentError("--rate: want 0 to 1e6");
  }
  if (options->echo && options->rate > 0) {
    return absl::InvalidArgumentError("--echo needs a closed loop: leave out --rate");
  }
  // Shapes too large for any message; the memory is checked against what the request itself says.
  if (RequestFlops(options->shape) > 1e15) {
    return absl::InvalidArgumentError("--shape: more than 1e15 operations a request");
  }
  return absl::OkStatus();
}

// What is printed, both ways.
struct Report {
  const LoadOptions& options;
  const LoadResult& result;
  Percentiles attend, outside_kernel, echo;
  std::array<Percentiles, 5> phases;
  double tflops;
  double echo_ratio;  // p50 of the time outside the kernel over p50 of the echo

  Report(const LoadOptions& load_options, LoadResult* load_result)
      : options(load_options),
        result(*load_result),
        attend(ComputePercentiles(&load_result->attend_us)),
        outside_kernel(ComputePercentiles(&load_result->outside_kernel_us)),
        echo(ComputePercentiles(&load_result->echo_us)),
        tflops(load_result->attends_per_second * RequestFlops(load_options.shape) * 1e-12),
        echo_ratio(outside_kernel.p50 / echo.p50) {
    for (size_t i = 0; i < phases.size(); ++i) {
      phases[i] = ComputePercentiles(&load_result->phase_us[i]);
    }
  }
};

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

std::string Table(const Report& report) {
  const LoadOptions& options = report.options;
  const LoadResult& result = report.result;
  std::string out = absl::StrCat(
      "target ", options.target, ", shape ", AbslUnparseFlag(absl::GetFlag(FLAGS_shape)), ", ",
      options.shape.spans[0].query_rows, " query rows, ", AbslUnparseFlag(options.shape.dtype),
      ", ", AbslUnparseFlag(options.shape.layout), ", mask ", AbslUnparseFlag(options.shape.mask),
      "\n",
      options.rate > 0 ? absl::StrCat("open loop at ", options.rate, " req/s") : "closed loop",
      ", ", options.concurrency, " in flight, ", options.connections, " connections",
      options.stream ? ", streams" : "", ", ", absl::FormatDuration(options.duration), "\n\n");
  absl::StrAppendFormat(&out, "%-22s %10s %10s %10s %10s %10s %10s\n", "microseconds", "p50", "p90",
                        "p99", "p99.9", "max", "mean");
  out += Row("attend", report.attend);
  out += Row("  outside the kernel", report.outside_kernel);
  for (size_t i = 0; i < kPhases.size(); ++i) {
    out += Row(absl::StrCat("  server: ", kPhases[i]), report.phases[i]);
  }
  if (options.echo) out += Row("echo", report.echo);
  absl::StrAppendFormat(&out,
                        "\nthroughput %.1f req/s, %.4f TFLOP/s\n"
                        "bytes      %d sent, %d received per request\n",
                        result.attends_per_second, report.tflops, result.request_bytes,
                        result.response_bytes);
  absl::StrAppend(&out, "requests   ", result.attend_us.size(), " ok, ", result.Failed(),
                  " failed");
  for (const auto& [code, count] : result.errors) absl::StrAppend(&out, ", ", code, " ", count);
  if (result.wrong_replies > 0) absl::StrAppend(&out, ", wrong reply ", result.wrong_replies);
  if (result.not_sent > 0) {
    absl::StrAppend(&out, ", ", result.not_sent, " due but not sent (the percentiles are too low)");
  }
  out += "\n";
  if (options.echo) {
    absl::StrAppendFormat(&out,
                          "echo       p50 of attend outside the kernel / p50 of echo = %.2f\n",
                          report.echo_ratio);
  }
  return out;
}

JsonObject PercentilesJson(const Percentiles& p) {
  JsonObject json;
  json.Add("p50", p.p50).Add("p90", p.p90).Add("p99", p.p99).Add("p999", p.p999);
  return json.Add("max", p.max).Add("mean", p.mean);
}

std::string Json(const Report& report) {
  const LoadOptions& options = report.options;
  const LoadResult& result = report.result;
  JsonObject phases, errors, json;
  for (size_t i = 0; i < kPhases.size(); ++i) {
    phases.Add(kPhases[i], PercentilesJson(report.phases[i]));
  }
  for (const auto& [code, count] : result.errors) errors.Add(code, count);
  json.Add("target", options.target)
      .Add("shape", AbslUnparseFlag(absl::GetFlag(FLAGS_shape)))
      .Add("query_rows", uint64_t{options.shape.spans[0].query_rows})
      .Add("dtype", AbslUnparseFlag(options.shape.dtype))
      .Add("layout", AbslUnparseFlag(options.shape.layout))
      .Add("mask", AbslUnparseFlag(options.shape.mask))
      .Add("concurrency", options.concurrency)
      .Add("connections", options.connections)
      .Add("stream", options.stream)
      .Add("rate", options.rate)
      .Add("duration_seconds", absl::ToDoubleSeconds(options.duration))
      .Add("latency_us", PercentilesJson(report.attend))
      .Add("outside_kernel_us", PercentilesJson(report.outside_kernel))
      .Add("server_phase_us", phases)
      .Add("requests_per_second", result.attends_per_second)
      .Add("tflops", report.tflops)
      .Add("request_bytes", uint64_t{result.request_bytes})
      .Add("response_bytes", uint64_t{result.response_bytes})
      .Add("ok", uint64_t{result.attend_us.size()})
      .Add("failed", result.Failed())
      .Add("wrong_replies", result.wrong_replies)
      .Add("not_sent", result.not_sent)
      .Add("errors", errors);
  if (options.echo) {
    json.Add("echo_us", PercentilesJson(report.echo))
        .Add("echoes", uint64_t{result.echo_us.size()})
        .Add("outside_kernel_to_echo_p50_ratio", report.echo_ratio);
  }
  return json.ToString() + "\n";
}

int RunBench() {
  LoadOptions options;
  if (absl::Status status = ReadOptions(&options); !status.ok()) {
    return FailUsage(status.message());
  }
  const absl::StatusOr<std::unique_ptr<Client>> client = Connect();
  if (!client.ok()) return FailUsage(client.status().message());
  absl::StatusOr<LoadResult> result = RunLoad(options);
  if (!result.ok()) return Fail(result.status());
  const Report report(options, &*result);
  std::fputs((absl::GetFlag(FLAGS_json) ? Json(report) : Table(report)).c_str(), stdout);
  if (!result->first_error.empty()) {
    std::fprintf(stderr, "flashcore: first error: %s\n", result->first_error.c_str());
  }
  if (result->attend_us.empty()) return Fail(absl::UnknownError("no request succeeded"));
  if (options.echo && result->echo_us.empty()) return Fail(absl::UnknownError("no echo succeeded"));
  if (result->wrong_replies > 0) return Fail(absl::DataLossError("the server answered wrongly"));
  const bool failed = result->Failed() > 0 && !absl::GetFlag(FLAGS_allow_errors);
  return failed ? kExitFailure : kExitOk;
}

}  // namespace

const Command& BenchCommand() {
  static const Command command = {
      "bench",
      "latency and throughput of a live server",
      "Sends Attend requests with inline K/V, closed loop or, with --rate, open loop with latency\n"
      "counted from when a request was due. All samples are kept: percentiles are exact, at some "
      "32\n"
      "bytes a request. Replies are checked, the first of each thread against a float64 "
      "reference.\n"
      "The server's phases are its own account of each request. Example:\n\n"
      "  flashcore bench --shape 1x8x512x64 --duration 5s --echo",
      {"shape", "query_rows", "causal", "dtype", "layout", "concurrency", "connections", "duration",
       "warmup", "rate", "stream", "echo", "allow_errors"},
      RunBench};
  return command;
}

}  // namespace flashcore::cli

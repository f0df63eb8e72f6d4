// flashcore bench: flags in, load run, report out.
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/bench_report.h"
#include "client/cli/command.h"
#include "client/cli/load.h"
#include "client/cli/load_plan.h"
#include "client/cli/workload.h"

ABSL_FLAG(flashcore::cli::BenchMode, mode, flashcore::cli::BenchMode::kAttend,
          "what is sent: attend (all K/V inline), decode, prefill, or mixed (every fourth worker "
          "prefills)");
ABSL_FLAG(flashcore::cli::Transport, transport, flashcore::cli::Transport::kAny,
          "tcp or unix: which of the addresses of --target, of which bench takes several with "
          "commas between them, to use; shm: as unix, with tensors in shared memory (the server "
          "needs --allow_shared_memory); empty: the first");
ABSL_FLAG(flashcore::cli::BenchShape, shape, {},
          "BxHxSxD or BxHq/HkvxSxD: B spans of S query rows and S K/V rows; for sequences, B is "
          "how many each worker has and S is their context, unless the next two flags say so");
ABSL_FLAG(int32_t, sequences, 0,
          "resident sequences of all workers together; 0: the B of --shape times --concurrency");
ABSL_FLAG(uint32_t, context, 0,
          "rows of a sequence before it decodes, or until which it is prefilled; 0: the S of "
          "--shape");
ABSL_FLAG(uint32_t, fork_from_prefix, 0,
          "first rows of every sequence, loaded once and forked; 0: nothing is shared");
ABSL_FLAG(bool, pin, false, "ask that the sequences be pinned in the L2 cache");
ABSL_FLAG(bool, compare_inline, false,
          "alternate with the same decode step with all K/V inline, which takes as much memory "
          "here as all contexts together");
ABSL_FLAG(uint32_t, query_rows, 0,
          "query rows of a span; 0: as many as K/V rows, and 256 for --mode=prefill");
ABSL_FLAG(bool, causal, false, "causal mask");
ABSL_FLAG(int32_t, concurrency, 1, "requests in flight at most, each with its own thread");
ABSL_FLAG(int32_t, connections, 1, "connections that they share");
ABSL_FLAG(absl::Duration, duration, absl::Seconds(5), "how long to measure");
ABSL_FLAG(absl::Duration, warmup, absl::Seconds(1), "how long to run before that");
ABSL_FLAG(double, rate, 0, "requests a second, sent when they are due (open loop); 0: closed loop");
ABSL_FLAG(bool, stream, false, "send on one AttendStream per connection instead of unary calls");
ABSL_FLAG(bool, compare_unary, false,
          "with --stream: alternate with the same requests in unary calls");
ABSL_FLAG(bool, echo, false,
          "alternate with a bare echo of the same sizes (the server needs --enable_echo)");
ABSL_FLAG(bool, allow_errors, false, "exit 0 although some requests failed");

namespace flashcore::cli {
namespace {

constexpr uint32_t kPrefillRows = 256;

void ReadShape(LoadOptions* options) {
  const BenchShape shape = absl::GetFlag(FLAGS_shape);
  const uint32_t query_rows = absl::GetFlag(FLAGS_query_rows);
  options->mode = absl::GetFlag(FLAGS_mode);
  options->shape.spans.assign(shape.batch, {query_rows == 0 ? shape.rows : query_rows, shape.rows});
  options->shape.num_heads = shape.num_heads;
  options->shape.num_kv_heads = shape.num_kv_heads;
  options->shape.head_dim = shape.head_dim;
  options->shape.dtype = absl::GetFlag(FLAGS_dtype);
  options->shape.layout = absl::GetFlag(FLAGS_layout);
  if (absl::GetFlag(FLAGS_causal)) options->shape.mask = Mask::Causal();

  ResidentOptions& resident = options->resident;
  const uint32_t context = absl::GetFlag(FLAGS_context);
  resident.sequences = absl::GetFlag(FLAGS_sequences);
  if (resident.sequences == 0) resident.sequences = int64_t{shape.batch} * options->concurrency;
  resident.context = context == 0 ? shape.rows : context;
  resident.fork_from_prefix = absl::GetFlag(FLAGS_fork_from_prefix);
  resident.prefill_rows = query_rows == 0 ? kPrefillRows : query_rows;
  resident.pin = absl::GetFlag(FLAGS_pin);
  resident.compare_inline = absl::GetFlag(FLAGS_compare_inline);
}

// Of the addresses of Target(), the first that --transport allows.
absl::StatusOr<std::string> ChooseTarget() {
  const std::string targets = Target();
  const Transport transport = absl::GetFlag(FLAGS_transport);
  const Transport wanted = transport == Transport::kShm ? Transport::kUnix : transport;
  for (const absl::string_view target : absl::StrSplit(targets, ',')) {
    if (wanted == Transport::kAny || wanted == TransportOf(target)) {
      return std::string(target);
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--transport=", AbslUnparseFlag(transport), ": --target=", targets, " has no such address",
      wanted == Transport::kUnix ? "; want the unix:path that the server listens on" : ""));
}

absl::Status CheckLoop(const LoadOptions& options) {
  if (options.concurrency < 1 || options.concurrency > 4096) {
    return absl::InvalidArgumentError("--concurrency: want 1 to 4096");
  }
  if (options.connections < 1 || options.connections > options.concurrency) {
    return absl::InvalidArgumentError("--connections: want 1 to --concurrency");
  }
  if (options.duration <= absl::ZeroDuration() || options.duration > absl::Hours(24) ||
      options.warmup < absl::ZeroDuration() || options.warmup > absl::Hours(1)) {
    return absl::InvalidArgumentError("--duration and --warmup: want up to 24h and 1h");
  }
  if (!(options.rate >= 0 && options.rate <= 1e6)) {
    return absl::InvalidArgumentError("--rate: want 0 to 1e6");
  }
  if (options.rate > 0 &&
      (options.echo || options.compare_unary || options.resident.compare_inline)) {
    return absl::InvalidArgumentError(
        "--echo, --compare_unary and --compare_inline need a closed loop: leave out --rate");
  }
  if (options.compare_unary && (!options.stream || options.mode == BenchMode::kMixed)) {
    return absl::InvalidArgumentError("--compare_unary needs --stream, and requests of one kind");
  }
  return absl::OkStatus();
}

// Shapes too large for any message; the memory is checked against what the request itself says.
absl::Status CheckFlop(double flop) {
  if (flop <= 1e15) return absl::OkStatus();
  return absl::InvalidArgumentError("--shape: more than 1e15 operations a request");
}

absl::Status CheckInline(const LoadOptions& options) {
  for (const auto* flag : {&FLAGS_fork_from_prefix, &FLAGS_context}) {
    if (absl::GetFlag(*flag) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", absl::GetFlagReflectionHandle(*flag).Name(), " needs another --mode"));
    }
  }
  if (absl::GetFlag(FLAGS_sequences) != 0 || options.resident.pin ||
      options.resident.compare_inline) {
    return absl::InvalidArgumentError(
        "--sequences, --pin and --compare_inline need another --mode");
  }
  double flop = 0;
  for (const SpanShape& span : options.shape.spans) {
    flop += AttentionFlop(options.shape, span.query_rows, span.kv_rows);
  }
  return CheckFlop(flop);
}

absl::Status CheckResident(const LoadOptions& options) {
  const ResidentOptions& resident = options.resident;
  if (resident.sequences < options.concurrency || resident.sequences > 1'000'000) {
    return absl::InvalidArgumentError(absl::StrCat("--sequences: ", resident.sequences,
                                                   "; want at least one a worker, ",
                                                   options.concurrency, ", and at most 1000000"));
  }
  if (resident.context > uint32_t{1} << 30) {
    return absl::InvalidArgumentError("--context: more than 2^30 rows");
  }
  const bool prefills = options.mode != BenchMode::kDecode;
  if (resident.fork_from_prefix > resident.context ||
      (prefills && resident.fork_from_prefix == resident.context)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--fork_from_prefix: ", resident.fork_from_prefix, " rows of a --context of ",
                     resident.context, prefills ? " leave nothing to prefill" : " is too many"));
  }
  if (options.mode == BenchMode::kMixed && options.concurrency < 2) {
    return absl::InvalidArgumentError("--mode=mixed: want a --concurrency of at least 2");
  }
  if (resident.compare_inline && options.mode != BenchMode::kDecode) {
    return absl::InvalidArgumentError("--compare_inline needs --mode=decode");
  }
  if (absl::GetFlag(FLAGS_query_rows) != 0 && !prefills) {
    return absl::InvalidArgumentError("--query_rows: a decode step has 1 a sequence");
  }
  return CheckFlop(AttentionFlop(options.shape, std::min(resident.prefill_rows, resident.context),
                                 resident.context));
}

absl::Status ReadOptions(LoadOptions* options) {
  absl::StatusOr<std::string> target = ChooseTarget();
  if (!target.ok()) return target.status();
  options->target = *std::move(target);
  options->client = OptionsFromFlags();
  options->concurrency = absl::GetFlag(FLAGS_concurrency);
  options->connections = absl::GetFlag(FLAGS_connections);
  options->duration = absl::GetFlag(FLAGS_duration);
  options->warmup = absl::GetFlag(FLAGS_warmup);
  options->rate = absl::GetFlag(FLAGS_rate);
  options->stream = absl::GetFlag(FLAGS_stream);
  options->compare_unary = absl::GetFlag(FLAGS_compare_unary);
  options->shared_memory = absl::GetFlag(FLAGS_transport) == Transport::kShm;
  options->echo = absl::GetFlag(FLAGS_echo);
  options->progress = isatty(STDERR_FILENO) == 1;
  ReadShape(options);
  absl::Status status = CheckLoop(*options);
  status.Update(options->mode == BenchMode::kAttend ? CheckInline(*options)
                                                    : CheckResident(*options));
  return status;
}

int RunBench() {
  LoadOptions options;
  if (absl::Status status = ReadOptions(&options); !status.ok()) {
    return FailUsage(status.message());
  }
  const absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Create(options.target, options.client);
  if (!client.ok()) return FailUsage(client.status().message());
  absl::StatusOr<LoadResult> result = RunLoad(options);
  if (!result.ok()) return Fail(result.status());
  const bool echoed = !result->echo_us.empty();
  const BenchReport report(options, AbslUnparseFlag(absl::GetFlag(FLAGS_shape)), &*result);
  std::fputs((absl::GetFlag(FLAGS_json) ? report.Json() : report.Table()).c_str(), stdout);
  if (!result->first_error.empty()) {
    std::fprintf(stderr, "flashcore: first error: %s\n", result->first_error.c_str());
  }
  if (result->Ok() == 0) return Fail(absl::UnknownError("no request succeeded"));
  if (options.echo && !echoed) return Fail(absl::UnknownError("no echo succeeded"));
  if (result->wrong_replies > 0) return Fail(absl::DataLossError("the server answered wrongly"));
  const bool failed = result->Failed() > 0 && !absl::GetFlag(FLAGS_allow_errors);
  return failed ? kExitFailure : kExitOk;
}

}  // namespace

const Command& BenchCommand() {
  static const Command command = {
      "bench",
      "latency and throughput of a live server",
      "Sends Attend requests, closed loop or, with --rate, open loop with latency counted from "
      "when\n"
      "a request was due. All samples are kept: percentiles are exact, at some 32 bytes a "
      "request.\n"
      "Replies are checked, the first of each worker against a float64 reference. The server's\n"
      "phases are its own account of each request.\n\n"
      "--mode=attend sends all K/V inline. The other modes work on resident sequences of one "
      "layer,\n"
      "which the workers (--concurrency) share out among them, load with random rows before the\n"
      "warmup, and delete at the end, also after SIGINT:\n"
      "  decode   a request is one step of all of a worker's sequences: appends one K/V row to "
      "each\n"
      "           and attends from one query row. After 64 steps they are truncated to --context\n"
      "           rows, which is not timed.\n"
      "  prefill  a request appends --query_rows rows to one sequence and attends from as many,\n"
      "           causal, until it has --context rows and is truncated to --fork_from_prefix.\n"
      "  mixed    every fourth worker, at least one, prefills; the others decode.\n"
      "After an error whose outcome is not known, or if a sequence is lost, a worker puts its\n"
      "sequences back to their start and goes on. Examples:\n\n"
      "  flashcore bench --shape=1x8x512x64 --duration=5s --echo\n"
      "  flashcore bench --target=unix:/tmp/flashcore.sock --mode=decode --stream --compare_unary\n"
      "  flashcore bench --mode=decode --shape=1x32/8x4096x128 --concurrency=4 --sequences=64\n"
      "      --fork_from_prefix=1024 --compare_inline",
      {"mode",           "shape",      "sequences",   "context", "fork_from_prefix", "pin",
       "compare_inline", "query_rows", "causal",      "dtype",   "layout",           "concurrency",
       "connections",    "duration",   "warmup",      "rate",    "transport",        "stream",
       "compare_unary",  "echo",       "allow_errors"},
      RunBench};
  return command;
}

}  // namespace flashcore::cli

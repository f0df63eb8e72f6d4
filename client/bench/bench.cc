// flashcore bench: flags in, load run, report out.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/bench/bench_report.h"
#include "client/bench/commands.h"
#include "client/bench/load.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(flashcore::cli::BenchMode, mode, flashcore::cli::BenchMode::kAttend,
          "what to send: attend (all K/V inline), decode, prefill, or mixed (every fourth worker "
          "prefills)");
ABSL_FLAG(flashcore::cli::Transport, transport, flashcore::cli::Transport::kAny,
          "which address to use if --target lists several, separated by commas: tcp, unix or "
          "local. With local, tensors are in shared memory. Empty: the first address");
ABSL_FLAG(bool, all_targets, false,
          "spread the connections over all addresses of --target that --transport allows, instead "
          "of the first");
ABSL_FLAG(flashcore::cli::BenchShape, shape, {},
          "BxHxSxD or BxHq/HkvxSxD: B spans of S query rows and S K/V rows. For sequences: B of "
          "them for each worker with a context of S rows, unless --sequences and --context say "
          "otherwise");
ABSL_FLAG(int32_t, sequences, 0,
          "resident sequences of all workers together; 0: the B of --shape times --concurrency");
ABSL_FLAG(uint32_t, context, 0,
          "rows of a sequence before it decodes, or to which it is prefilled; 0: the S of --shape");
ABSL_FLAG(uint32_t, fork_from_prefix, 0,
          "first rows of every sequence, loaded once and then forked; 0: no fork");
ABSL_FLAG(flashcore::KvDType, kv_dtype, flashcore::KvDType::kSameAsQuery,
          "same_as_query, int8 or float8_e4m3: how sequences store K/V");
ABSL_FLAG(flashcore::Precision, precision, flashcore::Precision::k16Bit,
          "16bit, int8_qk or int8_qk_pv: the least precise products to accept, with "
          "--kv_dtype=int8. `flashcore info` lists the kernels that the server has for them");
ABSL_FLAG(bool, pin, false, "ask the server to pin the sequences in the L2 cache");
ABSL_FLAG(absl::Duration, idle_timeout, absl::ZeroDuration(),
          "let the server delete a sequence that was not used for so long, for example because the "
          "benchmark was killed; 0: the server's --sequence_idle_timeout_s");
ABSL_FLAG(bool, compare_inline, false,
          "take turns with the same decode step with all K/V inline. Needs as much memory here as "
          "all contexts together");
ABSL_FLAG(uint32_t, query_rows, 0,
          "query rows of a span; 0: as many as K/V rows, or 256 for --mode=prefill");
ABSL_FLAG(bool, causal, false, "causal mask");
ABSL_FLAG(int32_t, concurrency, 1, "workers: threads with one request in flight each");
ABSL_FLAG(int32_t, connections, 1, "connections that the workers share");
ABSL_FLAG(absl::Duration, duration, absl::Seconds(5), "how long to measure");
ABSL_FLAG(absl::Duration, warmup, absl::Seconds(1), "how long to run before measuring");
ABSL_FLAG(double, rate, 0, "requests a second, sent when they are due (open loop); 0: closed loop");
ABSL_FLAG(bool, stream, false, "send on one AttendStream per connection instead of unary calls");
ABSL_FLAG(bool, compare_unary, false,
          "with --stream: take turns with the same requests in unary calls");
ABSL_FLAG(bool, compare_grpc, false,
          "with --transport=local: take turns with the same requests over the first address of "
          "--target that is not local, on sequences of their own and without shared memory");
ABSL_FLAG(bool, rounds_from_stdin, false,
          "with --json: after the setup print {\"ready\":true}, then for each line of standard "
          "input measure once and print a report, and end with it. Connections and sequences stay");
ABSL_FLAG(bool, allow_errors, false, "exit with 0 even if requests failed");

namespace flashcore::cli {
namespace {

constexpr uint32_t kPrefillRows = 256;
constexpr double kMaxFlop = 1e15;  // of a request: far beyond any message

// The first address of Target() that --transport allows, or with --all_targets all of them.
absl::StatusOr<std::vector<std::string>> ChooseTargets() {
  const std::string targets = Target();
  const Transport transport = absl::GetFlag(FLAGS_transport);
  std::vector<std::string> chosen;
  for (const absl::string_view target : absl::StrSplit(targets, ',')) {
    if (!chosen.empty() && !absl::GetFlag(FLAGS_all_targets)) break;
    if (transport == Transport::kAny || transport == TransportOf(target)) {
      chosen.emplace_back(target);
    }
  }
  if (!chosen.empty()) return chosen;
  return absl::InvalidArgumentError(absl::StrCat(
      "--transport=", AbslUnparseFlag(transport), ": the target ", targets, " has no such address",
      transport == Transport::kUnix ? "; want the unix:path that the server listens on" : ""));
}

// The first address of Target() that is not local; empty if there is none.
std::string FirstGrpcTarget() {
  const std::string targets = Target();
  for (const absl::string_view target : absl::StrSplit(targets, ',')) {
    if (TransportOf(target) != Transport::kLocal) return std::string(target);
  }
  return "";
}

LoadOptions ReadOptions() {
  LoadOptions options;
  const BenchShape shape = absl::GetFlag(FLAGS_shape);
  const uint32_t query_rows = absl::GetFlag(FLAGS_query_rows);
  const uint32_t context = absl::GetFlag(FLAGS_context);
  options.client = OptionsFromFlags();
  options.mode = absl::GetFlag(FLAGS_mode);
  options.shape.spans.assign(shape.batch, {query_rows == 0 ? shape.rows : query_rows, shape.rows});
  options.shape.num_heads = shape.num_heads;
  options.shape.num_kv_heads = shape.num_kv_heads;
  options.shape.head_dim = shape.head_dim;
  options.shape.dtype = absl::GetFlag(FLAGS_dtype);
  options.shape.layout = absl::GetFlag(FLAGS_layout);
  if (absl::GetFlag(FLAGS_causal)) options.shape.mask = Mask::Causal();
  options.shape.precision = absl::GetFlag(FLAGS_precision);
  options.concurrency = absl::GetFlag(FLAGS_concurrency);
  options.connections = absl::GetFlag(FLAGS_connections);
  const int64_t sequences = absl::GetFlag(FLAGS_sequences);
  options.resident.sequences =
      sequences == 0 ? int64_t{shape.batch} * options.concurrency : sequences;
  options.resident.context = context == 0 ? shape.rows : context;
  options.resident.fork_from_prefix = absl::GetFlag(FLAGS_fork_from_prefix);
  options.resident.prefill_rows = query_rows == 0 ? kPrefillRows : query_rows;
  options.resident.kv_dtype = absl::GetFlag(FLAGS_kv_dtype);
  options.resident.pin = absl::GetFlag(FLAGS_pin);
  options.resident.idle_timeout = absl::GetFlag(FLAGS_idle_timeout);
  options.resident.compare_inline = absl::GetFlag(FLAGS_compare_inline);
  options.duration = absl::GetFlag(FLAGS_duration);
  options.warmup = absl::GetFlag(FLAGS_warmup);
  options.rate = absl::GetFlag(FLAGS_rate);
  options.stream = absl::GetFlag(FLAGS_stream);
  options.compare_unary = absl::GetFlag(FLAGS_compare_unary);
  if (absl::GetFlag(FLAGS_compare_grpc)) options.compare_target = FirstGrpcTarget();
  return options;
}

double RequestFlop(const LoadOptions& options) {
  const ResidentOptions& resident = options.resident;
  if (options.mode != BenchMode::kAttend) {
    return AttentionFlop(options.shape, std::min(resident.prefill_rows, resident.context),
                         resident.context);
  }
  const SpanShape& span = options.shape.spans[0];
  return static_cast<double>(options.shape.spans.size()) *
         AttentionFlop(options.shape, span.query_rows, span.kv_rows);
}

// The error in the flags; null if there is none.
const char* FindProblem(const LoadOptions& options) {
  const ResidentOptions& resident = options.resident;
  const bool attend = options.mode == BenchMode::kAttend;
  const bool decode = options.mode == BenchMode::kDecode;
  const bool mixed = options.mode == BenchMode::kMixed;
  const bool local = TransportOf(options.targets.front()) == Transport::kLocal;
  const bool for_sequences = absl::GetFlag(FLAGS_sequences) != 0 ||
                             absl::GetFlag(FLAGS_context) != 0 || resident.fork_from_prefix != 0 ||
                             resident.pin || resident.kv_dtype != KvDType::kSameAsQuery;
  const struct {
    bool found;
    const char* text;
  } problems[] = {
      {options.concurrency < 1 || options.concurrency > 4096, "--concurrency: want 1 to 4096"},
      {options.connections < 1 || options.connections > options.concurrency,
       "--connections: want 1 to --concurrency"},
      {static_cast<size_t>(options.connections) < options.targets.size(),
       "--connections: want at least one for each address of --all_targets"},
      {options.targets.size() > 1 && resident.fork_from_prefix != 0,
       "--fork_from_prefix excludes several servers"},
      {absl::GetFlag(FLAGS_rounds_from_stdin) && !absl::GetFlag(FLAGS_json),
       "--rounds_from_stdin needs --json"},
      {options.duration <= absl::ZeroDuration() || options.duration > absl::Hours(24),
       "--duration: want more than 0 and at most 24h"},
      {options.warmup < absl::ZeroDuration() || options.warmup > absl::Hours(1),
       "--warmup: want 0 to 1h"},
      {!(options.rate >= 0 && options.rate <= 1e6), "--rate: want 0 to 1e6"},
      {options.rate > 0 &&
           (options.compare_unary || resident.compare_inline || absl::GetFlag(FLAGS_compare_grpc)),
       "--rate excludes --compare_unary, --compare_inline and --compare_grpc, which need a closed "
       "loop"},
      {absl::GetFlag(FLAGS_compare_grpc) && (!local || options.compare_target.empty()),
       "--compare_grpc needs a local address and another one in --target"},
      {absl::GetFlag(FLAGS_compare_grpc) && (mixed || resident.fork_from_prefix != 0),
       "--compare_grpc excludes --mode=mixed and --fork_from_prefix"},
      {options.compare_unary && (!options.stream || mixed),
       "--compare_unary needs --stream, and a --mode with one kind of request"},
      {resident.compare_inline && !decode, "--compare_inline needs --mode=decode"},
      {attend && for_sequences,
       "--sequences, --context, --fork_from_prefix, --kv_dtype and --pin need another --mode than "
       "attend"},
      {options.shape.precision != Precision::k16Bit && resident.kv_dtype != KvDType::kInt8,
       "--precision needs --kv_dtype=int8"},
      {!attend && (resident.sequences < options.concurrency || resident.sequences > 1'000'000),
       "--sequences: want at least --concurrency and at most 1000000"},
      {!attend && resident.context > uint32_t{1} << 30, "--context: want at most 2^30 rows"},
      {!attend && uint64_t{resident.fork_from_prefix} + (decode ? 0 : 1) > resident.context,
       "--fork_from_prefix: want at most --context, and less in a mode that prefills"},
      {mixed && options.concurrency < 2, "--mode=mixed: want a --concurrency of at least 2"},
      {decode && absl::GetFlag(FLAGS_query_rows) != 0,
       "--query_rows: a decode step has 1 for each sequence"},
      {RequestFlop(options) > kMaxFlop, "--shape: more than 1e15 operations a request"},
  };
  for (const auto& problem : problems) {
    if (problem.found) return problem.text;
  }
  return nullptr;
}

// Prints what was measured. Returns the exit code.
int Report(const LoadOptions& options, const LoadResult& result) {
  const auto report = BenchJson(options, AbslUnparseFlag(absl::GetFlag(FLAGS_shape)), result);
  Print(report, BenchTable(report));
  std::fflush(stdout);
  if (!result.first_error.empty()) {
    std::fprintf(stderr, "flashcore: first error: %s\n", result.first_error.c_str());
  }
  if (result.Ok() == 0) return Fail(absl::UnknownError("no request succeeded"));
  if (result.wrong_replies > 0) return Fail(absl::DataLossError("a reply of the server is wrong"));
  const bool failed = result.Failed() > 0 && !absl::GetFlag(FLAGS_allow_errors);
  return failed ? kExitFailure : kExitOk;
}

// Whether to measure (again): once, or with --rounds_from_stdin when a line has come.
bool NextRound(int rounds) {
  if (!absl::GetFlag(FLAGS_rounds_from_stdin)) return rounds == 0;
  if (rounds == 0) Print({{"ready", true}}, "");
  std::fflush(stdout);
  std::string line;
  return static_cast<bool>(std::getline(std::cin, line));
}

int RunBench(Client*) {
  absl::StatusOr<std::vector<std::string>> targets = ChooseTargets();
  if (!targets.ok()) return FailTarget(targets.status());
  LoadOptions options = ReadOptions();
  options.targets = *std::move(targets);
  options.shared_memory = TransportOf(options.targets.front()) == Transport::kLocal;
  if (const char* problem = FindProblem(options); problem != nullptr) return FailUsage(problem);
  for (const std::string& target : options.targets) {
    const absl::Status client = Client::Create(target, options.client).status();
    if (!client.ok()) return FailTarget(client);
  }
  int rounds = 0, exit_code = kExitOk;
  const absl::Status status = RunRounds(
      options, [&] { return NextRound(rounds); },
      [&](const LoadResult& result) {
        ++rounds;
        exit_code = std::max(exit_code, Report(options, result));
      });
  return status.ok() ? exit_code : Fail(status);
}

}  // namespace

Command BenchCommand() {
  return {
      "bench",
      "measures latency and throughput of a live server",
      "Sends Attend requests in a closed loop or, with --rate, in an open loop where latency "
      "counts from when a request was due. Percentiles are exact: all samples are kept, about 32 "
      "bytes each. Replies are checked, the first of each worker against a float64 reference. The "
      "server's phases are its own account of each request.\n\n"
      "With --compare_inline, --compare_unary and --compare_grpc the kinds of requests take turns "
      "of at least 50 ms. req/s of a kind are its requests that ended in the measured window over "
      "the wall time of its turns in that window (turn_seconds); a kind that is alone has all of "
      "it.\n\n"
      "--mode=attend sends all K/V inline. The other modes use resident sequences of one layer. "
      "The workers divide the sequences among them, fill them with random rows before the warmup, "
      "and delete them at the end, also after SIGINT:\n"
      "  decode   a request is one step of all sequences of a worker: it appends one K/V row to\n"
      "           each and attends from one query row. After 64 steps they are truncated to\n"
      "           --context rows, which is not part of any latency.\n"
      "  prefill  a request appends --query_rows rows to one sequence and attends from as many,\n"
      "           causal, until it has --context rows and is truncated to --fork_from_prefix.\n"
      "  mixed    every fourth worker prefills, at least one; the others decode.\n"
      "If a sequence is lost, or an error leaves its state unknown, a worker restores its "
      "sequences and continues. Examples:\n\n"
      "  flashcore bench --shape=1x8x512x64 --duration=5s\n"
      "  flashcore bench --target=unix:/tmp/flashcore.sock --mode=decode --stream --compare_unary\n"
      "  flashcore bench --mode=decode --shape=1x32/8x4096x128 --concurrency=4 --sequences=64\n"
      "      --fork_from_prefix=1024 --compare_inline\n"
      "  flashcore bench --transport=local --mode=decode --compare_grpc\n"
      "      --target=unix:/tmp/flashcore.sock,local:/run/flashcore/local.sock",
      {"mode",        "shape",         "sequences",      "context",           "fork_from_prefix",
       "pin",         "idle_timeout",  "compare_inline", "query_rows",        "causal",
       "dtype",       "kv_dtype",      "layout",         "concurrency",       "connections",
       "all_targets", "duration",      "warmup",         "transport",         "rate",
       "stream",      "compare_unary", "compare_grpc",   "rounds_from_stdin", "precision",
       "allow_errors"},
      RunBench,
      /*connects=*/false};
}

}  // namespace flashcore::cli

#include "server/options.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/base/cores.h"

ABSL_FLAG(
    std::vector<std::string>, listen, {"0.0.0.0:7070"},
    "Addresses to serve gRPC on, each host:port or unix:path. Repeatable, or comma-separated.");
ABSL_FLAG(
    std::string, metrics_listen, "0.0.0.0:9464",
    "Address of the Prometheus endpoint /metrics, host:port; empty: none. Beside it, /healthz "
    "and /readyz.");
ABSL_FLAG(std::string, metrics_token_file, "",
          "File whose first line is the bearer token that /metrics asks for; it may be replaced at "
          "any time. Empty: anyone may scrape.");
ABSL_FLAG(
    std::string, device, "auto",
    "What to compute on: cpu; cuda:N, or several, comma-separated; or auto: cuda:0 if it can be "
    "used, else the CPU.");
ABSL_FLAG(
    std::string, accumulate, "float32",
    "What kernels sum in: float32, or float16, which only some devices have: less exact, FP16 "
    "only, and it overflows where |q.k| before softmax_scale, or max|V| times the number of "
    "tokens that share a row's attention, is beyond 65504.");
ABSL_FLAG(int32_t, cpu_threads, 0, "Threads of the CPU device; 0: one per core.");
ABSL_FLAG(
    int32_t, lanes, 2,
    "Threads that drive launches on each GPU, each with slots of its own. The CPU device has one "
    "lane.");
ABSL_FLAG(int32_t, lane_slots, 2,
          "Launches that a lane of a GPU has under way, each on a stream and in memory of its own, "
          "so that the copies of one overlap the kernels of another.");
ABSL_FLAG(
    std::string, wait_strategy, "yield",
    "How a lane's thread waits for a GPU: spin (the soonest to notice, and a core is busy all "
    "the while), yield (likewise, but others may have the core in between) or block.");
ABSL_FLAG(
    int64_t, direct_io_bytes, int64_t{1} << 20,
    "Q, K, V and O of a launch of at most so many bytes in all are not copied to and from a "
    "GPU: its kernels read and write them in the host's memory, unless K/V of the request would "
    "be read more than once. 0: always copied.");
ABSL_FLAG(std::string, l2_window, "auto",
          "Whether a GPU keeps the first K/V, which pinned sequences compete for, in its L2 cache: "
          "on, off, or auto: if a short measurement at start finds that it pays.");
ABSL_FLAG(int64_t, l2_budget_bytes, 0,
          "Most of a GPU's L2 cache to keep K/V in; 0: as much as the GPU allows.");
ABSL_FLAG(
    std::string, pin_threads, "",
    "Cores that the server runs on, such as 2-5,8: each lane's thread has one of the first to "
    "itself, the other threads share the rest; empty: any thread anywhere.");
ABSL_FLAG(int64_t, max_message_bytes, int64_t{64} << 20, "Largest gRPC message accepted.");
ABSL_FLAG(
    int64_t, transport_memory_bytes, int64_t{256} << 20,
    "Memory for messages that are being received, of all connections together; beyond it RPCs "
    "are cancelled. At least twice --max_message_bytes.");
ABSL_FLAG(
    int64_t, staging_memory_bytes, int64_t{1} << 30,
    "Limit of the memory for the tensors of all requests in flight, of each device. A GPU takes "
    "all of it, and pins it, at start.");
ABSL_FLAG(
    int32_t, staging_wait_ms, 500,
    "How long a request waits for this memory while it is full, in arrival order; then it gets "
    "RESOURCE_EXHAUSTED. 0: at once. Those that wait may hold half of --transport_memory_bytes.");
ABSL_FLAG(int32_t, max_spans, 4096, "Most spans in one request.");
ABSL_FLAG(int32_t, max_heads, 1024, "Most query heads in one request.");
ABSL_FLAG(
    double, max_request_gflop, 4000,
    "Most work in one request, in 10^9 floating-point operations, masks not counted: a request "
    "that runs cannot be interrupted.");
ABSL_FLAG(int32_t, max_queue_requests, 1024, "Most requests waiting for a lane, of each device.");
ABSL_FLAG(int32_t, max_batch_requests, 64, "Most requests in one batch.");
ABSL_FLAG(int64_t, max_batch_tokens, 65536,
          "Most tokens in one batch, unless one request alone has more. A request counts its query "
          "rows, or the rows it appends to sequences if these are more.");
ABSL_FLAG(
    int64_t, max_queue_delay_us, 0,
    "Microseconds that a request may wait for others to share its batch while a lane is idle; "
    "0: it never does.");
ABSL_FLAG(int64_t, idle_spin_us, 1000,
          "Microseconds that a lane of a GPU which has nothing to do keeps looking, and a core "
          "busy, before its thread sleeps; of several idle lanes one at a time.");
ABSL_FLAG(int64_t, kv_memory_bytes, 0,
          "Memory for resident K/V, of each device. 0: on a GPU 85% of what is free; on the CPU "
          "device a quarter of the machine's, which the system gives as it is used.");
ABSL_FLAG(
    int64_t, kv_hot_bytes, 0,
    "Of it, what pinned sequences compete for on the CPU device. A CPU keeps nothing pinned in its "
    "cache: this only serves to try placement out.");
ABSL_FLAG(double, sequence_idle_timeout_s, 3600,
          "Seconds without use after which a sequence is deleted; 0: never.");
ABSL_FLAG(std::string, evict, "none",
          "What a full K/V memory does: none (refuse) or lru (delete the sequence that was used "
          "longest ago).");
ABSL_FLAG(int64_t, client_kv_bytes, 0,
          "Most K/V memory that one client's sequences may take on each device; 0: no limit.");
ABSL_FLAG(int64_t, client_sequences, 0,
          "Most sequences of one client on each device; 0: no limit.");
ABSL_FLAG(int32_t, max_layers, 1024, "Most layers of one sequence.");
ABSL_FLAG(
    int64_t, sequence_metadata_bytes, int64_t{256} << 20,
    "Limit of the memory for the records of sequences and their page tables, of each device.");
ABSL_FLAG(bool, allow_shared_memory, false,
          "Let clients on unix: addresses register POSIX shared memory, and requests leave their "
          "tensors there.");
ABSL_FLAG(int64_t, shared_memory_bytes, int64_t{1} << 30,
          "Most memory that all clients together may share. A GPU pins it.");
ABSL_FLAG(int64_t, client_shared_memory_bytes, 0,
          "Most memory that one client may share; 0: no limit of its own.");
ABSL_FLAG(int32_t, client_shared_regions, 64,
          "Most regions of shared memory of one client; all together have at most 1024.");
ABSL_FLAG(bool, share_prefixes, true,
          "Read K/V that the sequences of a batch share once for all of them. Off only to measure "
          "what it gives: results are the same to the bit.");
ABSL_FLAG(int32_t, max_stream_inflight, 64, "Most unanswered requests of one AttendStream.");
ABSL_FLAG(double, drain_timeout_s, 30,
          "Seconds that requests in flight get to finish after SIGTERM or SIGINT.");
ABSL_FLAG(bool, enable_echo, false, "Serve DebugService.Echo, the yardstick of the benchmark.");
ABSL_FLAG(std::string, log_format, "auto", "auto (text on a terminal, else JSON), json or text.");
ABSL_FLAG(std::string, log_level, "info", "debug (one record a request), info, warning or error.");

namespace flashcore::server {
namespace {

constexpr char kEnvironmentPrefix[] = "FLASHCORE_";

bool IsOurs(absl::string_view file) { return absl::EndsWith(file, "server/options.cc"); }

void ConfigureUsage() {
  absl::SetProgramUsageMessage(
      "Serves attention over gRPC.\n\n"
      "Every flag can also be set in the environment: FLASHCORE_ and its name in capitals.");
  absl::FlagsUsageConfig config;
  config.contains_helpshort_flags = IsOurs;
  config.contains_help_flags = IsOurs;
  config.contains_helppackage_flags = IsOurs;
  config.normalize_filename = [](absl::string_view file) {
    const size_t at = file.rfind("server/");
    return std::string(at == absl::string_view::npos ? file : file.substr(at));
  };
  config.version_string = [] { return "flashcore-server " FLASHCORE_VERSION "\n"; };
  absl::SetFlagsUsageConfig(config);
}

absl::Status ReadEnvironment() {
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (!IsOurs(flag->Filename())) continue;
    const std::string variable = absl::StrCat(kEnvironmentPrefix, absl::AsciiStrToUpper(name));
    const char* value = std::getenv(variable.c_str());
    if (value == nullptr) continue;
    std::string error;
    if (!flag->ParseFrom(value, &error)) {
      return absl::InvalidArgumentError(
          absl::StrCat("environment variable ", variable, ": '", value, "': ", error));
    }
  }
  return absl::OkStatus();
}

// An absl flag that is given twice keeps the last value. --listen is to keep all, so its
// occurrences are taken out of `args` and joined into one.
void JoinListen(std::vector<std::string>* args) {
  std::vector<std::string> rest;
  std::vector<std::string> listen;
  for (size_t i = 0; i < args->size(); ++i) {
    absl::string_view arg = (*args)[i];
    if (arg == "--") {  // what follows is no flag
      rest.insert(rest.end(), args->begin() + i, args->end());
      break;
    }
    if (i > 0 && (arg == "--listen" || arg == "-listen") && i + 1 < args->size()) {
      listen.push_back((*args)[++i]);
    } else if (i > 0 && absl::StartsWith(arg, "--listen=")) {
      listen.emplace_back(arg.substr(9));
    } else {
      rest.emplace_back(arg);
    }
  }
  if (!listen.empty()) {
    rest.insert(rest.begin() + 1, absl::StrCat("--listen=", absl::StrJoin(listen, ",")));
  }
  *args = std::move(rest);
}

absl::Status ReadCommandLine(int argc, char** argv) {
  std::vector<std::string> args(argv, argv + argc);
  JoinListen(&args);
  std::vector<char*> pointers;
  for (std::string& arg : args) pointers.push_back(arg.data());
  const std::vector<char*> rest =
      absl::ParseCommandLine(static_cast<int>(pointers.size()), pointers.data());
  if (rest.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", rest[1], "'"));
  }
  return absl::OkStatus();
}

// Checks that a number lies in a range, and returns it as a T. Gathers the first error.
class Checker {
 public:
  template <typename T>
  T Range(const char* flag, T value, T low, T high) {
    if (status_.ok() && !(value >= low && value <= high)) {
      status_ = absl::InvalidArgumentError(
          absl::StrCat("--", flag, ": ", value, " is not in ", low, "..", high));
    }
    return value;
  }
  void Require(bool ok, const char* flag, absl::string_view value, absl::string_view want) {
    if (status_.ok() && !ok) {
      status_ =
          absl::InvalidArgumentError(absl::StrCat("--", flag, ": '", value, "' is not ", want));
    }
  }
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

void CheckAddresses(const std::vector<std::string>& addresses, Checker* check) {
  check->Require(!addresses.empty(), "listen", "", "an address");
  for (const std::string& address : addresses) {
    int port = -1;
    const size_t colon = address.rfind(':');
    const bool is_unix = absl::StartsWith(address, "unix:") && address.size() > 5;
    const bool is_tcp = colon != std::string::npos && colon > 0 &&
                        absl::SimpleAtoi(address.substr(colon + 1), &port) && port >= 0 &&
                        port <= 65535;
    check->Require(is_unix || is_tcp, "listen", address, "host:port or unix:path");
  }
}

void ReadSequenceOptions(SequenceStore::Options* options, Checker* check) {
  constexpr int64_t kMaxBytes = int64_t{1} << 46;
  const std::string evict = absl::GetFlag(FLAGS_evict);
  check->Require(evict == "none" || evict == "lru", "evict", evict, "none or lru");
  options->evict_lru = evict == "lru";
  const double timeout_s = check->Range("sequence_idle_timeout_s",
                                        absl::GetFlag(FLAGS_sequence_idle_timeout_s), 0.0, 1e8);
  options->idle_timeout =
      std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(timeout_s));
  options->client_kv_bytes =
      check->Range<int64_t>("client_kv_bytes", absl::GetFlag(FLAGS_client_kv_bytes), 0, kMaxBytes);
  options->client_sequences = check->Range<int64_t>(
      "client_sequences", absl::GetFlag(FLAGS_client_sequences), 0, int64_t{1} << 31);
  options->max_layers = check->Range("max_layers", absl::GetFlag(FLAGS_max_layers), 1, 65536);
  options->metadata_bytes = check->Range<int64_t>(
      "sequence_metadata_bytes", absl::GetFlag(FLAGS_sequence_metadata_bytes), 1 << 20, kMaxBytes);
}

void ReadSharedMemoryOptions(SharedMemory::Options* options, Checker* check) {
  constexpr int64_t kMaxBytes = int64_t{1} << 40;  // what FaultGuard guards
  options->allowed = absl::GetFlag(FLAGS_allow_shared_memory);
  options->total_bytes = check->Range<int64_t>(
      "shared_memory_bytes", absl::GetFlag(FLAGS_shared_memory_bytes), 4096, kMaxBytes - 4096);
  options->client_bytes = check->Range<int64_t>(
      "client_shared_memory_bytes", absl::GetFlag(FLAGS_client_shared_memory_bytes), 0, kMaxBytes);
  options->client_regions =
      check->Range("client_shared_regions", absl::GetFlag(FLAGS_client_shared_regions), 1, 1024);
}

int64_t MachineMemoryBytes() { return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE); }

kernels::Accumulate ReadAccumulate(Checker* check) {
  const std::string name = absl::GetFlag(FLAGS_accumulate);
  for (const auto accumulate : {kernels::Accumulate::kFloat32, kernels::Accumulate::kFloat16}) {
    if (name == kernels::Name(accumulate)) return accumulate;
  }
  check->Require(false, "accumulate", name, "float32 or float16");
  return kernels::Accumulate::kFloat32;
}

void ReadCpuOptions(CpuDevice::Options* options, Checker* check) {
  options->threads = check->Range("cpu_threads", absl::GetFlag(FLAGS_cpu_threads), 0, 4096);
  int64_t kv_bytes = absl::GetFlag(FLAGS_kv_memory_bytes);
  if (kv_bytes == 0) kv_bytes = std::max(MachineMemoryBytes() / 4, int64_t{64} << 20);
  options->kv_memory_bytes = kv_bytes;
  options->kv_hot_bytes =
      check->Range<int64_t>("kv_hot_bytes", absl::GetFlag(FLAGS_kv_hot_bytes), 0, kv_bytes);
  options->share_prefixes = absl::GetFlag(FLAGS_share_prefixes);
}

CudaDevice::L2Window ReadL2Window(Checker* check) {
  using L2Window = CudaDevice::L2Window;
  const std::string name = absl::GetFlag(FLAGS_l2_window);
  if (name == "on") return L2Window::kOn;
  if (name == "off") return L2Window::kOff;
  check->Require(name == "auto", "l2_window", name, "auto, on or off");
  return L2Window::kAuto;
}

WaitStrategy ReadWaitStrategy(Checker* check) {
  const std::string name = absl::GetFlag(FLAGS_wait_strategy);
  if (name == "spin") return WaitStrategy::kSpin;
  if (name == "block") return WaitStrategy::kBlock;
  check->Require(name == "yield", "wait_strategy", name, "spin, yield or block");
  return WaitStrategy::kYield;
}

void ReadCudaOptions(CudaDevice::Options* options, Checker* check) {
  options->lanes = check->Range("lanes", absl::GetFlag(FLAGS_lanes), 1, 64);
  options->slots = check->Range("lane_slots", absl::GetFlag(FLAGS_lane_slots), 1, 16);
  options->wait = ReadWaitStrategy(check);
  options->idle_spin = std::chrono::microseconds(
      check->Range<int64_t>("idle_spin_us", absl::GetFlag(FLAGS_idle_spin_us), 0, 1'000'000'000));
  options->direct_io_bytes = check->Range<int64_t>(
      "direct_io_bytes", absl::GetFlag(FLAGS_direct_io_bytes), 0, int64_t{1} << 32);
  options->kv_memory_bytes = absl::GetFlag(FLAGS_kv_memory_bytes);
  options->staging_memory_bytes = absl::GetFlag(FLAGS_staging_memory_bytes);
  options->max_request_bytes = absl::GetFlag(FLAGS_max_message_bytes);
  options->l2_window = ReadL2Window(check);
  options->l2_budget_bytes = check->Range<int64_t>(
      "l2_budget_bytes", absl::GetFlag(FLAGS_l2_budget_bytes), 0, int64_t{1} << 40);
}

// N of each cuda:N.
std::vector<int> ReadOrdinals(const std::string& device, Checker* check) {
  std::vector<int> ordinals;
  for (absl::string_view gpu : absl::StrSplit(device, ',')) {
    int ordinal = -1;
    check->Require(absl::ConsumePrefix(&gpu, "cuda:") && absl::SimpleAtoi(gpu, &ordinal) &&
                       ordinal >= 0 && std::count(ordinals.begin(), ordinals.end(), ordinal) == 0,
                   "device", device, "auto, cpu or cuda:N[,cuda:M...], each GPU once");
    ordinals.push_back(ordinal);
  }
  return ordinals;
}

void ReadDeviceOptions(DeviceOptions* options, Checker* check) {
  const std::string device = absl::GetFlag(FLAGS_device);
  std::vector<int> ordinals = {0};
  if (device == "cpu") {
    options->kind = DeviceOptions::Kind::kCpu;
  } else if (device != "auto") {
    options->kind = DeviceOptions::Kind::kCuda;
    ordinals = ReadOrdinals(device, check);
  }
  if (const int64_t bytes = absl::GetFlag(FLAGS_kv_memory_bytes); bytes != 0) {
    check->Range<int64_t>("kv_memory_bytes", bytes, 4 << 20, int64_t{1} << 44);
  }
  ReadCpuOptions(&options->cpu, check);
  CudaDevice::Options cuda;
  ReadCudaOptions(&cuda, check);
  options->cpu.accumulate = cuda.accumulate = ReadAccumulate(check);
  options->cuda.assign(ordinals.size(), cuda);
  for (size_t i = 0; i < ordinals.size(); ++i) options->cuda[i].ordinal = ordinals[i];
}

std::vector<int> ReadCores(Checker* check) {
  const std::string list = absl::GetFlag(FLAGS_pin_threads);
  if (list.empty()) return {};
  const std::vector<int> allowed = AllowedCores();
  const std::vector<int> cores = ParseCores(list).value_or(std::vector<int>{-1});
  const bool all_allowed = std::all_of(cores.begin(), cores.end(), [&](int core) {
    return std::count(allowed.begin(), allowed.end(), core) > 0;
  });
  check->Require(all_allowed, "pin_threads", list,
                 absl::StrCat("a list such as 2-5,8, without repeats, of the cores to be had: ",
                              absl::StrJoin(allowed, ",")));
  return cores;
}

}  // namespace

absl::StatusOr<Options> ParseOptions(int argc, char** argv) {
  ConfigureUsage();
  if (absl::Status status = ReadEnvironment(); !status.ok()) return status;
  if (absl::Status status = ReadCommandLine(argc, argv); !status.ok()) return status;

  constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();
  Options options;
  Checker check;
  options.server.listen = absl::GetFlag(FLAGS_listen);
  CheckAddresses(options.server.listen, &check);
  // gRPC counts message bytes in an int.
  options.server.max_message_bytes = check.Range<int64_t>(
      "max_message_bytes", absl::GetFlag(FLAGS_max_message_bytes), 1024, kMaxInt);
  options.server.transport_memory_bytes =
      check.Range<int64_t>("transport_memory_bytes", absl::GetFlag(FLAGS_transport_memory_bytes),
                           2 * absl::GetFlag(FLAGS_max_message_bytes), int64_t{1} << 46);
  options.server.max_stream_inflight =
      check.Range("max_stream_inflight", absl::GetFlag(FLAGS_max_stream_inflight), 1, 65536);
  ReadSharedMemoryOptions(&options.server.shared_memory, &check);
  options.server.enable_echo = absl::GetFlag(FLAGS_enable_echo);
  options.server.version = FLASHCORE_VERSION;

  options.engine.staging_memory_bytes = check.Range<int64_t>(
      "staging_memory_bytes", absl::GetFlag(FLAGS_staging_memory_bytes), 1 << 20, int64_t{1} << 46);
  options.engine.staging_wait = std::chrono::milliseconds(
      check.Range("staging_wait_ms", absl::GetFlag(FLAGS_staging_wait_ms), 0, 3'600'000));
  options.engine.max_waiting_bytes = options.server.transport_memory_bytes / 2;
  options.engine.max_spans = check.Range("max_spans", absl::GetFlag(FLAGS_max_spans), 1, 65536);
  options.engine.max_heads = check.Range("max_heads", absl::GetFlag(FLAGS_max_heads), 1, 65536);
  options.engine.max_request_flop =
      1e9 * check.Range("max_request_gflop", absl::GetFlag(FLAGS_max_request_gflop), 1e-3, 1e12);
  Batcher::Options& batcher = options.engine.batcher;
  batcher.max_queue_requests =
      check.Range("max_queue_requests", absl::GetFlag(FLAGS_max_queue_requests), 1, 1 << 20);
  batcher.max_batch_requests =
      check.Range("max_batch_requests", absl::GetFlag(FLAGS_max_batch_requests), 1, 1 << 20);
  batcher.max_batch_tokens =
      check.Range<int64_t>("max_batch_tokens", absl::GetFlag(FLAGS_max_batch_tokens), 1, kMaxInt);
  batcher.max_queue_delay = std::chrono::microseconds(check.Range<int64_t>(
      "max_queue_delay_us", absl::GetFlag(FLAGS_max_queue_delay_us), 0, 1'000'000));
  ReadSequenceOptions(&options.engine.sequences, &check);
  options.engine.sequences.max_heads = options.engine.max_heads;

  ReadDeviceOptions(&options.device, &check);
  options.cores = ReadCores(&check);
  options.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  options.metrics_token_file = absl::GetFlag(FLAGS_metrics_token_file);
  options.drain_timeout = absl::Seconds(
      check.Range("drain_timeout_s", absl::GetFlag(FLAGS_drain_timeout_s), 0.0, 86400.0));
  check.Require(ParseLogFormat(absl::GetFlag(FLAGS_log_format), &options.log.format), "log_format",
                absl::GetFlag(FLAGS_log_format), "auto, json or text");
  check.Require(ParseLogLevel(absl::GetFlag(FLAGS_log_level), &options.log.min_level), "log_level",
                absl::GetFlag(FLAGS_log_level), "debug, info, warning or error");
  if (!check.status().ok()) return check.status();
  return options;
}

}  // namespace flashcore::server

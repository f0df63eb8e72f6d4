#include "server/resource_options.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/base/cores.h"
#include "server/kv/arena.h"

ABSL_FLAG(int64_t, max_queue_delay_us, 0,
          "Microseconds that a request may wait for others to share its batch while a lane is "
          "idle. 0: it does not wait.");

ABSL_FLAG(
    std::string, device, "auto",
    "Devices to compute on: cpu; cuda:N, or several with commas between them; or auto: cuda:0 "
    "if it can be used, else the CPU.");
ABSL_FLAG(std::string, accumulate, "float32",
          "Type in which kernels sum: float32, or float16 (GPUs only, FP16 only). float16 is less "
          "exact and can overflow.");
ABSL_FLAG(
    int32_t, cpu_threads, 0,
    "Threads of the CPU device. 0: one per core, or as many as a container has CPU time for.");
ABSL_FLAG(int32_t, lanes, 2,
          "Lanes of each GPU. A lane is one thread that launches batches, with a stream and device "
          "memory of its own, so that the copies of one launch overlap the kernels of another. The "
          "CPU device has one lane.");
ABSL_FLAG(int64_t, idle_spin_us, 1000,
          "Microseconds that an idle lane of a GPU polls for work before its thread sleeps. It "
          "keeps a core busy meanwhile; only one lane polls at a time.");
ABSL_FLAG(int64_t, direct_io_bytes, int64_t{1} << 20,
          "If Q, K, V and O of a launch have at most this many bytes together, a GPU reads and "
          "writes them in pinned host memory instead of copying them. Inline K/V that would be "
          "read more than once is still copied. 0: copy always.");
ABSL_FLAG(std::string, l2_window, "auto",
          "Whether a GPU keeps the hot segment (see --l2_budget_bytes) in its L2 cache: on, off, "
          "or auto: only if a measurement at start finds it faster.");
ABSL_FLAG(int64_t, l2_budget_bytes, 0,
          "Upper limit of the hot segment: the first bytes of a device's K/V memory, which the L2 "
          "window of a GPU covers and pinned sequences compete for. 0: as much as a GPU allows. "
          "The CPU device has one of just this size, to try out placement: it pins nothing in its "
          "cache.");
ABSL_FLAG(std::string, pin_threads, "",
          "Cores that the server runs on, such as 2-5,8. Each lane's thread has one of the first "
          "cores to itself; all other threads share the rest. Empty: any core.");

ABSL_FLAG(
    int64_t, kv_memory_bytes, 0,
    "Memory for resident K/V on each device. 0: on a GPU 85% of what is free once the lanes "
    "have their memory; on the CPU device what the other budgets leave of a container's memory, or "
    "a quarter of a machine's. There the system provides it as it is used, and takes it back.");
ABSL_FLAG(std::string, evict, "none",
          "When K/V memory or the memory for sequence records is full: none (refuse more) or lru "
          "(delete the least recently used sequence of the client that holds the most). At a limit "
          "of one client, lru deletes the least recently used sequence of that client.");
ABSL_FLAG(double, sequence_idle_timeout_s, 3600,
          "Seconds after which a sequence that nobody uses is deleted. 0: never.");
ABSL_FLAG(
    int64_t, sequence_metadata_bytes, 0,
    "Limit of the host memory for sequence records and page tables, for each device. 0: 256 "
    "MiB, or for all devices 1/32 of the memory of the container or machine if that is less.");
ABSL_FLAG(
    int64_t, staging_memory_bytes, 0,
    "Limit of the host memory for tensors of requests in flight, for each device. With a "
    "GPU, all of it is allocated and pinned at start. 0: 1 GiB, or for all devices 1/8 of the "
    "memory of the container or machine if that is less, but for each at least twice "
    "--max_message_bytes.");
ABSL_FLAG(int64_t, client_staging_bytes, 0,
          "Limit of the staging memory of one client, for each device. Results that it has not "
          "read count. A request beyond it waits for --staging_wait_ms and then gets "
          "RESOURCE_EXHAUSTED. If unread results leave no room for another client, the client with "
          "the most loses its oldest: their RPCs are cancelled. 0: a quarter of "
          "--staging_memory_bytes, or twice --max_message_bytes if that is more.");
ABSL_FLAG(
    int64_t, unsent_reply_bytes, 0,
    "Limit of the memory for replies that clients have not read, without the staging memory "
    "of their tensors; one client gets a quarter of it. A client with three quarters of that "
    "gets RESOURCE_EXHAUSTED; beyond it, its oldest replies are dropped: the RPC is cancelled, "
    "or its connection on --local_listen closed. 0: 64 MiB, or 1/32 of the memory of the container "
    "or machine if that is less.");
ABSL_FLAG(
    int32_t, staging_wait_ms, 500,
    "Milliseconds that a request waits for staging memory while it is full, in arrival "
    "order, before it gets RESOURCE_EXHAUSTED. Waiting requests hold at most half of "
    "--transport_memory_bytes; beyond it, the newest of the client with the most is refused. 0: "
    "do not wait.");
ABSL_FLAG(
    int64_t, transport_memory_bytes, 0,
    "Limit of the memory for messages being received, over all gRPC connections. Beyond it, "
    "RPCs are cancelled. At least twice --max_message_bytes. On --local_listen, frames that "
    "have not completely arrived may take as much again, and so may unanswered calls; one "
    "client gets a quarter of each, of frames at least 4 MiB. Beyond it, its connection with "
    "the most of such frames is closed, and its calls are not read. 0: 256 MiB, or 1/8 of the "
    "memory of the container or machine if that is less, but twice --max_message_bytes.");
ABSL_FLAG(
    int64_t, shared_memory_bytes, 0,
    "Limit of the memory that all clients of the local socket share with the server; one client "
    "gets half of it, see --client_kv_bytes. Beyond it, the client that shares the most loses the "
    "connection of its newest region, unless the client that asks would then share as much. As "
    "much again may be mapped until the requests of such connections end. With a GPU, it is "
    "pinned. 0: 1 GiB, or 1/8 of the memory of the container or machine if that is less.");

ABSL_FLAG(int64_t, device_tensor_bytes, 0,
          "With --local_device_tensors, limit of the GPU memory that all clients of the local "
          "socket have for tensors; one client gets half of it, see --client_kv_bytes. Beyond it, "
          "the client that has the most loses its connection, as with --shared_memory_bytes. With "
          "--kv_memory_bytes=0, each GPU keeps it free. 0: 1 GiB.");

ABSL_FLAG(int64_t, max_message_bytes, 0,
          "Size limit of one gRPC message. 0: 64 MiB, or 1/16 of the memory of the container or "
          "machine if that is less.");
ABSL_FLAG(double, max_request_gflop, 0,
          "Limit of the work in one request, in 10^9 floating-point operations, masks not counted. "
          "0: about a second of the device's time, by an estimate: 120 for each CPU thread with "
          "AVX2, 60,000 for an L4. GetServerInfo tells it.");
ABSL_FLAG(int32_t, max_launch_ms, 10,
          "Milliseconds that one launch should take at most, by an estimate. Requests that need "
          "more run in several launches, and those of other clients run in between. The results "
          "have the same bits.");
ABSL_FLAG(int32_t, max_queue_requests, 1024,
          "Limit of the requests that wait for a lane, for each device. One more gets "
          "RESOURCE_EXHAUSTED.");
ABSL_FLAG(int64_t, client_kv_bytes, -1,
          "Limit of the K/V memory of one client's sequences, on each device. -1: half of the "
          "device's K/V memory. 0: no limit, for a server with a single client, which then also "
          "gets all of --sequence_metadata_bytes (else a quarter), of --shared_memory_bytes and of "
          "--device_tensor_bytes (else half).");
ABSL_FLAG(int64_t, client_sequences, 16384,
          "Limit of the sequences of one client, on each device. 0: no limit.");

namespace flashcore::server {
namespace {

// gRPC counts message bytes in an int.
constexpr int64_t kMaxMessageBytes = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxBudgetBytes = int64_t{1} << 46;

// 0, for a default by the host's memory, or in [low, high].
int64_t ReadBudget(const absl::Flag<int64_t>& flag, int64_t low, int64_t high, FlagChecker* check) {
  return absl::GetFlag(flag) == 0 ? 0 : check->Range(flag, low, high);
}

void ReadSequenceOptions(const Budgets& budgets, SequenceStore::Options* options,
                         FlagChecker* check) {
  options->evict_lru = check->Choice<bool>(FLAGS_evict, {{"none", false}, {"lru", true}});
  const double timeout_s = check->Range(FLAGS_sequence_idle_timeout_s, 0.0, 1e8);
  options->idle_timeout =
      std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(timeout_s));
  const int64_t client_kv_bytes = check->Range(FLAGS_client_kv_bytes, -1, kMaxBudgetBytes);
  options->client_kv_bytes =
      client_kv_bytes < 0 ? SequenceOptions::kHalfOfTheMemory : client_kv_bytes;
  options->client_sequences = check->Range(FLAGS_client_sequences, 0, int64_t{1} << 31);
  options->metadata_bytes = budgets.sequence_metadata;
  options->client_metadata_bytes = client_kv_bytes == 0 ? 0 : options->metadata_bytes / 4;
}

size_t ReadL2BudgetBytes(FlagChecker* check) {
  return check->Range(FLAGS_l2_budget_bytes, 0, int64_t{1} << 40);
}

void ReadCpuOptions(const Budgets& budgets, CpuDevice::Options* options, FlagChecker* check) {
  options->threads = check->Range(FLAGS_cpu_threads, 0, 4096);
  options->kv_memory_bytes = budgets.kv;
  options->kv_hot_bytes = std::min(ReadL2BudgetBytes(check), options->kv_memory_bytes);
}

void ReadCudaOptions(const Budgets& budgets, CudaDevice::Options* options, FlagChecker* check) {
  options->lanes = check->Range(FLAGS_lanes, 1, 64);
  options->idle_spin =
      std::chrono::microseconds(check->Range(FLAGS_idle_spin_us, 0, 1'000'000'000));
  options->direct_io_bytes = check->Range(FLAGS_direct_io_bytes, 0, int64_t{1} << 32);
  options->kv_memory_bytes = absl::GetFlag(FLAGS_kv_memory_bytes);
  options->staging_memory_bytes = budgets.staging;
  options->max_request_bytes = budgets.message;
  using L2Window = CudaDevice::L2Window;
  options->l2_window = check->Choice<L2Window>(
      FLAGS_l2_window, {{"auto", L2Window::kAuto}, {"on", L2Window::kOn}, {"off", L2Window::kOff}});
  options->l2_budget_bytes = ReadL2BudgetBytes(check);
}

// The N of each cuda:N.
std::vector<int> ReadOrdinals(const std::string& device, FlagChecker* check) {
  std::vector<int> ordinals;
  for (absl::string_view gpu : absl::StrSplit(device, ',')) {
    int ordinal = -1;
    check->Require(absl::ConsumePrefix(&gpu, "cuda:") && absl::SimpleAtoi(gpu, &ordinal) &&
                       ordinal >= 0 && std::count(ordinals.begin(), ordinals.end(), ordinal) == 0,
                   FLAGS_device, device, "auto, cpu or cuda:N[,cuda:M...], each GPU once");
    ordinals.push_back(ordinal);
  }
  return ordinals;
}

// A client gets a quarter of the staging memory by default, but any message that is not too large,
// together with its results, finds room.
size_t ClientStagingBytes(const Budgets& budgets, FlagChecker* check) {
  const int64_t total = budgets.staging;
  const int64_t message = budgets.message;
  const int64_t client = absl::GetFlag(FLAGS_client_staging_bytes);
  if (client == 0) return std::min(total, std::max(total / 4, 2 * message));
  check->Require(client >= message && client <= total, FLAGS_client_staging_bytes,
                 absl::StrCat(client),
                 absl::StrCat("0, or from --max_message_bytes, ", message,
                              ", to --staging_memory_bytes, ", total));
  return client;
}

}  // namespace

Budgets ReadBudgets(const HostMemory& memory, const MemoryUse& use, FlagChecker* check) {
  constexpr int64_t kMaxSharedBytes = (int64_t{1} << 40) - 4096;  // the limit of FaultGuard
  Budgets given;
  given.message = ReadBudget(FLAGS_max_message_bytes, 1024, kMaxMessageBytes, check);
  given.staging = ReadBudget(FLAGS_staging_memory_bytes, 1 << 20, kMaxBudgetBytes, check);
  given.transport = ReadBudget(FLAGS_transport_memory_bytes, 2048, kMaxBudgetBytes, check);
  given.unsent_replies = ReadBudget(FLAGS_unsent_reply_bytes, 1 << 20, kMaxBudgetBytes, check);
  given.sequence_metadata =
      ReadBudget(FLAGS_sequence_metadata_bytes, 1 << 20, kMaxBudgetBytes, check);
  given.shared = ReadBudget(FLAGS_shared_memory_bytes, 4096, kMaxSharedBytes, check);
  given.kv =
      ReadBudget(FLAGS_kv_memory_bytes, kMinKvBytes, static_cast<int64_t>(Arena::kMaxBytes), check);
  Budgets budgets = DivideMemory(memory, use, given);
  budgets.kv = std::min(budgets.kv, static_cast<int64_t>(Arena::kMaxBytes));
  if (given.transport > 0) {
    check->Range(FLAGS_transport_memory_bytes, 2 * budgets.message, kMaxBudgetBytes);
  }
  // With a GPU all of it is taken at start.
  const int64_t most_staging = use.pinned_staging ? memory.bytes / use.devices : kMaxBudgetBytes;
  check->Require(
      budgets.staging <= most_staging, FLAGS_staging_memory_bytes, absl::StrCat(budgets.staging),
      absl::StrCat("at most ", most_staging, ": each GPU takes as much at start, of the ",
                   memory.bytes, " bytes that there are"));
  check->Require(budgets.message <= budgets.staging, FLAGS_staging_memory_bytes,
                 absl::StrCat(budgets.staging),
                 absl::StrCat("at least --max_message_bytes, ", budgets.message));
  return budgets;
}

void ReadSharedMemoryOptions(const Budgets& budgets, SharedMemory::Options* options) {
  options->total_bytes = budgets.shared;
  options->client_bytes = absl::GetFlag(FLAGS_client_kv_bytes) == 0 ? 0 : options->total_bytes / 2;
}

void ReadDeviceMemoryOptions(bool has_device_tensors, DeviceMemory::Options* options,
                             FlagChecker* check) {
  constexpr int64_t kLeast = int64_t{2} << 20;
  const int64_t given = ReadBudget(FLAGS_device_tensor_bytes, kLeast, kMaxBudgetBytes, check);
  if (!has_device_tensors) {
    check->Require(given == 0, FLAGS_device_tensor_bytes, absl::StrCat(given),
                   "set with --local_device_tensors only");
    options->total_bytes = 0;
    return;
  }
  options->total_bytes = given > 0 ? given : int64_t{1} << 30;
  options->client_bytes = absl::GetFlag(FLAGS_client_kv_bytes) == 0 ? 0 : options->total_bytes / 2;
}

void ReadDevices(DeviceOptions* options, FlagChecker* check) {
  const std::string device = absl::GetFlag(FLAGS_device);
  if (device == "cpu") {
    options->kind = DeviceOptions::Kind::kCpu;
  } else if (device != "auto") {
    options->kind = DeviceOptions::Kind::kCuda;
    const std::vector<int> ordinals = ReadOrdinals(device, check);
    options->cuda.resize(ordinals.size());
    for (size_t i = 0; i < ordinals.size(); ++i) options->cuda[i].ordinal = ordinals[i];
  }
}

void ReadDeviceOptions(const Budgets& budgets, size_t device_tensor_bytes, DeviceOptions* options,
                       FlagChecker* check) {
  ReadCpuOptions(budgets, &options->cpu, check);
  CudaDevice::Options cuda;
  ReadCudaOptions(budgets, &cuda, check);
  cuda.shared_bytes = device_tensor_bytes;
  using kernels::Accumulate;
  options->cpu.accumulate = cuda.accumulate = check->Choice<Accumulate>(
      FLAGS_accumulate, {{"float32", Accumulate::kFloat32}, {"float16", Accumulate::kFloat16}});
  for (CudaDevice::Options& gpu : options->cuda) {
    cuda.ordinal = gpu.ordinal;
    gpu = cuda;
  }
}

std::vector<int> ReadCores(FlagChecker* check) {
  const std::string list = absl::GetFlag(FLAGS_pin_threads);
  if (list.empty()) return {};
  const std::vector<int> allowed = AllowedCores();
  const std::vector<int> cores = ParseCores(list).value_or(std::vector<int>{-1});
  const bool all_allowed = std::all_of(cores.begin(), cores.end(), [&](int core) {
    return std::count(allowed.begin(), allowed.end(), core) > 0;
  });
  check->Require(all_allowed, FLAGS_pin_threads, list,
                 absl::StrCat("a list such as 2-5,8, without repeats, of the cores to be had: ",
                              absl::StrJoin(allowed, ",")));
  return cores;
}

void ReadEngineOptions(const Budgets& budgets, Engine::Options* options, FlagChecker* check) {
  options->staging_memory_bytes = budgets.staging;
  options->client_staging_bytes = ClientStagingBytes(budgets, check);
  options->staging_wait =
      std::chrono::milliseconds(check->Range(FLAGS_staging_wait_ms, 0, 3'600'000));
  options->max_waiting_bytes = budgets.transport / 2;
  options->max_request_flop = 1e9 * check->Range(FLAGS_max_request_gflop, 0, 1e12);
  options->batcher.max_launch =
      std::chrono::milliseconds(check->Range(FLAGS_max_launch_ms, 1, 60'000));
  options->batcher.max_queue_requests = check->Range(FLAGS_max_queue_requests, 1, 1 << 20);
  options->batcher.max_queue_delay =
      std::chrono::microseconds(check->Range(FLAGS_max_queue_delay_us, 0, 1'000'000));
  ReadSequenceOptions(budgets, &options->sequences, check);
}

}  // namespace flashcore::server

// flashcore-server: connects options, devices, engines, transport and metrics, and drains them on
// SIGTERM, SIGINT or SIGXCPU. SIGHUP reads the credential files again.
//
// Exit status: 0 after a complete drain; 1 if the server could not start, if a device was lost, if
// a listener died, or if a launch was still running when the drain timed out; 2 for a bad flag or a
// limit of the process that is too small; 128 + the signal's number on SIGTERM or SIGINT more than
// a second after the first.
#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "google/protobuf/stubs/logging.h"
#include "proto/grpc/grpc_compat.h"
#include "server/base/clock.h"
#include "server/base/cores.h"
#include "server/base/signal_policy.h"
#include "server/device/open_device.h"
#include "server/drain.h"
#include "server/engine/fleet.h"
#include "server/options.h"
#include "server/process_needs.h"
#include "server/telemetry/log.h"
#include "server/telemetry/metrics.h"
#include "server/telemetry/metrics_server.h"
#include "server/transport/server.h"

namespace flashcore::server {
namespace {

// By default glibc returns the memory of a freed large message to the system, and every next
// message pays for page faults. It also has one arena per thread, so memory freed by one thread is
// not reused by another. Keeping the memory in one arena halves gRPC's CPU time for a 1.5 MB
// message (tests/bench/notes). Call before the first thread starts.
void KeepFreedMemory() {
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // glibc's maximum
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
}

// Writes gRPC's messages to our log.
void LogFromGrpc(gpr_log_func_args* args) {
  const LogLevel level =
      args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug;
  // Clients cause errors too, such as a TLS handshake that fails.
  static LogLimiter limiter(10);
  if (level == LogLevel::kWarning && !limiter.Admit()) return;
  DefaultLogger().Log(level, args->message,
                      {{"component", "grpc"}, {"file", args->file}, {"line", args->line}});
}

// Writes protobuf's messages to our log, at debug level: clients cause them with malformed
// messages.
void LogFromProtobuf(google::protobuf::LogLevel /*level*/, const char* file, int line,
                     const std::string& message) {
  LogDebug(message, {{"component", "protobuf"}, {"file", file}, {"line", line}});
}

Metrics::Options MetricsOptions(const Options& options,
                                const std::vector<std::unique_ptr<Device>>& devices) {
  Metrics::Options metrics = {options.server.version, {}, Server::Methods(options.server)};
  for (const auto& device : devices) {
    const DeviceInfo& info = device->info();
    metrics.devices.push_back({info.id, info.name, info.arch, info.l2_window_bytes,
                               info.l2_persisting_bytes,
                               options.engine.batcher.max_queue_requests});
  }
  return metrics;
}

void LogDevice(const Device& device, const Options& options, const std::string& reason) {
  const DeviceInfo& info = device.info();
  LogInfo("device", {{"device", info.id},
                     {"name", info.name},
                     {"arch", info.arch},
                     {"compute_units", info.compute_units},
                     {"lanes", info.lanes},
                     {"accumulate", kernels::Name(options.device.cpu.accumulate)},
                     {"kv_memory_bytes", device.kv_memory().bytes},
                     {"kv_hot_bytes", device.kv_memory().hot_bytes},
                     {"l2_window_bytes", info.l2_window_bytes},
                     {"l2_persisting_bytes", info.l2_persisting_bytes},
                     {"reason", reason}});
  if (!info.l2_note.empty()) {
    LogInfo("no L2 window", {{"device", info.id}, {"reason", info.l2_note}});
  }
}

// The memory that the server may take, and warnings of flags that ask for more than there is.
void LogMemory(const Options& options, const std::vector<std::unique_ptr<Device>>& devices) {
  const Budgets& budgets = options.budgets;
  const int64_t there = options.memory.bytes;
  const int64_t kv = devices.front()->info().id == "cpu" ? budgets.kv : 0;  // else the GPUs'
  const int64_t total = BytesBesideKv(options.memory, options.memory_use, budgets) + kv;
  LogInfo("memory", {{"of", options.memory.is_containers ? "container" : "machine"},
                     {"bytes", there},
                     {"budgets_bytes", total},
                     {"kv_memory_bytes", kv},
                     {"staging_memory_bytes", budgets.staging},
                     {"transport_memory_bytes", budgets.transport},
                     {"unsent_reply_bytes", budgets.unsent_replies},
                     {"sequence_metadata_bytes", budgets.sequence_metadata},
                     {"shared_memory_bytes", budgets.shared},
                     {"max_message_bytes", budgets.message},
                     {"cores", UsableCores()}});
  for (const auto& [flag, bytes] : std::initializer_list<std::pair<const char*, int64_t>>{
           {"kv_memory_bytes", kv},
           {"staging_memory_bytes", budgets.staging},
           {"transport_memory_bytes", budgets.transport},
           {"unsent_reply_bytes", budgets.unsent_replies},
           {"sequence_metadata_bytes", budgets.sequence_metadata}}) {
    if (bytes <= there) continue;
    LogWarning("a budget is more than the memory there is",
               {{"flag", flag}, {"value", bytes}, {"bytes", there}});
  }
  if (total > there) {
    LogWarning("the budgets together are more than the memory there is",
               {{"budgets_bytes", total}, {"bytes", there}});
  }
}

void LogDeviceTensors(const std::vector<std::unique_ptr<Device>>& devices) {
  for (const std::unique_ptr<Device>& device : devices) {
    const DeviceInfo& info = device->info();
    if (info.uuid.empty()) {
      LogWarning("--local_device_tensors: the device has no memory of its own for tensors",
                 {{"device", info.id}});
    } else if (!info.has_mps) {
      LogWarning(
          "device tensors without MPS: the GPU switches between the processes that use it, which "
          "costs a request about 0.3 ms; deploy/README.md says how to start MPS",
          {{"device", info.id}});
    }
  }
}

void SetGauges(const Fleet& fleet, Metrics* metrics) {
  const auto set = [](Gauge& gauge, size_t value) { gauge.Set(static_cast<double>(value)); };
  for (size_t i = 0; i < fleet.engines().size(); ++i) {
    Engine& engine = *fleet.engines()[i];
    DeviceMetrics& device = metrics->device(i);
    set(device.staging_used_bytes, engine.staging().used_bytes());
    set(device.staging_free_bytes, engine.staging().free_bytes());
    set(device.staging_waiting, engine.staging().waiting());
    const SequenceStore::Stats stats = engine.sequences().stats();
    set(device.sequences, stats.sequences);
    set(device.kv_hot_used_bytes, stats.hot.used_bytes);
    set(device.kv_hot_free_bytes, stats.hot.capacity_bytes - stats.hot.used_bytes);
    set(device.kv_cold_used_bytes, stats.cold.used_bytes);
    set(device.kv_cold_free_bytes, stats.cold.capacity_bytes - stats.cold.used_bytes);
  }
}

// Assigns one core to each lane of `devices`, from the front of `cores`. The calling thread, and
// the threads that it starts from now on, stay on the remaining cores. No `cores`: does nothing.
absl::Status PinThreads(const std::vector<int>& cores,
                        const std::vector<std::unique_ptr<Device>>& devices,
                        std::vector<int>* lane_cores) {
  if (cores.empty()) return absl::OkStatus();
  size_t lanes = 0;
  for (const auto& device : devices) lanes += static_cast<size_t>(device->info().lanes);
  if (cores.size() <= lanes) {
    return absl::InvalidArgumentError(absl::StrCat("--pin_threads: ", cores.size(), " cores for ",
                                                   lanes, " lanes and at least one for the rest"));
  }
  const absl::Span<const int> all(cores);
  lane_cores->assign(all.begin(), all.begin() + lanes);
  return StayOnCores(all.subspan(lanes));
}

int Fail(absl::string_view what, const absl::Status& status) {
  LogError(what, {{"error", status.message()}});
  return 1;
}

// The endpoints for scrapes and probes; null where `options` disable one.
struct HttpEndpoints {
  std::unique_ptr<MetricsServer> metrics;
  std::unique_ptr<MetricsServer> probes;
};

absl::StatusOr<HttpEndpoints> StartHttpEndpoints(const Options& options, Metrics* metrics,
                                                 const std::atomic<bool>* serving) {
  HttpEndpoints endpoints;
  const auto ready = [serving] { return serving->load(); };
  if (!options.metrics_listen.empty()) {
    auto server = MetricsServer::Start({options.metrics_listen, options.metrics_token_file, ready,
                                        &metrics->metrics_token_reload_failures},
                                       metrics);
    if (!server.ok()) return server.status();
    LogInfo("metrics", {{"address", (*server)->address()}, {"path", "/metrics"}});
    endpoints.metrics = *std::move(server);
  }
  if (!options.probe_listen.empty()) {
    auto server = MetricsServer::Start({options.probe_listen, "", ready}, /*metrics=*/nullptr);
    if (!server.ok()) return server.status();
    LogInfo("probes", {{"address", (*server)->address()}, {"path", "/healthz,/readyz"}});
    endpoints.probes = *std::move(server);
  }
  return endpoints;
}

// `threads`: that the server ever has.
int Run(const Options& options, int threads) {
  // CUDA streams that share a hardware connection wait for each other; the default is 8.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  const SteadyClock clock;
  auto opened = OpenDevices(options.device, &clock);
  if (!opened.ok()) return Fail("cannot use the device", opened.status());
  Metrics metrics(MetricsOptions(options, opened->devices));
  // Drains, and then exits with 1. Only once: a second signal would cut the drain short.
  std::atomic<bool> failed{false};
  const auto stop_after_failure = [&failed] {
    if (!failed.exchange(true)) kill(getpid(), SIGTERM);
  };
  Engine::Options engine_options = options.engine;
  engine_options.on_device_lost = [&](const DeviceInfo& device, const absl::Status& status) {
    LogError("the device is lost", {{"device", device.id}, {"error", status.message()}});
    stop_after_failure();
  };
  absl::Status pinned = PinThreads(options.cores, opened->devices, &engine_options.lane_cores);
  if (!pinned.ok()) return Fail("cannot pin threads", pinned);
  // Only now: the first record starts the log's thread, which must not run on the lanes' cores.
  LogMemory(options, opened->devices);
  if (options.server.device_memory.total_bytes > 0) LogDeviceTensors(opened->devices);
  for (const std::string& variable : options.unknown_variables) {
    LogWarning("an environment variable is not of a flag: it has no effect",
               {{"variable", variable}});
  }
  for (const auto& device : opened->devices) LogDevice(*device, options, opened->reason);
  Fleet fleet(engine_options, std::move(opened->devices), &clock, &metrics);
  metrics.OnScrape([&] { SetGauges(fleet, &metrics); });

  std::atomic<bool> serving{false};
  auto endpoints = StartHttpEndpoints(options, &metrics, &serving);
  if (!endpoints.ok()) return Fail("cannot serve metrics", endpoints.status());
  Server::Options server_options = options.server;
  LimitConnectionsByOpenFiles(&server_options.connections.max);
  server_options.on_health = [&serving](bool now) { serving = now; };
  server_options.on_dead = [&](const std::string& address, const absl::Status& why) {
    LogError("a listener is dead", {{"address", address}, {"error", why.message()}});
    stop_after_failure();
  };
  // Made now, because a drain must not need a thread, and lasting as long as its thread.
  static auto* const watch = new DrainWatch;
  auto server = Server::Start(server_options, &fleet, &metrics);
  if (!server.ok()) return Fail("cannot serve", server.status());
  LogInfo("serving", {{"version", options.server.version},
                      {"threads", threads},
                      {"addresses", absl::StrJoin((*server)->addresses(), ",")}});
  SignalPolicy policy;
  const int signal = WaitForStopSignal(&policy, clock, [&] {
    LogInfo("SIGHUP: reading the credential files");
    (*server)->ReloadCredentials();
  });
  DropPendingSignals();
  LogInfo("draining",
          {{"signal", strsignal(signal)}, {"timeout", FormatDuration(options.drain_timeout)}});
  return Drain(server->get(), options.drain_timeout, policy, failed, watch);
}

}  // namespace
}  // namespace flashcore::server

int main(int argc, char** argv) {
  flashcore::server::BlockStopSignals();  // first of all: SIGHUP must not end the start
  const auto options = flashcore::server::ParseOptions(argc, argv);
  if (!options.ok()) {
    std::fprintf(stderr, "flashcore-server: %s\n", std::string(options.status().message()).c_str());
    return 2;
  }
  flashcore::server::KeepFreedMemory();
  // Debian builds Abseil without NDEBUG. By default, every lock and unlock in gRPC then looks for
  // deadlocks in a graph of all mutexes, under one global lock.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  signal(SIGPIPE, SIG_IGN);  // writing to a closed pipe or socket is an error, not the end
  flashcore::server::SetDefaultLogger(options->log);
  const auto threads = flashcore::server::TakeFromProcess(*options);
  if (!threads.ok()) {
    std::fprintf(stderr, "flashcore-server: %s\n", std::string(threads.status().message()).c_str());
    return 2;
  }
  flashcore::grpc_compat::SetLogSink(flashcore::server::LogFromGrpc);
  google::protobuf::SetLogHandler(flashcore::server::LogFromProtobuf);
  const int status = flashcore::server::Run(*options, *threads);
  flashcore::server::DefaultLogger().Flush(flashcore::server::kLogFlushTime);
  return status;
}

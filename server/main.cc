// flashcore-server: wires options, device, engine, transport and metrics together, and drains them
// when told to stop.
//
// Exit status: 0 after a full drain; 1 if the server could not start, if a device was lost, or if
// requests were still running when the drain timed out; 2 for a bad flag; 128 + the signal's number
// on a second signal.
#include <grpc/support/log.h>
#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "google/protobuf/stubs/logging.h"
#include "server/base/clock.h"
#include "server/base/cores.h"
#include "server/device/open_device.h"
#include "server/engine/fleet.h"
#include "server/options.h"
#include "server/telemetry/log.h"
#include "server/telemetry/metrics.h"
#include "server/telemetry/metrics_server.h"
#include "server/transport/server.h"

namespace flashcore::server {
namespace {

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// By default glibc gives the memory of a large message back to the system when the message is
// freed, and gets it again, page fault by page fault, for the next; and it has arenas for every
// thread, so that what one thread has freed is of no use to another. Keeping it halves the CPU time
// that gRPC needs for 1.5 MB (tests/bench/notes). Call before the first thread starts.
void KeepFreedMemory() {
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that glibc takes
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
}

// Debian builds Abseil without NDEBUG: every lock and unlock that gRPC makes would enter a graph of
// all mutexes, behind one global lock, to look for deadlocks.
void TrustLockOrder() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

// What is kept should not be much more than pays. Large messages leave a lot behind, also those
// that gRPC refuses before we see them; this gives it back.
void TrimHeap() {
  constexpr size_t kWorthwhileBytes = 32 << 20;
  if (mallinfo2().fordblks >= kWorthwhileBytes) malloc_trim(0);
}

// Meanwhile keeps house.
int WaitForStopSignal() {
  constexpr timespec kInterval = {5, 0};
  const sigset_t signals = StopSignals();
  int signal = -1;
  while ((signal = sigtimedwait(&signals, nullptr, &kInterval)) < 0) TrimHeap();
  return signal;
}

// gRPC's own messages, as records of our log.
void LogFromGrpc(gpr_log_func_args* args) {
  const LogLevel level =
      args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug;
  DefaultLogger().Log(level, args->message,
                      {{"component", "grpc"}, {"file", args->file}, {"line", args->line}});
}

// Protobuf's: what it has to say of a malformed message is for debugging, and a client can make it
// say it as often as it likes.
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

void SetDeviceGauges(Engine* engine, DeviceMetrics* metrics) {
  const auto set = [](Gauge& gauge, size_t value) { gauge.Set(static_cast<double>(value)); };
  set(metrics->staging_used_bytes, engine->staging().used_bytes());
  set(metrics->staging_free_bytes, engine->staging().free_bytes());
  set(metrics->staging_waiting, engine->staging().waiting());
  const SequenceStore::Stats stats = engine->sequences().stats();
  set(metrics->sequences, stats.sequences);
  set(metrics->kv_hot_used_bytes, stats.hot.used_bytes);
  set(metrics->kv_hot_free_bytes, stats.hot.capacity_bytes - stats.hot.used_bytes);
  set(metrics->kv_cold_used_bytes, stats.cold.used_bytes);
  set(metrics->kv_cold_free_bytes, stats.cold.capacity_bytes - stats.cold.used_bytes);
}

void SetGauges(const Fleet& fleet, Metrics* metrics) {
  for (size_t i = 0; i < fleet.engines().size(); ++i) {
    SetDeviceGauges(fleet.engines()[i].get(), &metrics->device(i));
  }
}

// Drains `server`; a second signal meanwhile ends the process at once.
int Drain(Server* server, absl::Duration timeout) {
  std::thread([] {
    const int signal = WaitForStopSignal();
    LogWarning("second signal: exiting at once", {{"signal", strsignal(signal)}});
    _exit(128 + signal);
  }).detach();
  if (server->Drain(timeout)) {
    LogInfo("drained");
    return 0;
  }
  LogError("drain timed out: requests are still running", {{"timeout", FormatDuration(timeout)}});
  // A launch cannot be interrupted, so there is nothing to wait for.
  std::fflush(nullptr);
  _exit(1);
}

// Gives the lanes of `devices` the first of `cores`, one each, and has threads that start from now
// on stay on the rest. Without `cores`, does nothing.
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

int Run(const Options& options) {
  // Streams of a GPU that share a connection to it wait for each other; the default is 8.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  const SteadyClock clock;
  absl::Status pinned = StayOnCores(options.cores);  // the threads of the CPU device, too
  if (!pinned.ok()) return Fail("cannot pin threads", pinned);
  auto opened = OpenDevices(options.device, &clock);
  if (!opened.ok()) return Fail("cannot use the device", opened.status());
  for (const auto& device : opened->devices) LogDevice(*device, options, opened->reason);
  Metrics metrics(MetricsOptions(options, opened->devices));
  std::atomic<bool> device_lost{false};
  Engine::Options engine_options = options.engine;
  engine_options.on_device_lost = [&](const DeviceInfo& device, const absl::Status& status) {
    LogError("the device is lost", {{"device", device.id}, {"error", status.message()}});
    // A second signal, of another device, would cut the drain short.
    if (!device_lost.exchange(true)) kill(getpid(), SIGTERM);
  };
  pinned = PinThreads(options.cores, opened->devices, &engine_options.lane_cores);
  if (!pinned.ok()) return Fail("cannot pin threads", pinned);
  Fleet fleet(engine_options, std::move(opened->devices), &clock, &metrics);
  metrics.OnScrape([&] { SetGauges(fleet, &metrics); });

  std::unique_ptr<MetricsServer> metrics_server;
  if (!options.metrics_listen.empty()) {
    auto started = MetricsServer::Start({options.metrics_listen, options.metrics_token_file,
                                         [&] { return metrics.serving.Value() != 0; }},
                                        &metrics);
    if (!started.ok()) return Fail("cannot serve metrics", started.status());
    metrics_server = *std::move(started);
    LogInfo("metrics", {{"address", metrics_server->address()}, {"path", "/metrics"}});
  }
  auto server = Server::Start(options.server, &fleet, &metrics);
  if (!server.ok()) return Fail("cannot serve", server.status());
  LogInfo("serving", {{"version", options.server.version},
                      {"addresses", absl::StrJoin((*server)->addresses(), ",")}});
  const int signal = WaitForStopSignal();
  LogInfo("draining",
          {{"signal", strsignal(signal)}, {"timeout", FormatDuration(options.drain_timeout)}});
  const int status = Drain(server->get(), options.drain_timeout);
  return device_lost ? 1 : status;
}

}  // namespace
}  // namespace flashcore::server

int main(int argc, char** argv) {
  const auto options = flashcore::server::ParseOptions(argc, argv);
  if (!options.ok()) {
    std::fprintf(stderr, "flashcore-server: %s\n", std::string(options.status().message()).c_str());
    return 2;
  }
  flashcore::server::SetDefaultLogger(options->log);
  gpr_set_log_function(flashcore::server::LogFromGrpc);
  google::protobuf::SetLogHandler(flashcore::server::LogFromProtobuf);
  flashcore::server::KeepFreedMemory();
  flashcore::server::TrustLockOrder();
  // Before any thread starts, so that all inherit it and only WaitForStopSignal sees the signals.
  const sigset_t signals = flashcore::server::StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return flashcore::server::Run(*options);
}

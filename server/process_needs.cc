#include "server/process_needs.h"

#include <sys/resource.h>

#include <algorithm>

#include "server/base/cores.h"
#include "server/base/process_limits.h"
#include "server/base/thread_reserve.h"
#include "server/telemetry/log.h"
#include "server/transport/grpc/grpc_threads.h"

namespace flashcore::server {
namespace {

// Files that are not connections: threads' pollers, devices, logs, HTTP and shared memory.
constexpr rlim_t kOtherFiles = 256;
constexpr rlim_t kFilesOfConnection = 2;  // gRPC's and the accept loop's

// Those that the CUDA driver makes for a GPU.
constexpr int kDriverThreads = 8;

int DeviceThreads(const DeviceOptions& options) {
  using Kind = DeviceOptions::Kind;
  const int housekeeper = 1;
  // The lane's own, and its helpers.
  int cpu = options.cpu.threads > 0 ? options.cpu.threads : UsableCores();
  int gpus = 0;
  for (const CudaDevice::Options& gpu : options.cuda) {
    gpus += gpu.lanes + housekeeper + kDriverThreads;
    if (options.kind == Kind::kAuto) break;  // it uses the first
  }
  if (options.kind == Kind::kCuda) return gpus;
  cpu += housekeeper;
  return options.kind == Kind::kCpu ? cpu : std::max(cpu, gpus);
}

// On the cores that the server stays on.
int ThreadsNeeded(const Options& options) {
  const bool reads_credentials =
      options.server.credentials.tls.enabled() || !options.server.credentials.token_file.empty();
  const int process = 3;  // the main one, that of the drain, and that of the log
  const int http =
      (options.metrics_listen.empty() ? 0 : 1) + (options.probe_listen.empty() ? 0 : 1);
  // Connections, unread replies, the check of gRPC, two for passed files, and credential files.
  const int transport = 5 + (reads_credentials ? 1 : 0);
  // The socket, rings, long calls, and work that takes longer.
  const int local = options.server.local_listen.empty() ? 0 : 4;
  return process + http + transport + local + DeviceThreads(options.device) + GrpcThreads();
}

}  // namespace

absl::StatusOr<int> TakeFromProcess(const Options& options) {
  if (absl::Status status = StayOnCores(options.cores); !status.ok()) return status;
  if (absl::Status status = RaiseLimits(kOtherFiles + kFilesOfConnection); !status.ok()) {
    return status;
  }
  const int threads = ThreadsNeeded(options);
  if (absl::Status status = ReserveThreads(threads - 1); !status.ok()) return status;
  return threads;
}

void LimitConnectionsByOpenFiles(int* max_connections) {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const rlim_t most = (limit.rlim_cur - kOtherFiles) / kFilesOfConnection;
  if (static_cast<rlim_t>(*max_connections) <= most) return;
  LogWarning("fewer connections than --max_connections: the process may open too few files",
             {{"max_connections", most}, {"open_files", limit.rlim_cur}});
  *max_connections = static_cast<int>(most);
}

}  // namespace flashcore::server

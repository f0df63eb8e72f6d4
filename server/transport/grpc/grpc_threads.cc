#include "server/transport/grpc/grpc_threads.h"

#include <grpc/support/cpu.h>
#include <sched.h>

#include <algorithm>

#include "server/base/cores.h"

namespace flashcore::server {
namespace {

constexpr int kMaxCores = 32;

// Threads of its timers and its event engine, beyond those that wait: when several timers fire at
// once.
constexpr int kBusyTimers = 4;

int Cores() {
  static const int cores = std::min(UsableCores(), kMaxCores);
  return cores;
}

}  // namespace

int GrpcThreads() {
  const int cores = static_cast<int>(gpr_cpu_num_cores());
  const int executor = 2 * cores;
  const int resolver = 1;  // a server resolves nothing
  const int timers = 1 + kBusyTimers;
  const int event_engine = std::clamp(cores, 2, 32) + 1;  // and its timer manager
  const int pollers = std::clamp(cores / 2, 2, 16);
  return executor + resolver + timers + event_engine + pollers;
}

}  // namespace flashcore::server

extern "C" {

__attribute__((visibility("default"))) unsigned gpr_cpu_num_cores() {
  return static_cast<unsigned>(flashcore::server::Cores());
}

// Below gpr_cpu_num_cores, for what gRPC keeps for each core.
__attribute__((visibility("default"))) unsigned gpr_cpu_current_cpu() {
  const int core = sched_getcpu();
  return core < 0 ? 0 : static_cast<unsigned>(core) % gpr_cpu_num_cores();
}

}  // extern "C"

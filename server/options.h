// The server's flags, read and checked. command_line.h says how they are read.
#ifndef FLASHCORE_SERVER_OPTIONS_H_
#define FLASHCORE_SERVER_OPTIONS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/device/open_device.h"
#include "server/engine/engine.h"
#include "server/memory/budgets.h"
#include "server/telemetry/log.h"
#include "server/transport/server.h"

namespace flashcore::server {

struct Options {
  Server::Options server;
  Engine::Options engine;
  DeviceOptions device;
  HostMemory memory;
  MemoryUse memory_use;
  Budgets budgets;                 // each also where it is used, among the options above
  std::vector<int> cores;          // the server runs on these, its lanes on the first; empty: any
  std::string metrics_listen;      // empty: no metrics endpoint
  std::string probe_listen;        // empty: no separate endpoint for probes
  std::string metrics_token_file;  // empty: anyone may scrape
  absl::Duration drain_timeout;
  Logger::Options log;
  std::vector<std::string> unknown_variables;  // FLASHCORE_... of the environment, but no flag
};

// Reads the environment and the command line. INVALID_ARGUMENT names the flag, the value and what
// is allowed. Exits where ReadFlags does.
absl::StatusOr<Options> ParseOptions(int argc, char** argv);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_OPTIONS_H_

// What the server needs of the process that runs it.
#ifndef FLASHCORE_SERVER_PROCESS_NEEDS_H_
#define FLASHCORE_SERVER_PROCESS_NEEDS_H_

#include "absl/status/statusor.h"
#include "server/options.h"

namespace flashcore::server {

// Stays on `options->cores`, raises the limits of the process, makes all its threads
// (thread_reserve.h) and lowers `options->server.connections.max` to what the limit of open files
// allows. Returns how many threads a server with these options ever has, the main one included;
// connections and requests take none, and with --device=auto it is that of the device that needs
// more. The error names the limit that is too small, its size and what is needed. Call it before
// another thread starts.
absl::StatusOr<int> TakeFromProcess(Options* options);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_PROCESS_NEEDS_H_

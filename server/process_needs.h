// The server's needs of the process that runs it.
#ifndef FLASHCORE_SERVER_PROCESS_NEEDS_H_
#define FLASHCORE_SERVER_PROCESS_NEEDS_H_

#include "absl/status/statusor.h"
#include "server/options.h"

namespace flashcore::server {

// Stays on `options.cores`, raises the limits of the process and makes all its threads
// (thread_reserve.h). Returns how many threads a server with these options ever has, the main one
// included; connections and requests take none, and with --device=auto it is that of the device
// that needs more. The error names the limit that is too small, its size and what is needed. Call
// it before another thread starts; it logs nothing, since the log has one.
absl::StatusOr<int> TakeFromProcess(const Options& options);

// Lowers `max_connections`, with a warning, to what the limit of open files allows.
void LimitConnectionsByOpenFiles(int* max_connections);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_PROCESS_NEEDS_H_

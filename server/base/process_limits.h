// The limits of the process that an operator sets with ulimit or a control group.
#ifndef FLASHCORE_SERVER_BASE_PROCESS_LIMITS_H_
#define FLASHCORE_SERVER_BASE_PROCESS_LIMITS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace flashcore::server {

// Why a thread cannot be made: the name and size of the limit that may be the cause. `error`:
// pthread_create's.
std::string WhyNoThread(int error);

// Raises the soft limits that grow with the server's work to the hard ones: open files, and the
// stack of the main thread. A write beyond `ulimit -f` becomes an error; by default it ends the
// process. INVALID_ARGUMENT if the hard limits leave less than `files` or a stack of 1 MiB.
absl::Status RaiseLimits(uint64_t files);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_PROCESS_LIMITS_H_

// Which cores of the machine threads may run on.
#ifndef FLASHCORE_SERVER_BASE_CORES_H_
#define FLASHCORE_SERVER_BASE_CORES_H_

#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace flashcore::server {

// The cores of a list such as "2-5,8", in its order; none if it is no such list or names a core
// twice.
std::optional<std::vector<int>> ParseCores(absl::string_view list);

// Those that the calling thread may run on, ascending.
std::vector<int> AllowedCores();

// Has the calling thread, and the threads that it starts from then on, run on `cores` only: those
// of them that the system lets the process have, of which there must be one. No cores: no change.
absl::Status StayOnCores(absl::Span<const int> cores);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_CORES_H_

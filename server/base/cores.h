// The cores that threads may run on.
#ifndef FLASHCORE_SERVER_BASE_CORES_H_
#define FLASHCORE_SERVER_BASE_CORES_H_

#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace flashcore::server {

// The cores of a list such as "2-5,8", in its order. Nullopt if it is malformed or repeats a core.
std::optional<std::vector<int>> ParseCores(absl::string_view list);

// The cores that the calling thread may run on, ascending.
std::vector<int> AllowedCores();

// How many threads of the process can compute at a time: as many as there are AllowedCores, or as a
// container may have CPU time for, rounded up.
int UsableCores();

// Restricts the calling thread, and threads that it starts later, to those of `cores` that the
// process may use; at least one must be. No change if `cores` is empty.
absl::Status StayOnCores(absl::Span<const int> cores);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_CORES_H_

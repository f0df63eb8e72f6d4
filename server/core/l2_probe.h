// Whether an access-policy window pays on the GPU at hand: measured there, at start.
#ifndef FLASHCORE_SERVER_CORE_L2_PROBE_H_
#define FLASHCORE_SERVER_CORE_L2_PROBE_H_

#include <cstddef>

#include "absl/status/statusor.h"

namespace flashcore::server {

// How long reading `bytes` takes after cold_bytes of other memory have been read since they were
// read last. Microseconds, medians.
struct L2Probe {
  size_t bytes = 0;
  size_t cold_bytes = 0;
  double us_with_window = 0;     // which covers all of `bytes`
  double us_without_window = 0;  // and nothing set aside

  // By more than two such medians differ by chance.
  bool window_pays() const { return us_with_window < 0.95 * us_without_window; }
};

// Measures a window of `bytes` on the current device, which has an L2 of `l2_bytes`, in well under
// half a second. Takes `bytes` + 4 * l2_bytes of device memory and gives them back; afterwards no
// line is persisting and as much is set aside as before. RESOURCE_EXHAUSTED if memory is short.
absl::StatusOr<L2Probe> ProbeL2Window(size_t bytes, size_t l2_bytes);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_CORE_L2_PROBE_H_

// Whether an access-policy window pays on the GPU at hand: measured there, at start.
#ifndef FLASHCORE_SERVER_DEVICE_L2_PROBE_H_
#define FLASHCORE_SERVER_DEVICE_L2_PROBE_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace flashcore::server {

// Of one read, microseconds, medians. By less than 5% they may differ by chance.
struct L2ReadTimes {
  double with_window = 0;     // which covers all that is read
  double without_window = 0;  // and nothing set aside

  bool window_gains() const { return with_window <= 0.95 * without_window; }
  bool window_loses() const { return with_window > 1.05 * without_window; }
};

// How long it takes to read `bytes` again.
struct L2Probe {
  size_t bytes = 0;
  size_t cold_bytes = 0;  // of other memory, read since `bytes` were read last
  L2ReadTimes between;    // while nothing else is read
  L2ReadTimes beside;     // while another stream reads on in the other memory

  // Which of the two speaks against a window, with its times. Empty if the window pays: one gains
  // and none loses.
  std::string objection() const;
};

// Measures a window of `bytes` on the current device, which has an L2 of `l2_bytes`, in less than
// 0.3 s. Takes `bytes` + 4 * l2_bytes of device memory and gives them back; afterwards no
// line is persisting and as much is set aside as before. RESOURCE_EXHAUSTED if memory is short.
absl::StatusOr<L2Probe> ProbeL2Window(size_t bytes, size_t l2_bytes);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_L2_PROBE_H_

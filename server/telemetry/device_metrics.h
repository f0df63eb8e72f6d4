// The metrics of one device. To add one: a member here, its registration in device_metrics.cc, a
// call site, a row in deploy/METRICS.md, and a panel in deploy/grafana/dashboards.py.
#ifndef FLASHCORE_SERVER_TELEMETRY_DEVICE_METRICS_H_
#define FLASHCORE_SERVER_TELEMETRY_DEVICE_METRICS_H_

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "server/telemetry/metric.h"

namespace flashcore::server {

// The phases of a request on a device. They do not overlap.
enum class Phase { kQueue, kCopyIn, kKernel, kCopyOut };
inline constexpr size_t kDevicePhases = 4;

// The family that the phases here share with those in metrics.h.
inline constexpr char kPhaseMetric[] = "flashcore_request_phase_seconds";
inline constexpr char kPhaseHelp[] =
    "Time that a request spends in each phase; phases do not overlap.";

// Series with the label `device`. Thread-safe.
class DeviceMetrics {
 public:
  // `device`: "cpu", "cuda:0". `registry` must outlive this. `rpcs`: the labels of those that
  // submit operations.
  DeviceMetrics(const std::string& device, MetricRegistry* registry,
                const std::vector<Labels>& rpcs = std::vector<Labels>(1));

  // The phase of the operations of rpcs[rpc].
  Histogram& PhaseSeconds(Phase phase, int rpc = 0) {
    return *phase_seconds_[rpc][static_cast<size_t>(phase)];
  }

  Histogram& batch_requests;    // requests per launch
  Histogram& batch_query_rows;  // query rows per launch
  Gauge& queue_depth;           // requests waiting for a lane
  Gauge& staging_used_bytes;    // used by requests
  Gauge& staging_free_bytes;    // allocated, free for reuse
  Gauge& staging_waiting;       // requests waiting for staging memory

  Gauge& sequences;             // resident
  Counter& sequences_expired;   // deleted because they were idle too long
  Counter& sequences_evicted;   // deleted to make room
  Counter& sequences_orphaned;  // deleted because their lease ended
  Gauge& kv_hot_used_bytes;     // hot segment: used by pages
  Gauge& kv_hot_free_bytes;     // hot segment: free
  Gauge& kv_cold_used_bytes;    // cold segment: used by pages
  Gauge& kv_cold_free_bytes;    // cold segment: free
  Counter& kv_read_hot_bytes;   // read from the hot segment
  Counter& kv_read_cold_bytes;
  Counter& kv_promoted_bytes;  // moved to the hot segment
  Counter& kv_demoted_bytes;   // moved to the cold segment

 private:
  std::vector<std::array<Histogram*, kDevicePhases>> phase_seconds_;  // [rpcs]
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_DEVICE_METRICS_H_

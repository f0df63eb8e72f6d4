// Every metric of one device, by name. To add one: a member here, its registration in
// device_metrics.cc, a call site, its row in deploy/METRICS.md, and a panel in
// deploy/grafana/dashboards.py.
#ifndef FLASHCORE_SERVER_TELEMETRY_DEVICE_METRICS_H_
#define FLASHCORE_SERVER_TELEMETRY_DEVICE_METRICS_H_

#include <array>
#include <cstddef>
#include <string>

#include "server/telemetry/metric.h"
#include "server/telemetry/registry.h"

namespace flashcore::server {

// What a request goes through on a device; the phases do not overlap.
enum class Phase { kQueue, kCopyIn, kKernel, kCopyOut };
inline constexpr size_t kDevicePhases = 4;

// Of the histograms of phases, these and the server's own.
inline constexpr char kPhaseMetric[] = "flashcore_request_phase_seconds";
inline constexpr char kPhaseHelp[] = "Time of a request in each phase; they do not overlap.";

// Series with the label `device`, which live in a registry. Thread-safe.
class DeviceMetrics {
 public:
  // `device`: "cpu", "cuda:0". The registry outlives this.
  DeviceMetrics(const std::string& device, MetricRegistry* registry);

  Histogram& PhaseSeconds(Phase phase) { return *phase_seconds_[static_cast<size_t>(phase)]; }

  Histogram& batch_requests;    // requests
  Histogram& batch_query_rows;  // rows
  Gauge& queue_depth;           // requests waiting for a lane
  Gauge& staging_used_bytes;    // lent to requests
  Gauge& staging_free_bytes;    // kept for reuse
  Gauge& staging_waiting;       // requests that wait for it

  Gauge& sequences;            // that are resident
  Counter& sequences_expired;  // deleted because they were idle for too long
  Counter& sequences_evicted;  // deleted to make room
  Gauge& kv_hot_used_bytes;    // of pages in the hot segment
  Gauge& kv_hot_free_bytes;    // of the hot segment, not in pages
  Gauge& kv_cold_used_bytes;   // likewise, of the rest
  Gauge& kv_cold_free_bytes;
  Counter& kv_read_hot_bytes;  // K/V that spans attended to, where it was
  Counter& kv_read_cold_bytes;
  Counter& kv_promoted_bytes;  // moved to the hot segment
  Counter& kv_demoted_bytes;   // moved out of it

 private:
  class Adder;
  explicit DeviceMetrics(const Adder& add);

  std::array<Histogram*, kDevicePhases> phase_seconds_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_DEVICE_METRICS_H_

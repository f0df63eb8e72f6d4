#include "server/telemetry/device_metrics.h"

namespace flashcore::server {
namespace {

constexpr const char* kPhaseNames[kDevicePhases] = {"queue", "copy_in", "kernel", "copy_out"};

// The largest batch of any device; larger values count in +Inf.
constexpr uint64_t kLargestBatchRequests = 256;
constexpr uint64_t kLargestBatchQueryRows = 65536;

constexpr char kStaging[] = "flashcore_staging_bytes";
constexpr char kStagingHelp[] = "Staging memory: used by requests, or free for reuse.";
constexpr char kEvicted[] = "flashcore_sequences_evicted_total";
constexpr char kEvictedHelp[] =
    "Sequences that the server deleted: idle too long (idle), least recently used (lru), or their "
    "lease ended (lease).";
constexpr char kKv[] = "flashcore_kv_bytes";
constexpr char kKvHelp[] = "K/V memory: used by pages, or free.";
constexpr char kKvRead[] = "flashcore_kv_read_bytes_total";
constexpr char kKvReadHelp[] =
    "Resident K/V that spans read; shared K/V counts once for each span.";
constexpr char kKvMoved[] = "flashcore_kv_moved_bytes_total";
constexpr char kKvMovedHelp[] = "Resident K/V moved to another segment.";

}  // namespace

DeviceMetrics::DeviceMetrics(const std::string& device, MetricRegistry* registry,
                             const std::vector<Labels>& rpcs)
    : batch_requests(AddHistogram(registry, "flashcore_batch_requests", "Requests per launch.",
                                  PowerOfTwoBounds(kLargestBatchRequests), {{"device", device}})),
      batch_query_rows(
          AddHistogram(registry, "flashcore_batch_query_rows", "Query rows per launch.",
                       PowerOfTwoBounds(kLargestBatchQueryRows), {{"device", device}})),
      queue_depth(AddGauge(registry, "flashcore_queue_depth", "Requests waiting for a lane.",
                           {{"device", device}})),
      staging_used_bytes(
          AddGauge(registry, kStaging, kStagingHelp, {{"device", device}, {"state", "used"}})),
      staging_free_bytes(
          AddGauge(registry, kStaging, kStagingHelp, {{"device", device}, {"state", "free"}})),
      staging_waiting(AddGauge(registry, "flashcore_staging_waiting_requests",
                               "Requests waiting for staging memory.", {{"device", device}})),
      sequences(
          AddGauge(registry, "flashcore_sequences", "Resident sequences.", {{"device", device}})),
      sequences_expired(
          AddCounter(registry, kEvicted, kEvictedHelp, {{"device", device}, {"reason", "idle"}})),
      sequences_evicted(
          AddCounter(registry, kEvicted, kEvictedHelp, {{"device", device}, {"reason", "lru"}})),
      sequences_orphaned(
          AddCounter(registry, kEvicted, kEvictedHelp, {{"device", device}, {"reason", "lease"}})),
      kv_hot_used_bytes(AddGauge(registry, kKv, kKvHelp,
                                 {{"device", device}, {"segment", "hot"}, {"state", "used"}})),
      kv_hot_free_bytes(AddGauge(registry, kKv, kKvHelp,
                                 {{"device", device}, {"segment", "hot"}, {"state", "free"}})),
      kv_cold_used_bytes(AddGauge(registry, kKv, kKvHelp,
                                  {{"device", device}, {"segment", "cold"}, {"state", "used"}})),
      kv_cold_free_bytes(AddGauge(registry, kKv, kKvHelp,
                                  {{"device", device}, {"segment", "cold"}, {"state", "free"}})),
      kv_read_hot_bytes(
          AddCounter(registry, kKvRead, kKvReadHelp, {{"device", device}, {"segment", "hot"}})),
      kv_read_cold_bytes(
          AddCounter(registry, kKvRead, kKvReadHelp, {{"device", device}, {"segment", "cold"}})),
      kv_promoted_bytes(
          AddCounter(registry, kKvMoved, kKvMovedHelp, {{"device", device}, {"to", "hot"}})),
      kv_demoted_bytes(
          AddCounter(registry, kKvMoved, kKvMovedHelp, {{"device", device}, {"to", "cold"}})) {
  for (Labels labels : rpcs) {
    labels["device"] = device;
    auto& phases = phase_seconds_.emplace_back();
    for (size_t phase = 0; phase < kDevicePhases; ++phase) {
      labels["phase"] = kPhaseNames[phase];
      phases[phase] = &AddHistogram(registry, kPhaseMetric, kPhaseHelp, LatencyBounds(), labels);
    }
  }
}

}  // namespace flashcore::server

#include "server/telemetry/device_metrics.h"

#include <utility>

namespace flashcore::server {
namespace {

constexpr const char* kPhaseNames[kDevicePhases] = {"queue", "copy_in", "kernel", "copy_out"};

// Enough for the largest batch that any device takes; what is above counts in +Inf.
constexpr uint64_t kLargestBatchRequests = 256;
constexpr uint64_t kLargestBatchQueryRows = 65536;

constexpr char kStagingHelp[] = "Staging memory: lent to requests, or kept for reuse.";
constexpr char kEvictedHelp[] =
    "Sequences that the server deleted: idle for too long, or the one used longest ago (lru).";
constexpr char kKvHelp[] = "Memory for resident K/V: in pages, or free.";
constexpr char kKvReadHelp[] =
    "Resident K/V that spans attended to; what several share counts for each.";
constexpr char kKvMovedHelp[] = "Resident K/V that changed its segment.";

}  // namespace

// Adds the series of one device.
class DeviceMetrics::Adder {
 public:
  using Labels = MetricRegistry::Labels;

  Adder(std::string device, MetricRegistry* registry)
      : device_(std::move(device)), registry_(registry) {}

  Counter& AddCounter(const char* name, const char* help, const Labels& labels = {}) const {
    return registry_->AddCounter(name, help, WithDevice(labels));
  }
  Gauge& AddGauge(const char* name, const char* help, const Labels& labels = {}) const {
    return registry_->AddGauge(name, help, WithDevice(labels));
  }
  Histogram& AddHistogram(const char* name, const char* help, const std::vector<double>& bounds,
                          const Labels& labels = {}) const {
    return registry_->AddHistogram(name, help, bounds, WithDevice(labels));
  }

 private:
  Labels WithDevice(Labels labels) const {
    labels.insert(labels.begin(), {"device", device_});
    return labels;
  }

  const std::string device_;
  MetricRegistry* const registry_;
};

DeviceMetrics::DeviceMetrics(const std::string& device, MetricRegistry* registry)
    : DeviceMetrics(Adder(device, registry)) {}

DeviceMetrics::DeviceMetrics(const Adder& add)
    : batch_requests(add.AddHistogram("flashcore_batch_requests",
                                      "Requests that one launch served.",
                                      PowerOfTwoBounds(kLargestBatchRequests))),
      batch_query_rows(add.AddHistogram("flashcore_batch_query_rows",
                                        "Query rows that one launch served.",
                                        PowerOfTwoBounds(kLargestBatchQueryRows))),
      queue_depth(add.AddGauge("flashcore_queue_depth", "Requests waiting for a lane.")),
      staging_used_bytes(
          add.AddGauge("flashcore_staging_bytes", kStagingHelp, {{"state", "used"}})),
      staging_free_bytes(
          add.AddGauge("flashcore_staging_bytes", kStagingHelp, {{"state", "free"}})),
      staging_waiting(add.AddGauge("flashcore_staging_waiting_requests",
                                   "Requests waiting for staging memory.")),
      sequences(add.AddGauge("flashcore_sequences", "Resident sequences.")),
      sequences_expired(
          add.AddCounter("flashcore_sequences_evicted_total", kEvictedHelp, {{"reason", "idle"}})),
      sequences_evicted(
          add.AddCounter("flashcore_sequences_evicted_total", kEvictedHelp, {{"reason", "lru"}})),
      kv_hot_used_bytes(
          add.AddGauge("flashcore_kv_bytes", kKvHelp, {{"segment", "hot"}, {"state", "used"}})),
      kv_hot_free_bytes(
          add.AddGauge("flashcore_kv_bytes", kKvHelp, {{"segment", "hot"}, {"state", "free"}})),
      kv_cold_used_bytes(
          add.AddGauge("flashcore_kv_bytes", kKvHelp, {{"segment", "cold"}, {"state", "used"}})),
      kv_cold_free_bytes(
          add.AddGauge("flashcore_kv_bytes", kKvHelp, {{"segment", "cold"}, {"state", "free"}})),
      kv_read_hot_bytes(
          add.AddCounter("flashcore_kv_read_bytes_total", kKvReadHelp, {{"segment", "hot"}})),
      kv_read_cold_bytes(
          add.AddCounter("flashcore_kv_read_bytes_total", kKvReadHelp, {{"segment", "cold"}})),
      kv_promoted_bytes(
          add.AddCounter("flashcore_kv_moved_bytes_total", kKvMovedHelp, {{"to", "hot"}})),
      kv_demoted_bytes(
          add.AddCounter("flashcore_kv_moved_bytes_total", kKvMovedHelp, {{"to", "cold"}})) {
  for (size_t phase = 0; phase < kDevicePhases; ++phase) {
    phase_seconds_[phase] = &add.AddHistogram(kPhaseMetric, kPhaseHelp, LatencyBounds(),
                                              {{"phase", kPhaseNames[phase]}});
  }
}

}  // namespace flashcore::server

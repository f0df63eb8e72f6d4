// The process_* metrics that every Prometheus client library exports.
#ifndef FLASHCORE_SERVER_TELEMETRY_PROCESS_METRICS_H_
#define FLASHCORE_SERVER_TELEMETRY_PROCESS_METRICS_H_

#include <vector>

#include "prometheus/metric_family.h"

namespace flashcore::server {

// Reads /proc now. What cannot be read is left out. Thread-safe.
std::vector<prometheus::MetricFamily> CollectProcessMetrics();

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_PROCESS_METRICS_H_

// The metric types, which are prometheus-cpp's, and how a series is added. Thread-safe.
#ifndef FLASHCORE_SERVER_TELEMETRY_METRIC_H_
#define FLASHCORE_SERVER_TELEMETRY_METRIC_H_

#include <cstdint>
#include <vector>

#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/labels.h"
#include "prometheus/registry.h"

namespace flashcore::server {

using Counter = prometheus::Counter;
using Gauge = prometheus::Gauge;
using Histogram = prometheus::Histogram;
using Labels = prometheus::Labels;
using MetricRegistry = prometheus::Registry;

// Each adds a series that starts at zero and lives as long as `registry`. Series of one name have
// one type and one help text.
inline Counter& AddCounter(MetricRegistry* registry, const char* name, const char* help,
                           const Labels& labels = {}) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(*registry).Add(labels);
}
inline Gauge& AddGauge(MetricRegistry* registry, const char* name, const char* help,
                       const Labels& labels = {}) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(*registry).Add(labels);
}
// `bounds`: inclusive upper bounds of the buckets, ascending.
inline Histogram& AddHistogram(MetricRegistry* registry, const char* name, const char* help,
                               const std::vector<double>& bounds, const Labels& labels = {}) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(*registry).Add(labels, bounds);
}

// 1 us to 10 s in steps of 1, 2, 5. Written out, because powers of ten computed in binary would
// show as 9.999999999999999e-06.
inline std::vector<double> LatencyBounds() {
  return {1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3,
          5e-3, 1e-2, 2e-2, 5e-2, 0.1,  0.2,  0.5,  1,    2,    5,    10};
}

// 1, 2, 4, ... up to `largest`, a power of two.
inline std::vector<double> PowerOfTwoBounds(uint64_t largest) {
  std::vector<double> bounds;
  for (uint64_t bound = 1; bound <= largest; bound *= 2) {
    bounds.push_back(static_cast<double>(bound));
  }
  return bounds;
}

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_METRIC_H_

// The metric types, which are prometheus-cpp's, and how a series is added. Thread-safe.
#ifndef FLASHCORE_SERVER_TELEMETRY_METRIC_H_
#define FLASHCORE_SERVER_TELEMETRY_METRIC_H_

#include <cstdint>
#include <string>
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

// Bounds of latencies: 12 a decade from 10 us to 1 s, where requests and most of their phases lie,
// so that a quantile is known to some percent; 1, 2 and 5 of the decades around them. 50 ms, the
// objective of the alerts, is one. Read from text, and of steps that show as they are written in
// every decade (6e-4 would show as 0.0005999999999999999).
inline std::vector<double> LatencyBounds() {
  std::vector<double> bounds = {1e-6, 2e-6, 5e-6};
  for (const char* decade : {"e-5", "e-4", "e-3", "e-2", "e-1"}) {
    for (const char* step :
         {"1", "1.2", "1.5", "1.8", "2.2", "2.7", "3.3", "4", "5", "5.9", "6.8", "8.3"}) {
      bounds.push_back(std::stod(std::string(step) + decade));
    }
  }
  for (const double seconds : {1, 2, 5, 10}) bounds.push_back(seconds);
  return bounds;
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

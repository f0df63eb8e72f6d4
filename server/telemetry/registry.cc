#include "server/telemetry/registry.h"

#include <algorithm>
#include <cassert>
#include <limits>

namespace flashcore::server {

MetricRegistry::Series& MetricRegistry::AddSeries(const std::string& name, const std::string& help,
                                                  prometheus::MetricType type,
                                                  const Labels& labels) {
  auto family = std::find_if(families_.begin(), families_.end(),
                             [&](const Family& candidate) { return candidate.name == name; });
  if (family == families_.end()) {
    families_.push_back({name, help, type, {}});
    family = std::prev(families_.end());
  }
  assert(family->type == type);
  Series& series = family->series.emplace_back();
  for (const auto& [key, value] : labels) series.labels.push_back({key, value});
  return series;
}

Counter& MetricRegistry::AddCounter(const std::string& name, const std::string& help,
                                    const Labels& labels) {
  Counter& counter = counters_.emplace_back();
  AddSeries(name, help, prometheus::MetricType::Counter, labels).counter = &counter;
  return counter;
}

Gauge& MetricRegistry::AddGauge(const std::string& name, const std::string& help,
                                const Labels& labels) {
  Gauge& gauge = gauges_.emplace_back();
  AddSeries(name, help, prometheus::MetricType::Gauge, labels).gauge = &gauge;
  return gauge;
}

Histogram& MetricRegistry::AddHistogram(const std::string& name, const std::string& help,
                                        const std::vector<double>& bounds, const Labels& labels) {
  Histogram& histogram = histograms_.emplace_back(bounds);
  AddSeries(name, help, prometheus::MetricType::Histogram, labels).histogram = &histogram;
  return histogram;
}

prometheus::ClientMetric MetricRegistry::Read(const Series& series) {
  prometheus::ClientMetric metric;
  metric.label = series.labels;
  if (series.counter != nullptr) {
    metric.counter.value = static_cast<double>(series.counter->Value());
  } else if (series.gauge != nullptr) {
    metric.gauge.value = static_cast<double>(series.gauge->Value());
  } else {
    const Histogram::Snapshot snapshot = series.histogram->Read();
    const std::vector<double>& bounds = series.histogram->bounds();
    uint64_t cumulative = 0;
    for (size_t i = 0; i < snapshot.counts.size(); ++i) {
      cumulative += snapshot.counts[i];
      const double bound = i < bounds.size() ? bounds[i] : std::numeric_limits<double>::infinity();
      metric.histogram.bucket.push_back({cumulative, bound});
    }
    metric.histogram.sample_count = cumulative;
    metric.histogram.sample_sum = snapshot.sum;
  }
  return metric;
}

std::vector<prometheus::MetricFamily> MetricRegistry::Collect() const {
  std::vector<prometheus::MetricFamily> families;
  families.reserve(families_.size());
  for (const Family& family : families_) {
    prometheus::MetricFamily& out = families.emplace_back();
    out.name = family.name;
    out.help = family.help;
    out.type = family.type;
    out.metric.reserve(family.series.size());
    for (const Series& series : family.series) out.metric.push_back(Read(series));
  }
  return families;
}

}  // namespace flashcore::server

// Owns the metrics of a process and gives them to prometheus-cpp when it scrapes.
#ifndef FLASHCORE_SERVER_TELEMETRY_REGISTRY_H_
#define FLASHCORE_SERVER_TELEMETRY_REGISTRY_H_

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"
#include "server/telemetry/metric.h"

namespace flashcore::server {

// Add everything first, from one thread; after that, Collect from any thread.
class MetricRegistry : public prometheus::Collectable {
 public:
  using Labels = std::vector<std::pair<std::string, std::string>>;

  MetricRegistry() = default;
  MetricRegistry(const MetricRegistry&) = delete;
  MetricRegistry& operator=(const MetricRegistry&) = delete;

  // A series, zero at first, that lives as long as the registry. Series of one name belong to one
  // family and have one type; the first one's help counts.
  Counter& AddCounter(const std::string& name, const std::string& help, const Labels& labels = {});
  Gauge& AddGauge(const std::string& name, const std::string& help, const Labels& labels = {});
  Histogram& AddHistogram(const std::string& name, const std::string& help,
                          const std::vector<double>& bounds, const Labels& labels = {});

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  // One of the three.
  struct Series {
    const Counter* counter = nullptr;
    const Gauge* gauge = nullptr;
    const Histogram* histogram = nullptr;
    std::vector<prometheus::ClientMetric::Label> labels;
  };
  struct Family {
    std::string name;
    std::string help;
    prometheus::MetricType type;
    std::vector<Series> series;
  };

  Series& AddSeries(const std::string& name, const std::string& help, prometheus::MetricType type,
                    const Labels& labels);
  static prometheus::ClientMetric Read(const Series& series);

  // Deques: their elements never move.
  std::deque<Counter> counters_;
  std::deque<Gauge> gauges_;
  std::deque<Histogram> histograms_;
  std::vector<Family> families_;  // in the order of registration
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_REGISTRY_H_

// The cost of one recording, alone and with every core recording.
#include <benchmark/benchmark.h>

#include <cstdint>

#include "server/telemetry/log.h"
#include "server/telemetry/metric.h"

namespace flashcore::server {
namespace {

// Values spread over all buckets, so that the branch predictor cannot learn the search.
class Values {
 public:
  double Next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    const uint64_t random = state_ >> 33;
    return static_cast<double>(random & 0xFFFF) * kScale[(random >> 16) & 7];
  }

 private:
  static constexpr double kScale[8] = {1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 2e-4};
  uint64_t state_ = 88172645463325252u;
};

void ValuesAlone(benchmark::State& state) {
  Values values;
  for (auto _ : state) benchmark::DoNotOptimize(values.Next());
}
BENCHMARK(ValuesAlone);

void CounterIncrement(benchmark::State& state) {
  static Counter counter;
  for (auto _ : state) counter.Increment();
}
BENCHMARK(CounterIncrement)->ThreadRange(1, 2)->UseRealTime();

void GaugeIncrement(benchmark::State& state) {
  static Gauge gauge;
  for (auto _ : state) gauge.Increment();
}
BENCHMARK(GaugeIncrement)->ThreadRange(1, 2)->UseRealTime();

void HistogramObserve(benchmark::State& state) {
  static Histogram histogram(LatencyBounds());
  Values values;
  for (auto _ : state) histogram.Observe(values.Next());
}
BENCHMARK(HistogramObserve)->ThreadRange(1, 2)->UseRealTime();

// A flood: one record per second is admitted, the others are suppressed.
void LogLimiterAdmit(benchmark::State& state) {
  static LogLimiter limiter(1);
  for (auto _ : state) benchmark::DoNotOptimize(limiter.Admit());
}
BENCHMARK(LogLimiterAdmit)->ThreadRange(1, 2)->UseRealTime();

void LogRecord(benchmark::State& state) {
  Logger::Options options;
  options.format = LogFormat::kJson;
  options.sink = [](absl::string_view record) { benchmark::DoNotOptimize(record.data()); };
  Logger logger(options);
  for (auto _ : state) {
    logger.Log(LogLevel::kInfo, "request done",
               {{"request_id", "r-1"}, {"code", 0}, {"duration_us", 12.5}});
  }
}
BENCHMARK(LogRecord);

}  // namespace
}  // namespace flashcore::server

BENCHMARK_MAIN();

// What flashcore bench prints.
#ifndef FLASHCORE_CLIENT_CLI_BENCH_REPORT_H_
#define FLASHCORE_CLIENT_CLI_BENCH_REPORT_H_

#include <array>
#include <string>
#include <vector>

#include "client/cli/json.h"
#include "client/cli/load.h"
#include "client/cli/stats.h"

namespace flashcore::cli {

// A load's result as a table for people and as JSON for programs. Refers to options and result,
// which outlive it.
class BenchReport {
 public:
  // Sorts the samples of `result`. `shape` is the value of --shape.
  BenchReport(const LoadOptions& options, std::string shape, LoadResult* result);

  std::string Table() const;

  // The first kind of request (decode in a mixed load) has its numbers at the top level, the others
  // have theirs in an object named after the kind.
  std::string Json() const;

 private:
  // Requests of one kind.
  struct Kind {
    std::string name;
    const Series* series;
    Percentiles latency, outside_kernel;
    std::array<Percentiles, 5> phases;

    double tflops() const { return series->per_second * series->PerRequest(series->flop) * 1e-12; }
    double rows_per_second() const {
      return series->per_second * series->PerRequest(static_cast<double>(series->query_rows));
    }
    double request_bytes() const {
      return series->PerRequest(static_cast<double>(series->request_bytes));
    }
    double response_bytes() const {
      return series->PerRequest(static_cast<double>(series->response_bytes));
    }
  };

  std::string Header() const;
  std::string KindRows(const Kind& kind) const;
  std::string KindSummary(const Kind& kind) const;
  std::string Counts() const;
  std::string Comparisons() const;
  std::string TransportName() const;
  // p50 of the first kind of request over that of Echo plus that of its kernel phase.
  double EchoAndKernelRatio() const;
  void AddKind(const Kind& kind, JsonObject* json) const;
  void AddLoad(JsonObject* json) const;
  const Kind* Find(const std::string& name) const;  // null if there is none

  const LoadOptions& options_;
  const LoadResult& result_;
  const std::string shape_;
  std::vector<Kind> kinds_;
  Percentiles echo_;
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_BENCH_REPORT_H_

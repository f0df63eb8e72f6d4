// The report of flashcore bench: one JSON object, and a table made of it.
#ifndef FLASHCORE_CLIENT_BENCH_BENCH_REPORT_H_
#define FLASHCORE_CLIENT_BENCH_BENCH_REPORT_H_

#include <string>
#include <vector>

#include "client/bench/load.h"
#include "nlohmann/json_fwd.hpp"

namespace flashcore::cli {

// The sample of nearest rank: the smallest one that at least `share`, in (0, 1], of the samples do
// not exceed. `sorted` is ascending. NaN if empty.
double NearestRank(const std::vector<float>& sorted, double share);

// {p50, p90, p99, p999, max, mean} of all samples, in microseconds and rounded to 0.001 us; NaN
// without samples.
nlohmann::ordered_json Percentiles(std::vector<float> samples);

// The first kind of request (decode in a mixed load) has its numbers at the top level, each other
// kind in an object named after it. `shape` is the value of --shape.
nlohmann::ordered_json BenchJson(const LoadOptions& options, const std::string& shape,
                                 const LoadResult& result);

std::string BenchTable(const nlohmann::ordered_json& report);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_BENCH_BENCH_REPORT_H_

// Percentiles of samples. All samples are kept (4 bytes each), so percentiles are exact.
#ifndef FLASHCORE_CLIENT_CLI_STATS_H_
#define FLASHCORE_CLIENT_CLI_STATS_H_

#include <vector>

namespace flashcore::cli {

// In the unit of the samples; NaN if there were none. A percentile is by nearest rank: the smallest
// sample that at least that share of the samples does not exceed.
struct Percentiles {
  double p50, p90, p99, p999, max, mean;
};

// Sorts `samples`.
Percentiles ComputePercentiles(std::vector<float>* samples);

// The sample of nearest rank; `sorted` is ascending, `share` is in (0, 1]. NaN if empty.
double NearestRank(const std::vector<float>& sorted, double share);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_STATS_H_

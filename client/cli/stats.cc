#include "client/cli/stats.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace flashcore::cli {

double NearestRank(const std::vector<float>& sorted, double share) {
  if (sorted.empty()) return std::numeric_limits<double>::quiet_NaN();
  const double rank = std::ceil(share * static_cast<double>(sorted.size()) - 1e-9);
  const size_t index = static_cast<size_t>(std::max(rank, 1.0)) - 1;
  return sorted[std::min(index, sorted.size() - 1)];
}

Percentiles ComputePercentiles(std::vector<float>* samples) {
  std::sort(samples->begin(), samples->end());
  const double sum = std::accumulate(samples->begin(), samples->end(), 0.0);
  return {NearestRank(*samples, 0.5),  NearestRank(*samples, 0.9),
          NearestRank(*samples, 0.99), NearestRank(*samples, 0.999),
          NearestRank(*samples, 1),    sum / static_cast<double>(samples->size())};
}

}  // namespace flashcore::cli

#include "tests/bench/l2_summary.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace flashcore::kernels {

Spread SpreadOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  const double median =
      values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  return {median, values.front(), values.back()};
}

std::vector<double> ChangePercent(const std::vector<double>& with,
                                  const std::vector<double>& without) {
  std::vector<double> change;
  for (size_t i = 0; i < with.size(); ++i) change.push_back(100 * (with[i] / without[i] - 1));
  return change;
}

int BlocksForRate(const std::map<int, double>& rates, double rate) {
  int blocks_below = 0;
  double rate_below = 0;
  for (const auto& [blocks, rate_here] : rates) {
    if (rate_here >= rate) {
      const double part = (rate - rate_below) / (rate_here - rate_below);
      const double wanted = blocks_below + part * (blocks - blocks_below);
      return std::max(1, static_cast<int>(std::lround(wanted)));
    }
    blocks_below = blocks;
    rate_below = rate_here;
  }
  const auto lower = [](const auto& a, const auto& b) { return a.second < b.second; };
  return std::max_element(rates.begin(), rates.end(), lower)->first;
}

}  // namespace flashcore::kernels

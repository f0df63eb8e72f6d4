#include "tests/bench/l2_summary.h"

#include <algorithm>
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

}  // namespace flashcore::kernels

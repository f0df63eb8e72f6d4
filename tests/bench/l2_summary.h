// Arithmetic of the L2 window's benchmark.
#ifndef FLASHCORE_TESTS_BENCH_L2_SUMMARY_H_
#define FLASHCORE_TESTS_BENCH_L2_SUMMARY_H_

#include <map>
#include <vector>

namespace flashcore::kernels {

// Spread of one quantity, over the rounds.
struct Spread {
  double median = 0;
  double min = 0;
  double max = 0;
};

// `values` is not empty.
Spread SpreadOf(std::vector<double> values);

// The window's effect on a time, in percent of the time without the window, for gain and cost
// alike: -10 is a gain of 10%, 10 a cost of 10%. One value a round: times of the same round are
// compared. `with` and `without` are equally long.
std::vector<double> ChangePercent(const std::vector<double>& with,
                                  const std::vector<double>& without);

// The number of blocks of a reader that reaches `rate`, by linear interpolation between measured
// rates of numbers of blocks; at least 1. If none reaches it, the number with the highest rate.
// `rate` is positive, `rates` is not empty.
int BlocksForRate(const std::map<int, double>& rates, double rate);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_BENCH_L2_SUMMARY_H_

// The correctness gate: a wrong kernel is not timed. Pure host code.
#ifndef FLASHCORE_TESTS_BENCH_KERNELS_ACCURACY_H_
#define FLASHCORE_TESTS_BENCH_KERNELS_ACCURACY_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/kernel.h"
#include "tests/bench/kernels/shape.h"

namespace flashcore::kernels {

struct Accuracy {
  double max_error = 0;      // largest difference to the float64 oracle over the checked rows
  double error_squares = 0;  // sums of squares over these rows: of the differences,
  double squares = 0;        // and of the oracle's elements
  bool finite = true;        // whether every element of the whole output is finite
  int64_t rows_checked = 0;  // of `rows`
  int64_t rows = 0;          // query rows of all heads

  double relative_l2() const { return squares == 0 ? 0 : std::sqrt(error_squares / squares); }
  // Adds other rows.
  void Add(const Accuracy& other);
};

// The largest error allowed for inputs in [-1, 1], where outputs are of magnitude 1 at most. The
// oracle rounds neither Q nor P.
double ErrorBound(const KernelSpec& spec);

// Checks the output of one of `sets` input sets, whose `spans` MakeSpans made over host memory,
// after a launch. If the oracle would take more than about half a second for all sets, heads and
// rows are sampled; the first and the last row of a sampled head are always checked.
Accuracy CheckOutput(const AttentionShape& shape, const std::vector<Span>& spans, int sets);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_BENCH_KERNELS_ACCURACY_H_

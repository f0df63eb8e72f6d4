// The correctness gate: a wrong kernel is not worth timing.
#ifndef FLASHCORE_KERNELS_BENCH_ACCURACY_H_
#define FLASHCORE_KERNELS_BENCH_ACCURACY_H_

#include <cstdint>
#include <vector>

#include "kernels/bench/shape.h"
#include "kernels/registry.h"

namespace flashcore::kernels {

struct Accuracy {
  double max_error = 0;      // largest difference to the float64 oracle over the rows checked
  bool finite = true;        // whether every element of the whole output is
  int64_t rows_checked = 0;  // of all query rows of all heads
  int64_t rows = 0;
};

// The error that inputs in [-1, 1] justify: outputs are of magnitude 1 at most.
double ErrorBound(const KernelSpec& spec);

// Checks the output of `spans`, made by MakeSpans, after their launch has completed. Heads and rows
// beyond what the oracle does in about half a second are sampled; the first and the last row of a
// sampled head are among them. `pages` is the host copy of the page table, or empty.
Accuracy CheckOutput(const AttentionShape& shape, const std::vector<Span>& spans,
                     const std::vector<int32_t>& pages);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_BENCH_ACCURACY_H_

// Where the kernels of this repository round, for the error bounds of the oracle.
#ifndef FLASHCORE_TESTS_KERNELS_KERNEL_ROUNDING_H_
#define FLASHCORE_TESTS_KERNELS_KERNEL_ROUNDING_H_

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/kernel.h"
#include "kernels/oracle/error_bound.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

// Workers that the tests plan CUDA kernels for: enough for the shortest splits.
inline constexpr int32_t kManyWorkers = 10000;

// The precision that CUDA kernels multiply in for such a request: blocks of few rows are bound by
// memory, and gain nothing by less precision.
inline Precision PrecisionFor(const Geometry& geometry, int32_t query_rows) {
  return query_rows * geometry.group() <= kSmallSpanRows ? Precision::k16Bit : geometry.precision;
}

// The rounding of a kernel for `span`, planned for kManyWorkers.
Rounding RoundingOf(KernelSpec spec, const PlanOptions& options, const Geometry& geometry,
                    const Span& span);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_KERNEL_ROUNDING_H_

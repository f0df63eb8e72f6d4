// How CUDA kernels hold a row of Q over INT8 K/V: as integers. Its largest magnitude being m, and n
// the largest code,
//
//   code = element * n / m, rounded to the nearest integer
//
// and the element counts as code * m / n. A row of zeros stays one. Codes are numbers of 8 bits, or
// two of these for products of 16 bits.
#ifndef FLASHCORE_TESTS_KERNELS_QUERY_CODES_H_
#define FLASHCORE_TESTS_KERNELS_QUERY_CODES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

inline constexpr int32_t kLowQueryCodes = 256;  // codes of 16 bits: of the lower number

// The precision that CUDA kernels multiply in for such a request: blocks of few rows are bound by
// memory, and gain nothing by less precision.
inline Precision PrecisionFor(const Geometry& geometry, int32_t query_rows) {
  return query_rows * geometry.group() <= kSmallSpanRows ? Precision::k16Bit : geometry.precision;
}

inline constexpr int32_t LargestQueryCode(Precision precision) {
  return precision == Precision::k16Bit ? 127 * kLowQueryCodes : 127;
}

// Whether every kernel gets the same code: float32 divides and multiplies with errors of a few
// units in the last place, which matter near a half.
inline bool IsCertainCode(double element, double largest, int32_t largest_code) {
  const double code = std::abs(element) * largest_code / largest;
  return std::abs(code - std::floor(code) - 0.5) > 0x1p-21 * largest_code;
}

// Replaces a row's elements by what they count as. round(code) is applied to the codes.
template <class Round>
void RoundQuery(int32_t largest_code, const Round& round, std::vector<double>* query) {
  double largest = 0;
  for (double element : *query) largest = std::max(largest, std::abs(element));
  if (largest == 0) return;
  for (double& element : *query) {
    element = round(std::nearbyint(element * largest_code / largest)) * largest / largest_code;
  }
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_QUERY_CODES_H_

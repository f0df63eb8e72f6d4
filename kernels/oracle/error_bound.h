// How far the results of an attention kernel may be from float64 attention.
//
// A bound follows from where the kernel rounds, not from the error of another implementation: that
// error can be as large as the result (unfused BF16 attention rounds scores of 1000 by 4).
//
// For one query row, with scores s_j, probabilities p_j and O_d = sum_j p_j v_jd:
//
//   weights      A relative error e_j of p_j moves O_d by e_j p_j (v_jd - O_d), because O is
//                divided by the sum of the same weights. e_j is the rounding of P to the type that
//                multiplies V, and the absolute error of s_j (an exponent).
//   8-bit P      With c_j the scale of V row j, p_j c_j is off by half of 1/255 of the largest of
//                its K/V tile, whose code is 255. That moves O_d by the error times v_jd / c_j.
//   scores       s_j is a sum of head_dim products in steps. With random signs the partial sums are
//                about sqrt(sum_d q_d^2 k_jd^2), and each step rounds one.
//   P V          A sum in steps, each of which rounds a partial sum: about |O_d| and
//                sqrt(sum_j p_j^2 v_jd^2 / 2).
//   O            One rounding to the dtype.
//
// Roundings of different products are independent. So errors add up as the root of the sum of their
// squares (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019), here
// with the largest possible error of each rounding. Beyond 4 times that root the probability is
// below 1e-10 (Hoeffding). The error of all elements of a row, as a root mean square, is an
// average: 1.5 times are enough, and a lost V row among 1700 is seen although it moves no element
// by more than the bound of an element. Where errors are many, as those of P of 8 bits, the average
// is close to their variance, a third of the square of the largest: see CodeSquares.
//
// Over INT8 K/V, CUDA kernels round Q to codes (rows.h). That is no error here: the exact result is
// that of the rounded Q, because an error of Q would hide others. It moves all scores of a row, by
// several units where they are large. product_errors.h has the error of it all, for any kernel.
#ifndef FLASHCORE_KERNELS_ORACLE_ERROR_BOUND_H_
#define FLASHCORE_KERNELS_ORACLE_ERROR_BOUND_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/attention.h"
#include "kernels/oracle/reference.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

// Where a kernel rounds. Units are the largest relative error of one rounding.
struct Rounding {
  double output = 0;                       // of O
  double probability = 0;                  // of the probabilities that multiply V
  std::optional<DType> probability_dtype;  // what these are rounded to
  double smallest = 0;  // largest absolute error of these, relative to the largest of the row
  // Largest absolute error of a probability times the scale of its V row, relative to the largest
  // of these in a K/V tile.
  double tile_weight = 0;
  int32_t query_codes = 0;  // the largest code that an element of Q is rounded to; 0: it is not
  double sums = 0;          // of a step of Q K^T and of P V
  int32_t step = 1;         // products that a step adds
  bool cancels = true;      // O is divided by the sum of the rounded probabilities
  int32_t split_rows = kUnsplit;  // K/V rows that are summed apart from others
};

// Float64 attention of a span with its rounded Q, and the largest errors of a kernel.
struct Expected {
  AttentionResult exact;
  std::vector<double> element_bound;  // as exact.output
  std::vector<double> row_bound;      // as exact.lse: of the root mean square over head_dim
  std::vector<double> lse_bound;      // as exact.lse
};
Expected ExpectedOf(const Geometry& geometry, const Span& span, const Rounding& rounding);

// Largest errors, divided by their bounds. Infinite for NaN and for a wrong infinity.
struct ErrorRatios {
  double element = 0;
  double row = 0;
  double lse = 0;

  bool Ok() const { return element <= 1 && row <= 1 && lse <= 1; }
};
// By the bounds of `want`; `exact` is what `got` stands for, and need not be want.exact.
ErrorRatios CompareResults(const AttentionResult& got, const AttentionResult& exact,
                           const Expected& want);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_ORACLE_ERROR_BOUND_H_

// The error that products of INT8 codes may have: see Precision in attention.h.
#ifndef FLASHCORE_KERNELS_ORACLE_PRODUCT_ERRORS_H_
#define FLASHCORE_KERNELS_ORACLE_PRODUCT_ERRORS_H_

#include "kernels/attention.h"
#include "kernels/oracle/reference.h"
#include "kernels/oracle/rows.h"

namespace flashcore::kernels {

// Bounds for one query row of one head, beside the errors that 16-bit products have.
struct ProductErrors {
  double output = 0;   // of an element of O
  double squares = 0;  // mean square of the error of an element of O, summed over head_dim
  double lse = 0;
};

// `row` is over K/V of INT8, and `reference` its attention; all 0 if `precision` is k16Bit. Let s
// be the scale of the row of Q, a = |softmax_scale| s/2, and c and t the codes and the scale of a
// row of V. Then
//
//   Q    An element of Q is off by s/2, so score j by d_j = a |k_j|_1, the LSE by D = max d_j, a
//        probability by a factor e^2D, and O by (e^2D - 1) sum p_j |v_j|.
//        Rows of K whose signs are random: errors of scores are independent, with a mean square of
//        a^2 |k_j|_2^2, and so that of O is sum (p_j a |k_j|_2)^2 (v_j - O)^2, to first order.
//   P V  A weight p_j t_j is off by half a step of max p_j max t_j / 255, of all rows and not of
//        one tile. So O is off by step/2 sum |c_j|.
//        Rows of V whose signs are random: the mean square of that is (step/2)^2 sum c_j^2.
//
// The bound on one element holds for any K/V. It is far larger than the usual error, which grows
// with the root of the rows; the mean square shows what the bound excuses.
ProductErrors BoundProducts(Precision precision, const QueryRow& row,
                            const RowAttention<double>& reference);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_ORACLE_PRODUCT_ERRORS_H_

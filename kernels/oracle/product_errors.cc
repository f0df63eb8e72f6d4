#include "kernels/oracle/product_errors.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace flashcore::kernels {

ProductErrors BoundProducts(Precision precision, const QueryRow& row,
                            const RowAttention<double>& reference) {
  ProductErrors errors;
  if (precision == Precision::k16Bit || !std::isfinite(reference.lse)) return errors;
  const double a = std::abs(double{row.terms.softmax_scale}) * LargestMagnitude(row.elements) /
                   LargestQueryCode(precision) / 2;

  // Over the visible rows: sums of p |v|, (p a |k|)^2 (v - O)^2, |c| and c^2, by element.
  const size_t head_dim = row.elements.size();
  std::vector<double> sizes(head_dim), squares(head_dim), codes(head_dim), code_squares(head_dim);
  double largest_p = 0, largest_t = 0;
  for (int32_t j = row.visible.begin; j < row.visible.end; ++j) {
    const float* const k = row.kv.Key(j);
    double absolute = 0, square = 0;
    for (size_t d = 0; d < head_dim; ++d) {
      const double element = k[d];
      absolute += std::abs(element);
      square += element * element;
    }
    errors.lse = std::max(errors.lse, a * absolute);
    const double p = reference.weights[j - row.visible.begin];
    const float* const v = row.kv.Value(j);
    const double t = row.kv.ValueScale(j);
    largest_p = std::max(largest_p, p);
    largest_t = std::max(largest_t, t);
    for (size_t d = 0; d < head_dim; ++d) {
      const double code = t > 0 ? v[d] / t : 0, off = v[d] - reference.output[d];
      sizes[d] += p * std::abs(double{v[d]});
      squares[d] += p * p * a * a * square * off * off;
      codes[d] += std::abs(code);
      code_squares[d] += code * code;
    }
  }
  const bool pv = precision == Precision::kInt8QkPv;
  const double half_step = pv ? largest_p * largest_t / kLargestProbabilityCode / 2 : 0;
  for (size_t d = 0; d < head_dim; ++d) {
    errors.output =
        std::max(errors.output, std::expm1(2 * errors.lse) * sizes[d] + half_step * codes[d]);
    errors.squares += squares[d] + half_step * half_step * code_squares[d];
  }
  return errors;
}

}  // namespace flashcore::kernels

#include "client/cli/product_errors.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "client/cli/oracle.h"
#include "kernels/half.h"
#include "kernels/kv_8bit.h"

namespace flashcore::cli {
namespace {

// The codes of a row of K, or V.
const std::byte* CodesOf(const kernels::KvView& kv, const std::byte* tensor, int32_t kv_head,
                         int32_t row) {
  return tensor + kv.pages[row / kernels::kPageTokens] * kv.page_stride + kv_head * kv.head_stride +
         row % kernels::kPageTokens * kv.row_stride;
}

double CodeAt(const std::byte* codes, int32_t d) {
  return kernels::CodeToFloat(kernels::KvDType::kInt8, codes[d]);
}

std::vector<double> QueryRow(const kernels::Geometry& geometry, const kernels::Span& span,
                             int32_t row, int32_t head) {
  const std::byte* const at = span.query + row * span.row_stride + head * span.head_stride;
  std::vector<double> query(static_cast<size_t>(geometry.head_dim));
  for (int32_t d = 0; d < geometry.head_dim; ++d) {
    query[d] = kernels::ToFloat(geometry.dtype, ElementAt(at, d));
  }
  return query;
}

}  // namespace

ProductErrors BoundProducts(const kernels::Geometry& geometry, const kernels::Span& span,
                            int32_t row, int32_t head, const double* output, double lse) {
  ProductErrors errors;
  if (geometry.precision == kernels::Precision::k16Bit || !std::isfinite(lse)) return errors;
  const int32_t kv_head = head / geometry.group();
  const std::vector<double> query = QueryRow(geometry, span, row, head);
  double largest = 0;
  for (const double element : query) largest = std::max(largest, std::abs(element));
  const double a = std::abs(double{span.terms.softmax_scale}) * largest / 127 / 2;

  // Over the visible rows: sums of p |v|, (p a |k|)^2 (v - O)^2, |c| and c^2, by element.
  std::vector<double> sizes(query.size()), squares(query.size());
  std::vector<double> codes(query.size()), code_squares(query.size());
  double largest_p = 0, largest_t = 0;
  const auto [first, last] = VisibleTo(span, row);
  for (auto j = static_cast<int32_t>(first); j <= last; ++j) {
    const std::byte* const k = CodesOf(span.kv, span.kv.key, kv_head, j);
    const double k_scale = kernels::RowScale(span.kv, span.kv.key, kv_head, j);
    double dot = 0, absolute = 0, square = 0;
    for (int32_t d = 0; d < geometry.head_dim; ++d) {
      const double element = k_scale * CodeAt(k, d);
      dot += query[d] * element;
      absolute += std::abs(element);
      square += element * element;
    }
    errors.lse = std::max(errors.lse, a * absolute);
    const double p = std::exp(span.terms.Score(dot) - lse);
    const std::byte* const v = CodesOf(span.kv, span.kv.value, kv_head, j);
    const double t = kernels::RowScale(span.kv, span.kv.value, kv_head, j);
    largest_p = std::max(largest_p, p);
    largest_t = std::max(largest_t, t);
    for (int32_t d = 0; d < geometry.head_dim; ++d) {
      const double code = CodeAt(v, d), off = t * code - output[d];
      sizes[d] += p * t * std::abs(code);
      squares[d] += p * p * a * a * square * off * off;
      codes[d] += std::abs(code);
      code_squares[d] += code * code;
    }
  }
  const bool pv = geometry.precision == kernels::Precision::kInt8QkPv;
  const double half_step = pv ? largest_p * largest_t / 255 / 2 : 0;
  for (size_t d = 0; d < query.size(); ++d) {
    errors.output =
        std::max(errors.output, std::expm1(2 * errors.lse) * sizes[d] + half_step * codes[d]);
    errors.squares += squares[d] + half_step * half_step * code_squares[d];
  }
  return errors;
}

}  // namespace flashcore::cli

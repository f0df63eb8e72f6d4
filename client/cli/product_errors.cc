#include "client/cli/product_errors.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

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
  std::vector<double> query;
  for (int32_t d = 0; d < geometry.head_dim; ++d) {
    uint16_t bits = 0;
    std::memcpy(&bits, at + d * sizeof(bits), sizeof(bits));
    query.push_back(kernels::ToFloat(geometry.dtype, bits));
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
  const double a = std::abs(double{span.softmax_scale}) * largest / 127 / 2;

  const int64_t position = int64_t{row} + span.kv.rows - span.query_rows;
  const auto first = static_cast<int32_t>(std::max<int64_t>(0, position - span.mask.left));
  const auto last =
      static_cast<int32_t>(std::min<int64_t>(span.kv.rows - 1, position + span.mask.right));
  // Over the visible rows: sums of p |v|, (p a |k|)^2 (v - O)^2, |c| and c^2, by element.
  std::vector<double> sizes(query.size()), squares(query.size());
  std::vector<double> codes(query.size()), code_squares(query.size());
  double largest_p = 0, largest_t = 0;
  for (int32_t j = first; j <= last; ++j) {
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
    const double p = std::exp(dot * span.softmax_scale - lse);
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

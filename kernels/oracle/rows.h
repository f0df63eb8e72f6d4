// The inputs of attention as numbers: rows of Q, K and V, and which K/V rows a query row sees.
#ifndef FLASHCORE_KERNELS_ORACLE_ROWS_H_
#define FLASHCORE_KERNELS_ORACLE_ROWS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/plan.h"

namespace flashcore::kernels {

// Products of codes over INT8 K/V (Precision in attention.h). A row of Q becomes integers: its
// largest magnitude being m, and n the largest code,
//
//   code = element * n / m, rounded to the nearest integer
//
// and the element counts as code * m / n. A row of zeros stays one. Codes are numbers of 8 bits, or
// two of these for products of 16 bits. A probability becomes a code of 8 bits without sign.
inline constexpr int32_t kLowQueryCodes = 256;  // codes of 16 bits: of the lower number
inline constexpr int32_t kLargestProbabilityCode = 255;

inline constexpr int32_t LargestQueryCode(Precision precision) {
  return precision == Precision::k16Bit ? 127 * kLowQueryCodes : 127;
}

inline double LargestMagnitude(const std::vector<double>& row) {
  double largest = 0;
  for (double element : row) largest = std::max(largest, std::abs(element));
  return largest;
}

// Replaces the elements of a row of Q by what they count as. round(code) is applied to the codes.
template <class Round>
void RoundQuery(int32_t largest_code, const Round& round, std::vector<double>* query) {
  const double largest = LargestMagnitude(*query);
  if (largest == 0) return;
  for (double& element : *query) {
    element = round(std::nearbyint(element * largest_code / largest)) * largest / largest_code;
  }
}

// Element d of a row of 16-bit elements.
float LoadElement(DType dtype, const std::byte* row, int32_t d);

// The largest relative error of rounding to `dtype`.
inline constexpr double UnitRoundoff(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
}

// The K/V rows that query row `row` of a span sees.
using Visibility = KvRange(const Span& span, int32_t row);

// By the definition of Mask, row by row. Not VisibleKv, by which kernels are planned.
KvRange VisibleByMask(const Span& span, int32_t row);

// Query row `row` of `span` as a span of its own. Its K/V ends with the last row of `visible`, so
// that a check costs no more than what the row sees.
Span OneRow(const Span& span, int32_t row, KvRange visible);

// K and V of one KV head as float32, which holds every 16-bit and 8-bit element.
class DecodedKv {
 public:
  DecodedKv(const Geometry& geometry, const KvView& kv, int32_t kv_head, KvRange rows);

  // [head_dim] of a row in `rows`.
  const float* Key(int32_t row) const { return Row(key_, row); }
  const float* Value(int32_t row) const { return Row(value_, row); }
  float ValueScale(int32_t row) const { return value_scale_[row - begin_]; }  // 16-bit K/V: 1
  int32_t head_dim() const { return head_dim_; }
  float largest_value() const { return largest_value_; }  // |V|, but for NaN

 private:
  const float* Row(const std::vector<float>& elements, int32_t row) const {
    return elements.data() + size_t{1} * (row - begin_) * head_dim_;
  }

  const int32_t begin_;
  const int32_t head_dim_;
  std::vector<float> key_, value_, value_scale_;
  float largest_value_ = 0;
};

// The elements of a row of Q. With `query_codes`, the largest code of a row, what they count as.
std::vector<double> DecodedQuery(const Geometry& geometry, const Span& span, int32_t row,
                                 int32_t head, int32_t query_codes = 0);

// One query row of one head.
struct QueryRow {
  int32_t row = 0;
  int32_t head = 0;
  std::vector<double> elements;  // [head_dim]
  Terms terms;
  const DecodedKv& kv;  // of its KV head
  KvRange visible;

  // Its place in [query_rows, num_heads].
  size_t Index(const Geometry& geometry) const {
    return size_t{1} * row * geometry.num_heads + head;
  }
};

// The K/V rows that each query row of a span sees.
std::vector<KvRange> VisibleRows(const Span& span, Visibility* visible);

// From the first to the last row of any range.
KvRange Union(const std::vector<KvRange>& ranges);

// Calls fn(QueryRow) for each query row and head of `span`, one KV head after the other.
template <class Fn>
void ForEachQueryRow(const Geometry& geometry, const Span& span, Visibility* visible,
                     int32_t query_codes, const Fn& fn) {
  const std::vector<KvRange> seen = VisibleRows(span, visible);
  const KvRange all = Union(seen);
  for (int32_t kv_head = 0; kv_head < geometry.num_kv_heads; ++kv_head) {
    const DecodedKv kv(geometry, span.kv, kv_head, all);
    for (int32_t row = 0; row < span.query_rows; ++row) {
      for (int32_t n = 0; n < geometry.group(); ++n) {
        const int32_t head = kv_head * geometry.group() + n;
        fn(QueryRow{row, head, DecodedQuery(geometry, span, row, head, query_codes), span.terms, kv,
                    seen[row]});
      }
    }
  }
}

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_ORACLE_ROWS_H_

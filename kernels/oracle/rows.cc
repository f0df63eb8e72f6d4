#include "kernels/oracle/rows.h"

#include <cstring>

#include "kernels/half.h"
#include "kernels/kv_8bit.h"

namespace flashcore::kernels {

float LoadElement(DType dtype, const std::byte* row, int32_t d) {
  uint16_t element;
  std::memcpy(&element, row + d * sizeof(element), sizeof(element));
  return ToFloat(dtype, element);
}

KvRange VisibleByMask(const Span& span, int32_t row) {
  const int64_t position = int64_t{row} + span.kv.rows - span.query_rows;
  const Mask mask = span.terms.mask;
  const auto sees = [&](int64_t j) {
    return (mask.left == Mask::kUnbounded || j >= position - mask.left) &&
           (mask.right == Mask::kUnbounded || j <= position + mask.right);
  };
  KvRange visible;
  while (visible.begin < span.kv.rows && !sees(visible.begin)) ++visible.begin;
  visible.end = visible.begin;
  while (visible.end < span.kv.rows && sees(visible.end)) ++visible.end;
  return visible;
}

Span OneRow(const Span& span, int32_t row, KvRange visible) {
  const int32_t rows = visible.end - visible.begin;
  Span one = span;
  one.query += row * span.row_stride;
  one.output += row * span.row_stride;
  if (one.lse != nullptr) one.lse += row * span.lse_row_stride;
  one.query_rows = 1;
  one.kv.rows = rows > 0 ? visible.end : 0;
  one.terms.mask = Mask::SlidingWindow(std::max(0, rows - 1), 0);
  return one;
}

DecodedKv::DecodedKv(const Geometry& geometry, const KvView& kv, int32_t kv_head, KvRange rows)
    : begin_(rows.begin), head_dim_(geometry.head_dim) {
  key_.resize(size_t{1} * (rows.end - rows.begin) * head_dim_);
  value_.resize(key_.size());
  for (int32_t j = rows.begin; j < rows.end; ++j) {
    const int32_t tile = j / kPageTokens;
    const int64_t page = kv.pages != nullptr ? kv.pages[tile] : tile;
    const int64_t offset =
        page * kv.page_stride + kv_head * kv.head_stride + j % kPageTokens * kv.row_stride;
    const size_t to = size_t{1} * (j - begin_) * head_dim_;
    const auto decode = [&](const std::byte* tensor, float* elements) {
      const bool has_scale = Is8Bit(geometry.kv_dtype) && kv.pages != nullptr;  // always paged
      const float scale = has_scale ? RowScale(kv, tensor, kv_head, j) : 1;
      for (int32_t d = 0; d < head_dim_; ++d) {
        elements[d] = has_scale ? scale * CodeToFloat(geometry.kv_dtype, tensor[offset + d])
                                : LoadElement(geometry.dtype, tensor + offset, d);
      }
      return scale;
    };
    decode(kv.key, key_.data() + to);
    value_scale_.push_back(decode(kv.value, value_.data() + to));
  }
  for (const float value : value_) largest_value_ = std::max(largest_value_, std::abs(value));
}

std::vector<double> DecodedQuery(const Geometry& geometry, const Span& span, int32_t row,
                                 int32_t head, int32_t query_codes) {
  const std::byte* from = span.query + row * span.row_stride + head * span.head_stride;
  std::vector<double> query(geometry.head_dim);
  for (int32_t d = 0; d < geometry.head_dim; ++d) query[d] = LoadElement(geometry.dtype, from, d);
  const auto keep = [](double code) { return code; };
  if (query_codes > 0) RoundQuery(query_codes, keep, &query);
  return query;
}

std::vector<KvRange> VisibleRows(const Span& span, Visibility* visible) {
  std::vector<KvRange> ranges;
  ranges.reserve(span.query_rows);
  for (int32_t row = 0; row < span.query_rows; ++row) ranges.push_back(visible(span, row));
  return ranges;
}

KvRange Union(const std::vector<KvRange>& ranges) {
  KvRange all;
  for (const KvRange& range : ranges) {
    if (range.begin >= range.end) continue;
    all = all.end == 0 ? range
                       : KvRange{std::min(all.begin, range.begin), std::max(all.end, range.end)};
  }
  return all;
}

}  // namespace flashcore::kernels

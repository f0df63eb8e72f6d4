#include "kernels/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/half.h"
#include "kernels/kv_8bit.h"

namespace flashcore::kernels {
namespace {

float LoadElement(DType dtype, const std::byte* row, int32_t d) {
  uint16_t element;
  std::memcpy(&element, row + d * DTypeBytes(dtype), sizeof(element));
  return ToFloat(dtype, element);
}

const std::byte* KvRow(const KvView& kv, const std::byte* base, int32_t row, int32_t kv_head) {
  const int32_t tile = row / kPageTokens;
  const int64_t page = kv.pages != nullptr ? kv.pages[tile] : tile;
  return base + page * kv.page_stride + kv_head * kv.head_stride +
         row % kPageTokens * kv.row_stride;
}

// The K/V rows that are visible to query row i of a span, by the definition of Mask.
std::vector<int32_t> VisibleRows(const Span& span, int32_t i) {
  const int64_t position = int64_t{i} + span.kv.rows - span.query_rows;
  std::vector<int32_t> visible;
  for (int32_t j = 0; j < span.kv.rows; ++j) {
    const bool left =
        span.terms.mask.left == Mask::kUnbounded || j >= position - span.terms.mask.left;
    const bool right =
        span.terms.mask.right == Mask::kUnbounded || j <= position + span.terms.mask.right;
    if (left && right) visible.push_back(j);
  }
  return visible;
}

// One query row of one head, and the K/V rows visible to it.
struct Row {
  const Geometry& geometry;
  const Span& span;
  const std::byte* query;
  int32_t kv_head;
  const std::vector<int32_t>& visible;

  // Element d of K/V row j, exactly.
  double Key(int32_t j, int32_t d) const { return Load(span.kv.key, j, d); }
  double Value(int32_t j, int32_t d) const { return Load(span.kv.value, j, d); }

 private:
  double Load(const std::byte* tensor, int32_t j, int32_t d) const {
    const std::byte* row = KvRow(span.kv, tensor, j, kv_head);
    if (!Is8Bit(geometry.kv_dtype)) return LoadElement(geometry.dtype, row, d);
    return double{RowScale(span.kv, tensor, kv_head, j)} * CodeToFloat(geometry.kv_dtype, row[d]);
  }
};

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// Writes O to output[head_dim] and returns the LSE. Sums and exponentials are of type Real; round()
// is applied to scores, probabilities and output.
template <class Real, class Round>
double AttendRow(const Row& row, const Round& round, double* output) {
  const Geometry& g = row.geometry;
  std::vector<Real> scores;
  Real max = static_cast<Real>(kNothing);
  for (int32_t j : row.visible) {
    Real dot = 0;
    for (int32_t d = 0; d < g.head_dim; ++d) {
      dot += LoadElement(g.dtype, row.query, d) * static_cast<Real>(row.Key(j, d));
    }
    scores.push_back(round(row.span.terms.Score(dot)));
    max = std::max(max, scores.back());
  }
  if (std::isinf(max) && max < 0) max = 0;
  Real sum = 0;
  for (Real& score : scores) sum += score = std::exp(score - max);
  std::fill(output, output + g.head_dim, 0.0);
  if (sum == 0) return kNothing;
  std::vector<Real> weighted(g.head_dim, 0);
  for (size_t n = 0; n < scores.size(); ++n) {
    const Real probability = round(scores[n] / sum);
    for (int32_t d = 0; d < g.head_dim; ++d) {
      weighted[d] += probability * static_cast<Real>(row.Value(row.visible[n], d));
    }
  }
  for (int32_t d = 0; d < g.head_dim; ++d) output[d] = round(weighted[d]);
  return max + std::log(sum);
}

template <class Real, class Round>
ReferenceResult AttendBatch(const AttentionBatch& batch, const Round& round) {
  const Geometry& g = batch.geometry;
  ReferenceResult result;
  std::vector<double> output(g.head_dim);
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    const Span& span = batch.spans[s];
    for (int32_t i = 0; i < span.query_rows; ++i) {
      const std::vector<int32_t> visible = VisibleRows(span, i);
      for (int32_t h = 0; h < g.num_heads; ++h) {
        const std::byte* query = span.query + i * span.row_stride + h * span.head_stride;
        const Row row{g, span, query, h / g.group(), visible};
        result.lse.push_back(AttendRow<Real>(row, round, output.data()));
        result.output.insert(result.output.end(), output.begin(), output.end());
      }
    }
  }
  return result;
}

}  // namespace

ReferenceResult ReferenceAttention(const AttentionBatch& batch) {
  return AttendBatch<double>(batch, [](double value) { return value; });
}

ReferenceResult UnfusedAttention(const AttentionBatch& batch) {
  const DType dtype = batch.geometry.dtype;
  return AttendBatch<float>(
      batch, [dtype](float value) { return ToFloat(dtype, FromFloat(dtype, value)); });
}

}  // namespace flashcore::kernels

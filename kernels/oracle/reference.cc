#include "kernels/oracle/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/half.h"

namespace flashcore::kernels {
namespace {

// round() is applied to scores, probabilities and output.
template <class Real, class Round>
RowAttention<Real> Attend(const QueryRow& row, const Round& round) {
  const int32_t head_dim = row.kv.head_dim();
  RowAttention<Real> result;
  result.output.assign(head_dim, 0);
  Real max = static_cast<Real>(kNothing);
  for (int32_t j = row.visible.begin; j < row.visible.end; ++j) {
    const float* const key = row.kv.Key(j);
    Real dot = 0;
    for (int32_t d = 0; d < head_dim; ++d) {
      dot += static_cast<Real>(row.elements[d]) * static_cast<Real>(key[d]);
    }
    result.scores.push_back(round(row.terms.Score(dot)));
    max = std::max(max, result.scores.back());
  }
  if (std::isinf(max) && max < 0) max = 0;
  Real sum = 0;
  for (const Real score : result.scores) {
    result.weights.push_back(std::exp(score - max));
    sum += result.weights.back();
  }
  if (sum == 0) return result;
  std::vector<Real> weighted(head_dim, 0);
  for (int32_t j = row.visible.begin; j < row.visible.end; ++j) {
    const float* const value = row.kv.Value(j);
    Real& weight = result.weights[j - row.visible.begin];
    weight = round(weight / sum);
    for (int32_t d = 0; d < head_dim; ++d) weighted[d] += weight * static_cast<Real>(value[d]);
  }
  for (int32_t d = 0; d < head_dim; ++d) result.output[d] = round(weighted[d]);
  result.lse = max + std::log(sum);
  result.largest_score = max;
  return result;
}

template <class AttendRow>
AttentionResult AttendBatch(const AttentionBatch& batch, Visibility* visible,
                            const AttendRow& attend_row) {
  const Geometry& g = batch.geometry;
  AttentionResult result;
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    const size_t first = result.lse.size();
    result.lse.resize(first + size_t{1} * batch.spans[s].query_rows * g.num_heads);
    result.output.resize(result.lse.size() * g.head_dim);
    ForEachQueryRow(g, batch.spans[s], visible, /*query_codes=*/0, [&](const QueryRow& row) {
      const auto attended = attend_row(row);
      const size_t at = first + row.Index(g);
      result.lse[at] = attended.lse;
      std::copy(attended.output.begin(), attended.output.end(),
                result.output.begin() + at * g.head_dim);
    });
  }
  return result;
}

}  // namespace

RowAttention<double> AttendExactly(const QueryRow& row) {
  return Attend<double>(row, [](double value) { return value; });
}

RowAttention<float> AttendUnfused(const QueryRow& row, DType dtype) {
  return Attend<float>(row,
                       [dtype](float value) { return ToFloat(dtype, FromFloat(dtype, value)); });
}

AttentionResult ReferenceAttention(const AttentionBatch& batch, Visibility* visible) {
  return AttendBatch(batch, visible, AttendExactly);
}

AttentionResult UnfusedAttention(const AttentionBatch& batch, Visibility* visible) {
  const DType dtype = batch.geometry.dtype;
  return AttendBatch(batch, visible,
                     [dtype](const QueryRow& row) { return AttendUnfused(row, dtype); });
}

void StoreResult(const AttentionResult& result, const AttentionBatch& batch) {
  const Geometry& g = batch.geometry;
  auto output = result.output.begin();
  auto lse = result.lse.begin();
  for (int32_t s = 0; s < batch.num_spans; ++s) {
    const Span& span = batch.spans[s];
    for (int32_t row = 0; row < span.query_rows; ++row) {
      for (int32_t head = 0; head < g.num_heads; ++head, ++lse) {
        std::byte* to = span.output + row * span.row_stride + head * span.head_stride;
        for (int32_t d = 0; d < g.head_dim; ++d, to += sizeof(uint16_t)) {
          const uint16_t element = FromFloat(g.dtype, static_cast<float>(*output++));
          std::memcpy(to, &element, sizeof(element));
        }
        if (span.lse == nullptr) continue;
        span.lse[row * span.lse_row_stride + head * span.lse_head_stride] =
            static_cast<float>(*lse);
      }
    }
  }
}

}  // namespace flashcore::kernels

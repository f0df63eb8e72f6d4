#include "tests/bench/kernels/accuracy.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <random>

#include "kernels/half.h"
#include "kernels/oracle/errors.h"
#include "kernels/oracle/reference.h"

namespace flashcore::kernels {
namespace {

constexpr int64_t kOracleElements = int64_t{1} << 27;  // of K and V, read for the rows of all sets
constexpr int64_t kLeastRows = 4;                      // of a sampled head, if it has as many

const uint16_t* Elements(const std::byte* row) { return reinterpret_cast<const uint16_t*>(row); }

// `count` of 0 .. size - 1 in ascending order. If count >= 2, the first and the last are included.
std::vector<int32_t> Sample(int64_t size, int64_t count, std::mt19937* random) {
  std::vector<int32_t> all(size), sample;
  std::iota(all.begin(), all.end(), 0);
  std::sample(all.begin(), all.end(), std::back_inserter(sample), count, *random);
  if (sample.size() >= 2) {
    sample.front() = 0;
    sample.back() = all.back();
  }
  return sample;
}

// One query row of one head as a span with one head.
Span OneHeadRow(const AttentionShape& shape, Span span, int32_t head, int32_t row) {
  const int32_t kv_head = head / shape.geometry().group();
  span.query += head * span.head_stride;
  span.output += head * span.head_stride;
  span.kv.key += kv_head * span.kv.head_stride;
  span.kv.value += kv_head * span.kv.head_stride;
  return OneRow(span, row, VisibleByMask(span, row));
}

// The accuracy of these rows, without `finite` and `rows`.
Accuracy CheckRows(const AttentionShape& shape, const std::vector<Span>& rows) {
  const Geometry one_head{shape.dtype, 1, 1, shape.head_dim, shape.kv_dtype};
  const AttentionResult expected =
      ReferenceAttention({one_head, rows.data(), static_cast<int32_t>(rows.size())});
  Accuracy accuracy;
  accuracy.rows_checked = static_cast<int64_t>(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    for (int32_t d = 0; d < shape.head_dim; ++d) {
      const double want = expected.output[r * shape.head_dim + d];
      const double got = ToFloat(shape.dtype, Elements(rows[r].output)[d]);
      const double error = Difference(got, want);
      accuracy.max_error = std::max(accuracy.max_error, error);
      accuracy.error_squares += error * error;
      accuracy.squares += want * want;
    }
  }
  return accuracy;
}

}  // namespace

void Accuracy::Add(const Accuracy& other) {
  max_error = std::max(max_error, other.max_error);
  error_squares += other.error_squares;
  squares += other.squares;
  finite = finite && other.finite;
  rows_checked += other.rows_checked;
  rows += other.rows;
}

double ErrorBound(const KernelSpec& spec) {
  if (spec.accumulate == Accumulate::kFloat16) return 2e-2;
  const double rounding = spec.dtype == DType::kFloat16 ? 1e-3 : 8e-3;
  // Codes of Q change scores by a standard deviation of 1.6e-3, which matters most where two K/V
  // rows are visible. A probability of 8 bits is up to 1/255 off, of the largest.
  if (spec.precision == Precision::kInt8Qk) return rounding + 5e-3;
  if (spec.precision == Precision::kInt8QkPv) return rounding + 1e-2;
  return rounding;
}

Accuracy CheckOutput(const AttentionShape& shape, const std::vector<Span>& spans, int sets) {
  const int64_t all_heads = int64_t{shape.spans} * shape.num_heads;
  const int64_t row_elements = int64_t{2} * shape.kv_rows * shape.head_dim;
  const int64_t max_rows = std::max<int64_t>(1, kOracleElements / sets / row_elements);
  const int64_t least_rows = std::min<int64_t>(kLeastRows, shape.query_rows);
  const int64_t heads = std::clamp<int64_t>(max_rows / least_rows, 1, all_heads);
  const int64_t rows_each = std::max(least_rows, max_rows / heads);
  const uint16_t* output = Elements(spans.front().output);
  const int64_t output_elements = QueryBytes(shape) / static_cast<int64_t>(sizeof(uint16_t));
  std::mt19937 random(1);
  Accuracy accuracy;
  accuracy.rows = all_heads * shape.query_rows;
  accuracy.finite = std::all_of(output, output + output_elements, [&](uint16_t element) {
    return std::isfinite(ToFloat(shape.dtype, element));
  });
  for (const int32_t head : Sample(all_heads, heads, &random)) {
    std::vector<Span> rows;
    for (const int32_t row : Sample(shape.query_rows, rows_each, &random)) {
      rows.push_back(OneHeadRow(shape, spans[head / shape.num_heads], head % shape.num_heads, row));
    }
    accuracy.Add(CheckRows(shape, rows));
  }
  return accuracy;
}

}  // namespace flashcore::kernels

#include "kernels/bench/accuracy.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <random>

#include "kernels/bench/cuda_check.h"
#include "kernels/half.h"
#include "kernels/plan.h"
#include "kernels/reference.h"

namespace flashcore::kernels {
namespace {

constexpr int64_t kOracleElements = int64_t{1} << 27;  // of K and V, read by all rows checked
constexpr int64_t kLeastRows = 4;                      // of a sampled head, if it has as many

using Elements = std::vector<uint16_t>;
using Bytes = std::vector<std::byte>;

// One query head of one span on the host; every tensor is [rows, head_dim].
struct HostHead {
  Elements query, output;
  Bytes key, value;
  float key_scale = 1, value_scale = 1;  // of FP8 K/V
};

void Fetch(const void* from, size_t bytes, void* to) {
  Check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "fetch tensors for the check");
}

void FetchElements(const std::byte* from, Elements* to) {
  Fetch(from, to->size() * sizeof(uint16_t), to->data());
}

// K (or V, as `base` says) of one KV head, tile by tile; rows of a head are contiguous in a tile.
Bytes FetchKv(const KvView& kv, const std::byte* base, int32_t kv_head, const int32_t* pages) {
  Bytes to(kv.rows * kv.row_stride);
  for (int32_t tile = 0; tile < PagesFor(kv.rows); ++tile) {
    const int32_t row = tile * kPageTokens;
    const int64_t page = pages != nullptr ? pages[tile] : tile;
    Fetch(base + page * kv.page_stride + kv_head * kv.head_stride,
          std::min(kPageTokens, kv.rows - row) * kv.row_stride, to.data() + row * kv.row_stride);
  }
  return to;
}

HostHead FetchHead(const Geometry& geometry, const Span& span, int32_t head, const int32_t* pages) {
  const int64_t elements = int64_t{span.query_rows} * geometry.head_dim;
  HostHead host;
  host.query.resize(elements);
  host.output.resize(elements);
  FetchElements(span.query + head * span.head_stride, &host.query);
  FetchElements(span.output + head * span.head_stride, &host.output);
  const int32_t kv_head = head / geometry.group();
  host.key = FetchKv(span.kv, span.kv.key, kv_head, pages);
  host.value = FetchKv(span.kv, span.kv.value, kv_head, pages);
  if (geometry.kv_dtype == KvDType::kFloat8E4M3) {
    Fetch(span.kv.key_scale + kv_head, sizeof(float), &host.key_scale);
    Fetch(span.kv.value_scale + kv_head, sizeof(float), &host.value_scale);
  }
  return host;
}

// `count` of 0 .. size - 1 in ascending order, the first and the last among them where two may be.
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

// Query row `row` of a span as a span of its own: its K/V ends with the last row that it sees.
Span RowAlone(const AttentionShape& shape, const HostHead& host, float scale, int32_t row) {
  const KvRange seen = VisibleKv(shape.mask, shape.query_rows, shape.kv_rows, row, row + 1);
  Span span;
  span.query = reinterpret_cast<const std::byte*>(host.query.data() + row * shape.head_dim);
  span.query_rows = 1;
  span.kv.key = host.key.data();
  span.kv.value = host.value.data();
  span.kv.key_scale = &host.key_scale;
  span.kv.value_scale = &host.value_scale;
  span.kv.row_stride = shape.head_dim * shape.geometry().kv_element_bytes();
  span.kv.page_stride = kPageTokens * span.kv.row_stride;
  span.kv.rows = seen.end;
  if (seen.begin > 0) span.mask.left = seen.end - 1 - seen.begin;
  span.softmax_scale = scale;
  return span;
}

double MaxError(const AttentionShape& shape, const HostHead& host, float scale,
                const std::vector<int32_t>& rows) {
  std::vector<Span> spans;
  for (int32_t row : rows) spans.push_back(RowAlone(shape, host, scale, row));
  const Geometry one_head{shape.dtype, 1, 1, shape.head_dim, shape.kv_dtype};
  const ReferenceResult expected =
      ReferenceAttention({one_head, spans.data(), static_cast<int32_t>(spans.size())});
  double max_error = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    const uint16_t* got = host.output.data() + int64_t{rows[r]} * shape.head_dim;
    for (int32_t d = 0; d < shape.head_dim; ++d) {
      const double want = expected.output[r * shape.head_dim + d];
      max_error = std::max(max_error, std::abs(ToFloat(shape.dtype, got[d]) - want));
    }
  }
  return max_error;
}

bool AllFinite(const AttentionShape& shape, const std::byte* output) {
  Elements elements(QueryBytes(shape) / sizeof(uint16_t));
  FetchElements(output, &elements);
  return std::all_of(elements.begin(), elements.end(), [&](uint16_t element) {
    return std::isfinite(ToFloat(shape.dtype, element));
  });
}

}  // namespace

double ErrorBound(const KernelSpec& spec) {
  if (spec.accumulate == Accumulate::kFloat16) return 2e-2;
  return spec.dtype == DType::kFloat16 ? 1e-3 : 8e-3;
}

Accuracy CheckOutput(const AttentionShape& shape, const std::vector<Span>& spans,
                     const std::vector<int32_t>& pages) {
  const int64_t all_heads = int64_t{shape.spans} * shape.num_heads;
  const int64_t row_elements = int64_t{2} * shape.kv_rows * shape.head_dim;
  const int64_t max_rows = std::max<int64_t>(1, kOracleElements / row_elements);
  const int64_t least_rows = std::min<int64_t>(kLeastRows, shape.query_rows);
  const int64_t heads = std::clamp<int64_t>(max_rows / least_rows, 1, all_heads);
  const int64_t rows_each = std::max(least_rows, max_rows / heads);
  std::mt19937 random(1);
  Accuracy accuracy;
  accuracy.rows = all_heads * shape.query_rows;
  accuracy.finite = AllFinite(shape, spans.front().output);
  for (int32_t head : Sample(all_heads, heads, &random)) {
    const int32_t s = head / shape.num_heads;
    const int32_t* span_pages =
        pages.empty() ? nullptr : pages.data() + int64_t{s} * PagesFor(shape.kv_rows);
    const HostHead host = FetchHead(shape.geometry(), spans[s], head % shape.num_heads, span_pages);
    const std::vector<int32_t> rows = Sample(shape.query_rows, rows_each, &random);
    accuracy.max_error =
        std::max(accuracy.max_error, MaxError(shape, host, spans[s].softmax_scale, rows));
    accuracy.rows_checked += static_cast<int64_t>(rows.size());
  }
  return accuracy;
}

}  // namespace flashcore::kernels

#include "client/bench/reply_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "kernels/half.h"
#include "kernels/kv_8bit.h"
#include "kernels/kv_pages.h"

namespace flashcore::cli {
namespace {

constexpr int64_t kElementBytes = 2;
constexpr uint32_t kSpotCheckRows = 4;
constexpr double kSpotCheckFactor = 4;  // of the unfused error; verify's is 2, over more rows

void FillRandom(DType dtype, float magnitude, size_t bytes, std::mt19937_64* random,
                std::vector<uint16_t>* out) {
  out->resize(bytes / sizeof(uint16_t));
  for (uint16_t& element : *out) {
    // The top 24 bits, as a number from -1 to 1: faster than a standard distribution.
    const float unit = static_cast<float>((*random)() >> 40) * 0x1p-23f - 1.0f;
    element = kernels::FromFloat(ToKernel(dtype), unit * magnitude);
  }
}

kernels::Mask ToKernelMask(const Mask& mask) {
  if (mask.kind == Mask::Kind::kCausal) return kernels::Mask::Causal();
  if (mask.kind == Mask::Kind::kNone) return kernels::Mask::None();
  return kernels::Mask::SlidingWindow(mask.left.value_or(kernels::Mask::kUnbounded),
                                      mask.right.value_or(kernels::Mask::kUnbounded));
}

kernels::Terms ToKernelTerms(const AttendRequest& request) {
  return {ToKernelMask(request.mask),
          request.softmax_scale.value_or(1.0f / std::sqrt(static_cast<float>(request.head_dim)))};
}

// Calls `run(offset, elements)` for every contiguous run of rows [first, last) of K, or V, of span
// `index` in a tensor that is packed over the spans. Both are in elements.
template <typename Run>
void ForEachRun(const AttendRequest& request, size_t index, uint64_t first, uint64_t last,
                const Run& run) {
  size_t offset = 0;
  for (size_t i = 0; i < index; ++i) offset += request.spans[i].kv_rows;
  const size_t heads = request.num_kv_heads, head_dim = request.head_dim;
  offset *= heads * head_dim;
  if (request.layout == Layout::kNHD) {
    run(offset + first * heads * head_dim, (last - first) * heads * head_dim);
    return;
  }
  for (size_t head = 0; head < heads; ++head) {
    run(offset + (head * request.spans[index].kv_rows + first) * head_dim,
        (last - first) * head_dim);
  }
}

// Copies the first `rows` rows of span 0 to all other spans.
void ShareRows(const AttendRequest& request, uint64_t rows, std::vector<uint16_t>* tensor) {
  const std::vector<uint16_t> shared = KvRows(request, *tensor, 0, 0, rows);
  for (size_t i = 1; i < request.spans.size(); ++i) {
    auto from = shared.begin();
    ForEachRun(request, i, 0, rows, [&](size_t offset, size_t elements) {
      std::copy_n(from, elements, tensor->begin() + static_cast<ptrdiff_t>(offset));
      from += static_cast<ptrdiff_t>(elements);
    });
  }
}

// K, or V, of a span with dense rows, as 8-bit pages: heads of 64 rows and their scales.
std::vector<std::byte> To8BitPages(const kernels::PageLayout& layout, const kernels::KvView& kv,
                                   const std::byte* rows) {
  std::vector<std::byte> out(kernels::PagesFor(kv.rows) * layout.value_offset());
  for (int32_t row = 0; row < kv.rows; ++row) {
    std::byte* const page = out.data() + row / kernels::kPageTokens * layout.value_offset();
    for (int32_t head = 0; head < layout.num_kv_heads; ++head) {
      kernels::Store8BitRow(layout, rows + row * kv.row_stride + head * kv.head_stride, head,
                            row % kernels::kPageTokens, page);
    }
  }
  return out;
}

}  // namespace

kernels::DType ToKernel(DType dtype) {
  return dtype == DType::kFloat16 ? kernels::DType::kFloat16 : kernels::DType::kBFloat16;
}

kernels::KvDType ToKernel(KvDType kv_dtype) {
  switch (kv_dtype) {
    case KvDType::kSameAsQuery:
      break;
    case KvDType::kInt8:
      return kernels::KvDType::kInt8;
    case KvDType::kFloat8E4M3:
      return kernels::KvDType::kFloat8E4M3;
  }
  return kernels::KvDType::kSameAsQuery;
}

kernels::Precision ToKernel(Precision precision) {
  switch (precision) {
    case Precision::k16Bit:
      break;
    case Precision::kInt8Qk:
      return kernels::Precision::kInt8Qk;
    case Precision::kInt8QkPv:
      return kernels::Precision::kInt8QkPv;
  }
  return kernels::Precision::k16Bit;
}

absl::Span<const std::byte> Bytes(const std::vector<uint16_t>& elements) {
  return {reinterpret_cast<const std::byte*>(elements.data()), elements.size() * sizeof(uint16_t)};
}

kernels::KvRange VisibleTo(const kernels::Span& span, int32_t row) {
  const int64_t position = int64_t{row} + span.kv.rows - span.query_rows;
  const int64_t first = std::max<int64_t>(0, position - span.terms.mask.left);
  const int64_t last = std::min<int64_t>(span.kv.rows - 1, position + span.terms.mask.right);
  if (last < first) return {};
  return {static_cast<int32_t>(first), static_cast<int32_t>(last + 1)};
}

std::vector<uint16_t> KvRows(const AttendRequest& request, const std::vector<uint16_t>& tensor,
                             size_t index, uint64_t first, uint64_t last) {
  std::vector<uint16_t> rows;
  ForEachRun(request, index, first, last, [&](size_t offset, size_t elements) {
    const auto from = tensor.begin() + static_cast<ptrdiff_t>(offset);
    rows.insert(rows.end(), from, from + static_cast<ptrdiff_t>(elements));
  });
  return rows;
}

RandomRequest::RandomRequest(const AttendRequest& shape, bool want_lse, float magnitude,
                             std::mt19937_64* random, uint32_t shared_rows)
    : request_(shape) {
  FillRandom(shape.dtype, magnitude, shape.QueryBytes(), random, &query_);
  FillRandom(shape.dtype, magnitude, shape.KvBytes(), random, &key_);
  FillRandom(shape.dtype, magnitude, shape.KvBytes(), random, &value_);
  ShareRows(shape, shared_rows, &key_);
  ShareRows(shape, shared_rows, &value_);
  output_.assign(query_.size(), kNanBits);
  if (want_lse) lse_.assign(shape.LseElements(), std::nanf(""));
  request_.query = Bytes(query_);
  request_.key = Bytes(key_);
  request_.value = Bytes(value_);
  request_.output = {reinterpret_cast<std::byte*>(output_.data()), output_.size() * 2};
  request_.lse = absl::MakeSpan(lse_);
}

KernelBatch ToKernelBatch(const AttendRequest& request) {
  KernelBatch batch;
  batch.geometry = {ToKernel(request.dtype), static_cast<int32_t>(request.num_heads),
                    static_cast<int32_t>(request.num_kv_heads),
                    static_cast<int32_t>(request.head_dim)};
  const bool nhd = request.layout == Layout::kNHD;
  const int64_t head_bytes = int64_t{request.head_dim} * kElementBytes;
  const int64_t heads = request.num_heads;
  const int64_t kv_heads = request.num_kv_heads;
  kernels::Span span;  // the next one
  span.query = request.query.data();
  span.output = request.output.data();
  span.lse = request.lse.empty() ? nullptr : request.lse.data();
  span.kv.key = request.key.data();
  span.kv.value = request.value.data();
  span.terms = ToKernelTerms(request);
  for (const SpanShape& shape : request.spans) {
    span.row_stride = nhd ? heads * head_bytes : head_bytes;
    span.head_stride = nhd ? head_bytes : shape.query_rows * head_bytes;
    span.query_rows = static_cast<int32_t>(shape.query_rows);
    span.lse_row_stride = nhd ? heads : 1;
    span.lse_head_stride = nhd ? 1 : shape.query_rows;
    span.kv.row_stride = nhd ? kv_heads * head_bytes : head_bytes;
    span.kv.head_stride = nhd ? head_bytes : shape.kv_rows * head_bytes;
    span.kv.page_stride = kernels::kPageTokens * span.kv.row_stride;
    span.kv.rows = static_cast<int32_t>(shape.kv_rows);
    batch.spans.push_back(span);
    span.query += shape.query_rows * heads * head_bytes;
    span.output += shape.query_rows * heads * head_bytes;
    span.kv.key += shape.kv_rows * kv_heads * head_bytes;
    span.kv.value += shape.kv_rows * kv_heads * head_bytes;
    if (span.lse != nullptr) span.lse += shape.query_rows * heads;
  }
  return batch;
}

KernelBatch OneKvHead(const KernelBatch& batch, size_t index, int32_t kv_head,
                      absl::Span<const uint16_t> key, absl::Span<const uint16_t> value) {
  KernelBatch out;
  out.geometry = batch.geometry;
  out.geometry.num_heads = batch.geometry.group();
  out.geometry.num_kv_heads = 1;
  kernels::Span span = batch.spans[index];
  const int64_t first_head = int64_t{kv_head} * batch.geometry.group();
  span.query += first_head * span.head_stride;
  span.output += first_head * span.head_stride;
  if (span.lse != nullptr) span.lse += first_head * span.lse_head_stride;
  span.kv.key = reinterpret_cast<const std::byte*>(key.data());
  span.kv.value = reinterpret_cast<const std::byte*>(value.data());
  span.kv.row_stride = batch.geometry.head_dim * kElementBytes;
  span.kv.page_stride = kernels::kPageTokens * span.kv.row_stride;
  span.kv.rows = static_cast<int32_t>(key.size()) / batch.geometry.head_dim;
  out.spans.push_back(span);
  return out;
}

struct KernelBatch::Pages {
  std::vector<std::byte> key, value;
  std::vector<int32_t> places;
};

KernelBatch AsStored(KernelBatch batch, KvDType kv_dtype, Precision precision) {
  batch.geometry.kv_dtype = ToKernel(kv_dtype);
  if (kv_dtype == KvDType::kInt8) batch.geometry.precision = ToKernel(precision);
  if (kv_dtype == KvDType::kSameAsQuery) return batch;
  const kernels::PageLayout layout = kernels::PageLayoutOf(batch.geometry);
  for (kernels::Span& span : batch.spans) {
    auto pages = std::make_shared<KernelBatch::Pages>();
    pages->key = To8BitPages(layout, span.kv, span.kv.key);
    pages->value = To8BitPages(layout, span.kv, span.kv.value);
    pages->places.resize(kernels::PagesFor(span.kv.rows));
    std::iota(pages->places.begin(), pages->places.end(), 0);
    span.kv.key = pages->key.data();
    span.kv.value = pages->value.data();
    span.kv.pages = pages->places.data();
    span.kv.page_stride = layout.value_offset();
    span.kv.head_stride = layout.head_bytes();
    span.kv.row_stride = layout.row_bytes();
    batch.pages.push_back(std::move(pages));
  }
  return batch;
}

KernelBatch SpotCheckBatch(const KernelBatch& whole, uint32_t rows_per_span) {
  KernelBatch out;
  out.geometry = whole.geometry;
  out.pages = whole.pages;
  for (const kernels::Span& span : whole.spans) {
    const int64_t picks = std::min<int64_t>(rows_per_span, span.query_rows);
    for (int64_t pick = 0; pick < picks; ++pick) {
      const int64_t row =
          picks == 1 ? span.query_rows - 1 : pick * (span.query_rows - 1) / (picks - 1);
      const auto at = static_cast<int32_t>(row);
      out.spans.push_back(kernels::OneRow(span, at, VisibleTo(span, at)));
    }
  }
  return out;
}

bool SpotCheck(const KernelBatch& reply) {
  return Compare(SpotCheckBatch(reply, kSpotCheckRows)).Within(kSpotCheckFactor);
}

Errors Compare(const KernelBatch& reply) { return kernels::Compare(reply.view(), VisibleTo); }

}  // namespace flashcore::cli

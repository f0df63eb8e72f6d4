#include "tests/kernels/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/fp8.h"
#include "kernels/int8.h"
#include "kernels/kv_pages.h"

namespace flashcore::kernels {
namespace {

constexpr int kRowPadding = 32;        // elements after the last head of a Q or O row
constexpr int kOuterPadding = 64;      // elements before and after O, floats around LSE
constexpr uint16_t kPoison = 0x7fc1;   // NaN in float16 and in bfloat16
constexpr uint8_t kFp8Poison = 0x7f;   // NaN
constexpr uint8_t kInt8Poison = 0xff;  // pairs of it are NaN as scales
constexpr uint32_t kLsePoison = 0x7fc12345;

uint16_t RandomElement(DType dtype, float magnitude, std::mt19937_64* random) {
  std::uniform_real_distribution<float> uniform(-magnitude, magnitude);
  return FromFloat(dtype, uniform(*random));
}

}  // namespace

ProblemSpan::ProblemSpan(const Geometry& geometry, const SpanShape& shape, std::mt19937_64* random)
    : geometry_(geometry) {
  span_.query_rows = shape.query_rows;
  span_.mask = shape.mask;
  span_.softmax_scale = 1.0f / std::sqrt(static_cast<float>(geometry.head_dim));
  MakeQuery(shape, random);
  LayOutKv(shape, random);
  FillKv(shape, random);
  PoisonOutputs();
}

void ProblemSpan::MakeQuery(const SpanShape& shape, std::mt19937_64* random) {
  const int64_t row = int64_t{geometry_.num_heads} * geometry_.head_dim + kRowPadding;
  span_.row_stride = row * 2;
  span_.head_stride = int64_t{geometry_.head_dim} * 2;
  const size_t elements = shape.query_rows * row + 2 * kOuterPadding;
  query_.assign(elements, kPoison);
  output_.resize(elements);
  span_.query = reinterpret_cast<const std::byte*>(query_.data() + kOuterPadding);
  span_.output = reinterpret_cast<std::byte*>(output_.data() + kOuterPadding);
  for (int32_t i = 0; i < shape.query_rows; ++i) {
    for (int32_t h = 0; h < geometry_.num_heads; ++h) {
      uint16_t* to = QueryRow(i, h);
      for (int32_t d = 0; d < geometry_.head_dim; ++d) {
        to[d] = RandomElement(geometry_.dtype, shape.magnitude, random);
      }
    }
  }
  span_.lse_row_stride = 1;
  span_.lse_head_stride = shape.query_rows + 3;
  lse_.resize(geometry_.num_heads * span_.lse_head_stride + 2 * kOuterPadding);
  span_.lse = lse_.data() + kOuterPadding;
}

void ProblemSpan::LayOutKv(const SpanShape& shape, std::mt19937_64* random) {
  KvView& kv = unquantised_;
  const int64_t row_bytes = int64_t{geometry_.head_dim} * 2;
  const int64_t heads = geometry_.num_kv_heads;
  const int32_t tiles = PagesFor(shape.kv_rows);
  const Layout layout = geometry_.kv_dtype == KvDType::kInt8 ? Layout::kPaged : shape.layout;
  kv.rows = shape.kv_rows;
  kv.row_stride = layout == Layout::kDenseNhd ? heads * row_bytes : row_bytes;
  kv.page_stride = kPageTokens * kv.row_stride;
  int64_t rows = shape.kv_rows + 2;  // two rows past the end, poisoned
  if (layout == Layout::kDenseNhd) {
    kv.head_stride = row_bytes;
  } else if (layout == Layout::kDenseHnd) {
    kv.head_stride = rows * row_bytes;
  } else {
    kv.head_stride = kPageTokens * row_bytes;
    kv.page_stride = heads * kv.head_stride;
    pages_.resize(2 * tiles + 1);  // more pages than tiles: the rest stay unused
    rows = static_cast<int64_t>(pages_.size()) * kPageTokens;
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), *random);
    pages_.resize(tiles);
    kv.pages = pages_.data();
  }
  key_.elements.assign(rows * heads * geometry_.head_dim, kPoison);
  value_.elements.assign(key_.elements.size(), kPoison);
  kv.key = reinterpret_cast<const std::byte*>(key_.elements.data());
  kv.value = reinterpret_cast<const std::byte*>(value_.elements.data());
}

void ProblemSpan::FillKv(const SpanShape& shape, std::mt19937_64* random) {
  const int32_t heads = geometry_.num_kv_heads;
  for (int32_t j = 0; j < shape.kv_rows; ++j) {
    for (int32_t h = 0; h < heads; ++h) {
      std::uniform_real_distribution<float> octaves(-1, 1);
      const float size = shape.uneven_rows ? std::exp2(octaves(*random)) : 1;
      const float loudness = h == shape.loud_kv_head ? 100.0f : size * shape.magnitude;
      for (size_t n = KvIndex(j, h); n < KvIndex(j, h) + geometry_.head_dim; ++n) {
        key_.elements[n] = RandomElement(geometry_.dtype, size * shape.magnitude, random);
        value_.elements[n] = RandomElement(geometry_.dtype, loudness, random);
      }
    }
  }
  span_.kv = unquantised_;
  if (geometry_.kv_dtype == KvDType::kSameAsQuery) return;
  for (KvTensor* tensor : {&key_, &value_}) {
    if (geometry_.kv_dtype == KvDType::kInt8) {
      MakeInt8(tensor);
    } else {
      MakeFp8(tensor);
    }
  }
  span_.kv.key = reinterpret_cast<const std::byte*>(key_.codes.data());
  span_.kv.value = reinterpret_cast<const std::byte*>(value_.codes.data());
  if (geometry_.kv_dtype == KvDType::kInt8) {
    const PageLayout layout = PageLayoutOf(geometry_);
    span_.kv.page_stride = layout.value_offset();
    span_.kv.head_stride = layout.head_bytes();
    span_.kv.row_stride = layout.row_bytes();
    return;
  }
  span_.kv.key_scale = key_.scales.data();
  span_.kv.value_scale = value_.scales.data();
  span_.kv.page_stride /= 2;
  span_.kv.head_stride /= 2;
  span_.kv.row_stride /= 2;
}

void ProblemSpan::MakeFp8(KvTensor* tensor) const {
  tensor->codes.assign(tensor->elements.size(), kFp8Poison);
  for (int32_t h = 0; h < geometry_.num_kv_heads; ++h) {
    const float scale = E4M3Scale(LargestOf(*tensor, h));
    tensor->scales.push_back(scale);
    for (int32_t j = 0; j < unquantised_.rows; ++j) {
      for (size_t n = KvIndex(j, h); n < KvIndex(j, h) + geometry_.head_dim; ++n) {
        tensor->codes[n] = FloatToE4M3(ToFloat(geometry_.dtype, tensor->elements[n]) / scale);
      }
    }
  }
}

void ProblemSpan::MakeInt8(KvTensor* tensor) const {
  const int64_t page_elements = int64_t{kPageTokens} * geometry_.num_kv_heads * geometry_.head_dim;
  const int64_t pages = static_cast<int64_t>(tensor->elements.size()) / page_elements;
  tensor->codes.assign(pages * PageLayoutOf(geometry_).value_offset(), kInt8Poison);
  for (int32_t j = 0; j < unquantised_.rows; ++j) {
    for (int32_t h = 0; h < geometry_.num_kv_heads; ++h) {
      QuantiseRow(tensor, pages_[j / kPageTokens], j % kPageTokens, h);
    }
  }
}

void ProblemSpan::QuantiseRow(KvTensor* tensor, int64_t page, int32_t row, int32_t kv_head) const {
  const PageLayout layout = PageLayoutOf(geometry_);
  const int32_t head_dim = geometry_.head_dim;
  const uint16_t* const elements =
      tensor->elements.data() +
      ((page * geometry_.num_kv_heads + kv_head) * kPageTokens + row) * head_dim;
  auto* const base =
      reinterpret_cast<std::byte*>(tensor->codes.data()) + page * layout.value_offset();
  const uint16_t scale =
      QuantiseToInt8(geometry_.dtype, reinterpret_cast<const std::byte*>(elements), head_dim,
                     base + kv_head * layout.head_bytes() + row * layout.row_bytes());
  std::memcpy(base + layout.scales_offset(kv_head) + row * sizeof(scale), &scale, sizeof(scale));
}

void ProblemSpan::Set(KvTensor* tensor, int32_t row, int32_t kv_head, int32_t d,
                      float value) const {
  const size_t at = KvIndex(row, kv_head) + d;
  tensor->elements[at] = FromFloat(geometry_.dtype, value);
  if (geometry_.kv_dtype == KvDType::kFloat8E4M3) {
    tensor->codes[at] = FloatToE4M3(value / tensor->scales[kv_head]);
  } else if (geometry_.kv_dtype == KvDType::kInt8) {
    QuantiseRow(tensor, pages_[row / kPageTokens], row % kPageTokens, kv_head);
  }
}

void ProblemSpan::FillBeyondEnd(float value) {
  std::vector<bool> owned(key_.elements.size(), false);
  for (int32_t j = 0; j < unquantised_.rows; ++j) {
    for (int32_t h = 0; h < geometry_.num_kv_heads; ++h) {
      std::fill_n(owned.begin() + KvIndex(j, h), geometry_.head_dim, true);
    }
  }
  for (KvTensor* tensor : {&key_, &value_}) {
    for (size_t n = 0; n < owned.size(); ++n) {
      if (owned[n]) continue;
      tensor->elements[n] = FromFloat(geometry_.dtype, value);
      if (geometry_.kv_dtype == KvDType::kFloat8E4M3) tensor->codes[n] = FloatToE4M3(value);
    }
    if (geometry_.kv_dtype != KvDType::kInt8) continue;
    // Element by element, the rows of pages are in this order.
    for (size_t n = 0; n < owned.size(); n += geometry_.head_dim) {
      const int64_t row = static_cast<int64_t>(n) / geometry_.head_dim;
      const int64_t head = row / kPageTokens;
      if (!owned[n]) {
        QuantiseRow(tensor, head / geometry_.num_kv_heads, static_cast<int32_t>(row % kPageTokens),
                    static_cast<int32_t>(head % geometry_.num_kv_heads));
      }
    }
  }
}

float ProblemSpan::LargestOf(const KvTensor& tensor, int32_t kv_head) const {
  float largest = 0;
  for (int32_t j = 0; j < unquantised_.rows; ++j) {
    const size_t first = KvIndex(j, kv_head);
    for (size_t n = first; n < first + geometry_.head_dim; ++n) {
      largest = std::max(largest, std::abs(ToFloat(geometry_.dtype, tensor.elements[n])));
    }
  }
  return largest;
}

Span ProblemSpan::unquantised() const {
  Span span = span_;
  span.kv = unquantised_;
  return span;
}

uint16_t* ProblemSpan::QueryRow(int32_t row, int32_t head) {
  return query_.data() + OutputIndex(row, head);  // Q and O have the same shape
}

// Index of element 0 of a K or V row, of 16-bit elements and FP8 codes.
size_t ProblemSpan::KvIndex(int32_t row, int32_t kv_head) const {
  const KvView& kv = unquantised_;
  const int32_t tile = row / kPageTokens;
  const int64_t page = kv.pages != nullptr ? kv.pages[tile] : tile;
  return (page * kv.page_stride + kv_head * kv.head_stride + row % kPageTokens * kv.row_stride) / 2;
}

size_t ProblemSpan::OutputIndex(int32_t row, int32_t head) const {
  return kOuterPadding + (row * span_.row_stride + head * span_.head_stride) / 2;
}

size_t ProblemSpan::LseIndex(int32_t row, int32_t head) const {
  return kOuterPadding + row * span_.lse_row_stride + head * span_.lse_head_stride;
}

void ProblemSpan::PoisonOutputs() {
  std::fill(output_.begin(), output_.end(), kPoison);
  std::fill(lse_.begin(), lse_.end(), BitsFloat(kLsePoison));
}

bool ProblemSpan::PaddingIsUntouched() const {
  std::vector<bool> owned(output_.size(), false);
  std::vector<bool> lse_owned(lse_.size(), false);
  for (int32_t i = 0; i < span_.query_rows; ++i) {
    for (int32_t h = 0; h < geometry_.num_heads; ++h) {
      std::fill_n(owned.begin() + OutputIndex(i, h), geometry_.head_dim, true);
      lse_owned[LseIndex(i, h)] = true;
    }
  }
  for (size_t n = 0; n < output_.size(); ++n) {
    if (!owned[n] && output_[n] != kPoison) return false;
  }
  for (size_t n = 0; n < lse_.size(); ++n) {
    if (!lse_owned[n] && FloatBits(lse_[n]) != kLsePoison) return false;
  }
  return true;
}

std::vector<uint16_t> ProblemSpan::Output() const {
  std::vector<uint16_t> packed;
  for (int32_t i = 0; i < span_.query_rows; ++i) {
    for (int32_t h = 0; h < geometry_.num_heads; ++h) {
      const auto from = output_.begin() + OutputIndex(i, h);
      packed.insert(packed.end(), from, from + geometry_.head_dim);
    }
  }
  return packed;
}

std::vector<float> ProblemSpan::Lse() const {
  std::vector<float> packed;
  for (int32_t i = 0; i < span_.query_rows; ++i) {
    for (int32_t h = 0; h < geometry_.num_heads; ++h) packed.push_back(lse_[LseIndex(i, h)]);
  }
  return packed;
}

Problem::Problem(const Geometry& geometry, const std::vector<SpanShape>& shapes,
                 std::mt19937_64* random)
    : geometry_(geometry) {
  for (const SpanShape& shape : shapes) {
    spans_.push_back(std::make_unique<ProblemSpan>(geometry, shape, random));
  }
}

AttentionBatch Problem::batch() {
  views_.clear();
  for (const auto& span : spans_) views_.push_back(span->span());
  return {geometry_, views_.data(), num_spans()};
}

AttentionBatch Problem::batch_of(int span) {
  views_ = {spans_[span]->span()};
  return {geometry_, views_.data(), 1};
}

void Problem::PoisonOutputs() {
  for (const auto& span : spans_) span->PoisonOutputs();
}

Problem::Outputs Problem::outputs() const {
  Outputs outputs;
  for (const auto& span : spans_) {
    outputs.output.push_back(span->Output());
    outputs.lse.push_back(span->Lse());
  }
  return outputs;
}

}  // namespace flashcore::kernels

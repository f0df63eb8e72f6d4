#include "tests/kernels/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/kv_8bit.h"
#include "kernels/kv_pages.h"
#include "tests/kernels/kernel_rounding.h"

namespace flashcore::kernels {
namespace {

constexpr int kRowPadding = 32;         // elements after the last head of a Q or O row
constexpr int kOuterPadding = 64;       // elements before and after O, floats around LSE
constexpr uint16_t kPoison = 0x7fc1;    // NaN in float16 and in bfloat16
constexpr std::byte k8BitPoison{0xff};  // NaN as E4M3; pairs of it are NaN as scales
constexpr uint32_t kLsePoison = 0x7fc12345;

uint16_t RandomElement(DType dtype, float magnitude, std::mt19937_64* random) {
  std::uniform_real_distribution<float> uniform(-magnitude, magnitude);
  return FromFloat(dtype, uniform(*random));
}

// Whether every kernel gets the same code: float32 divides and multiplies with errors of a few
// units in the last place, which matter near a half.
bool IsCertainCode(double element, double largest, int32_t largest_code) {
  const double code = std::abs(element) * largest_code / largest;
  return std::abs(code - std::floor(code) - 0.5) > 0x1p-21 * largest_code;
}

// Draws elements of a row of Q until the codes of all are certain.
void MakeCodesCertain(const Geometry& geometry, const SpanShape& shape, std::mt19937_64* random,
                      uint16_t* row) {
  const auto magnitude_of = [&](int32_t d) { return std::abs(ToFloat(geometry.dtype, row[d])); };
  const int32_t largest_code = LargestQueryCode(PrecisionFor(geometry, shape.query_rows));
  float largest = 0;
  for (int32_t d = 0; d < geometry.head_dim; ++d) largest = std::max(largest, magnitude_of(d));
  if (largest == 0) return;
  for (int32_t d = 0; d < geometry.head_dim; ++d) {
    while (magnitude_of(d) > largest || !IsCertainCode(magnitude_of(d), largest, largest_code)) {
      row[d] = RandomElement(geometry.dtype, shape.magnitude, random);
    }
  }
}

}  // namespace

ProblemSpan::ProblemSpan(const Geometry& geometry, const SpanShape& shape, std::mt19937_64* random)
    : geometry_(geometry) {
  span_.query_rows = shape.query_rows;
  span_.terms = {shape.mask, 1.0f / std::sqrt(static_cast<float>(geometry.head_dim))};
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
      if (geometry_.kv_dtype == KvDType::kInt8) {
        MakeCodesCertain(geometry_, shape, random, to);
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
  const Layout layout = Is8Bit(geometry_.kv_dtype) ? Layout::kPaged : shape.layout;
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
      for (size_t n = KvIndex(j, h); n < KvIndex(j, h) + geometry_.head_dim; ++n) {
        key_.elements[n] = RandomElement(geometry_.dtype, size * shape.magnitude, random);
        value_.elements[n] = RandomElement(geometry_.dtype, size * shape.magnitude, random);
      }
    }
  }
  span_.kv = unquantised_;
  if (!Is8Bit(geometry_.kv_dtype)) return;
  Make8Bit(&key_);
  Make8Bit(&value_);
  const PageLayout layout = PageLayoutOf(geometry_);
  span_.kv.key = key_.pages.data();
  span_.kv.value = value_.pages.data();
  span_.kv.page_stride = layout.value_offset();
  span_.kv.head_stride = layout.head_bytes();
  span_.kv.row_stride = layout.row_bytes();
}

void ProblemSpan::Make8Bit(KvTensor* tensor) const {
  const int64_t page_elements = int64_t{kPageTokens} * geometry_.num_kv_heads * geometry_.head_dim;
  const int64_t pages = static_cast<int64_t>(tensor->elements.size()) / page_elements;
  tensor->pages.assign(pages * PageLayoutOf(geometry_).value_offset(), k8BitPoison);
  for (int32_t j = 0; j < unquantised_.rows; ++j) {
    for (int32_t h = 0; h < geometry_.num_kv_heads; ++h) Store8Bit(tensor, PagedRow(j), h);
  }
}

void ProblemSpan::Store8Bit(KvTensor* tensor, int64_t row, int32_t kv_head) const {
  const PageLayout layout = PageLayoutOf(geometry_);
  const int64_t page = row / kPageTokens;
  const auto in_page = static_cast<int32_t>(row % kPageTokens);
  const uint16_t* const elements =
      tensor->elements.data() +
      ((page * geometry_.num_kv_heads + kv_head) * kPageTokens + in_page) * geometry_.head_dim;
  Store8BitRow(layout, reinterpret_cast<const std::byte*>(elements), kv_head, in_page,
               tensor->pages.data() + page * layout.value_offset());
}

void ProblemSpan::Set(KvTensor* tensor, int32_t row, int32_t kv_head, int32_t d,
                      float value) const {
  tensor->elements[KvIndex(row, kv_head) + d] = FromFloat(geometry_.dtype, value);
  if (Is8Bit(geometry_.kv_dtype)) Store8Bit(tensor, PagedRow(row), kv_head);
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
      if (!owned[n]) tensor->elements[n] = FromFloat(geometry_.dtype, value);
    }
    if (!Is8Bit(geometry_.kv_dtype)) continue;
    const auto rows = static_cast<int64_t>(owned.size()) / geometry_.head_dim;
    for (int64_t n = 0; n < rows; ++n) {  // row n % 64 of head n / 64 of all pages
      if (owned[n * geometry_.head_dim]) continue;
      const int64_t head = n / kPageTokens;
      Store8Bit(tensor, head / geometry_.num_kv_heads * kPageTokens + n % kPageTokens,
                static_cast<int32_t>(head % geometry_.num_kv_heads));
    }
  }
}

Span ProblemSpan::unquantised() const {
  Span span = span_;
  span.kv = unquantised_;
  return span;
}

uint16_t* ProblemSpan::QueryRow(int32_t row, int32_t head) {
  return query_.data() + OutputIndex(row, head);  // Q and O have the same shape
}

int64_t ProblemSpan::PagedRow(int32_t row) const {
  return int64_t{pages_[row / kPageTokens]} * kPageTokens + row % kPageTokens;
}

// Index of element 0 of a K or V row of 16 bits.
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

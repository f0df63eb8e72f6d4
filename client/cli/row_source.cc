#include "client/cli/row_source.h"

namespace flashcore::cli {
namespace {

// The finaliser of SplitMix64: a bijection that mixes well.
uint64_t Mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

}  // namespace

RowSource::RowSource(DType dtype, uint32_t head_dim, uint64_t seed, uint64_t prefix_rows,
                     uint64_t prefix_seed)
    : head_dim_(head_dim),
      seed_(Mix(seed)),
      prefix_rows_(prefix_rows),
      prefix_seed_(Mix(prefix_seed)),
      random_bits_(dtype == DType::kFloat16 ? 0x83ff : 0x807f),
      exponent_(dtype == DType::kFloat16 ? 0x3800 : 0x3f00) {}

void RowSource::Fill(Tensor tensor, uint64_t first, uint64_t rows, uint32_t heads, Layout layout,
                     absl::Span<uint16_t> out) const {
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint32_t head = 0; head < heads; ++head) {
      const uint64_t place = layout == Layout::kNHD ? row * heads + head : head * rows + row;
      FillRow(tensor, first + row, head, &out[place * head_dim_]);
    }
  }
}

void RowSource::FillHead(Tensor tensor, uint64_t first, uint64_t rows, uint32_t head,
                         absl::Span<uint16_t> out) const {
  for (uint64_t row = 0; row < rows; ++row) {
    FillRow(tensor, first + row, head, &out[row * head_dim_]);
  }
}

void RowSource::FillRow(Tensor tensor, uint64_t row, uint32_t head, uint16_t* out) const {
  const uint64_t seed = row < prefix_rows_ ? prefix_seed_ : seed_;
  uint64_t state = Mix(seed + (row << 20 | uint64_t{head} << 2 | static_cast<uint64_t>(tensor)));
  for (uint32_t d = 0; d < head_dim_; d += 4) {
    uint64_t bits = Mix(state += 0x9e3779b97f4a7c15);
    for (uint32_t i = d; i < d + 4 && i < head_dim_; ++i, bits >>= 16) {
      out[i] = static_cast<uint16_t>((bits & random_bits_) | exponent_);
    }
  }
}

}  // namespace flashcore::cli

#include "tests/kernels/forked_kv.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/fp8.h"
#include "kernels/int8.h"
#include "kernels/kv_pages.h"

namespace flashcore::kernels {

ForkedKv::ForkedKv(const Geometry& geometry, const std::vector<ForkShape>& shapes,
                   std::mt19937_64* random)
    : geometry_(geometry) {
  int32_t own_pages = 0;
  for (const ForkShape& shape : shapes) own_pages += PagesFor(shape.kv_rows) - shape.shared_pages;
  std::vector<int32_t> free(own_pages + 3);  // more pages than needed: the rest stay unused
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), *random);
  const PageLayout layout = PageLayoutOf(geometry);
  bytes_.assign(free.size() * layout.page_bytes(), std::byte{0xff});  // NaN in every type
  for (int32_t t = 0; t < 2 * geometry.num_kv_heads; ++t) {
    scales_.push_back(E4M3Scale(1.0f + 0.25f * t));
  }

  for (const ForkShape& shape : shapes) {
    std::vector<int32_t>& pages = pages_.emplace_back();
    if (shape.parent >= 0) {
      const std::vector<int32_t>& parent = pages_[shape.parent];
      pages.assign(parent.begin(), parent.begin() + shape.shared_pages);
    }
    while (static_cast<int32_t>(pages.size()) < PagesFor(shape.kv_rows)) {
      const int32_t row = static_cast<int32_t>(pages.size()) * kPageTokens;
      FillPage(free.back(), std::min(kPageTokens, shape.kv_rows - row), random);
      pages.push_back(free.back());
      free.pop_back();
    }
  }
  const std::byte* base = bytes_.data();
  for (size_t s = 0; s < shapes.size(); ++s) {
    views_.push_back({base, base + layout.value_offset(), pages_[s].data(), layout.page_bytes(),
                      layout.head_bytes(), layout.row_bytes(), shapes[s].kv_rows, scales_.data(),
                      scales_.data() + geometry.num_kv_heads});
  }
}

void ForkedKv::FillPage(int32_t page, int32_t rows, std::mt19937_64* random) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  const int64_t tiles = 2 * geometry_.num_kv_heads;
  for (int64_t t = page * tiles; t < (page + 1) * tiles; ++t) {
    for (int64_t n = 0; n < int64_t{rows} * geometry_.head_dim; ++n) {
      SetElement(t, n, uniform(*random));
    }
  }
}

void ForkedKv::SetValue(int span, int32_t row, int32_t kv_head, int32_t d, float value) {
  const int64_t page = pages_[span][row / kPageTokens];
  SetElement((page * 2 + 1) * geometry_.num_kv_heads + kv_head,
             int64_t{row % kPageTokens} * geometry_.head_dim + d, value);
}

void ForkedKv::SetElement(int64_t tile, int64_t index, float value) {
  const int64_t at = tile * kPageTokens * geometry_.head_dim + index;
  if (geometry_.kv_dtype == KvDType::kInt8) {
    // All rows have the same scale, until they get a value that it does not reach.
    const PageLayout layout = PageLayoutOf(geometry_);
    std::byte* const head = &bytes_[tile * layout.head_bytes()];
    const uint16_t scale = std::isfinite(value) ? FloatToBFloat16(1.0f / 64) : 0x7fc0;
    const int64_t row = index / geometry_.head_dim;
    std::memcpy(head + kPageTokens * layout.row_bytes() + row * sizeof(scale), &scale,
                sizeof(scale));
    head[index] = static_cast<std::byte>(Int8Code(value, BFloat16ToFloat(scale)));
  } else if (geometry_.kv_dtype == KvDType::kFloat8E4M3) {
    bytes_[at] = std::byte{FloatToE4M3(value / scales_[tile % scales_.size()])};
  } else {
    const uint16_t element = FromFloat(geometry_.dtype, value);
    std::memcpy(&bytes_[2 * at], &element, sizeof(element));
  }
}

}  // namespace flashcore::kernels

#include "tests/kernels/forked_kv.h"

#include <algorithm>
#include <numeric>

#include "kernels/kv_8bit.h"
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
  const size_t page_elements = 2 * geometry.num_kv_heads * kPageTokens * geometry.head_dim;
  elements_.assign(free.size() * page_elements, 0xffff);  // NaN in both types
  // NaN as E4M3, and as scales.
  if (Is8Bit(geometry.kv_dtype)) bytes_.assign(free.size() * layout.page_bytes(), std::byte{0xff});

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
  const auto* const base = Is8Bit(geometry.kv_dtype)
                               ? bytes_.data()
                               : reinterpret_cast<const std::byte*>(elements_.data());
  for (size_t s = 0; s < shapes.size(); ++s) {
    views_.push_back({base, base + layout.value_offset(), pages_[s].data(), layout.page_bytes(),
                      layout.head_bytes(), layout.row_bytes(), shapes[s].kv_rows});
  }
}

uint16_t* ForkedKv::Row(int64_t half, int32_t kv_head, int32_t row) {
  const int64_t head = half * geometry_.num_kv_heads + kv_head;
  return elements_.data() + (head * kPageTokens + row) * geometry_.head_dim;
}

void ForkedKv::Store8Bit(int64_t half, int32_t kv_head, int32_t row) {
  const PageLayout layout = PageLayoutOf(geometry_);
  Store8BitRow(layout, reinterpret_cast<const std::byte*>(Row(half, kv_head, row)), kv_head, row,
               bytes_.data() + half * layout.value_offset());
}

void ForkedKv::FillPage(int32_t page, int32_t rows, std::mt19937_64* random) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (const int64_t half : {2 * int64_t{page}, 2 * int64_t{page} + 1}) {
    for (int32_t head = 0; head < geometry_.num_kv_heads; ++head) {
      for (int32_t row = 0; row < rows; ++row) {
        uint16_t* const elements = Row(half, head, row);
        for (int32_t d = 0; d < geometry_.head_dim; ++d) {
          elements[d] = FromFloat(geometry_.dtype, uniform(*random));
        }
        if (Is8Bit(geometry_.kv_dtype)) Store8Bit(half, head, row);
      }
    }
  }
}

void ForkedKv::SetValue(int span, int32_t row, int32_t kv_head, int32_t d, float value) {
  const int64_t half = 2 * int64_t{pages_[span][row / kPageTokens]} + 1;
  const int32_t in_page = row % kPageTokens;
  Row(half, kv_head, in_page)[d] = FromFloat(geometry_.dtype, value);
  if (Is8Bit(geometry_.kv_dtype)) Store8Bit(half, kv_head, in_page);
}

}  // namespace flashcore::kernels

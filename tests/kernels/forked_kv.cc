#include "tests/kernels/forked_kv.h"

#include <algorithm>
#include <numeric>

#include "kernels/half.h"
#include "kernels/kv_pages.h"

namespace flashcore::kernels {
namespace {

constexpr uint16_t kPoison = 0x7fc1;  // NaN in float16 and in bfloat16

}  // namespace

ForkedKv::ForkedKv(const Geometry& geometry, const std::vector<ForkShape>& shapes,
                   std::mt19937_64* random)
    : geometry_(geometry) {
  int32_t own_pages = 0;
  for (const ForkShape& shape : shapes) own_pages += PagesFor(shape.kv_rows) - shape.shared_pages;
  std::vector<int32_t> free(own_pages + 3);  // more pages than needed: the others are nobody's
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), *random);
  const PageLayout layout{geometry.dtype, geometry.num_kv_heads, geometry.head_dim};
  elements_.assign(free.size() * layout.page_bytes() / 2, kPoison);

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
  const auto* base = reinterpret_cast<const std::byte*>(elements_.data());
  for (size_t s = 0; s < shapes.size(); ++s) {
    views_.push_back({base, base + layout.value_offset(), pages_[s].data(), layout.page_bytes(),
                      layout.head_bytes(), layout.row_bytes(), shapes[s].kv_rows});
  }
}

void ForkedKv::FillPage(int32_t page, int32_t rows, std::mt19937_64* random) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  const int64_t tile = int64_t{kPageTokens} * geometry_.head_dim;  // elements of a head's K or V
  const int64_t tiles = 2 * geometry_.num_kv_heads;
  for (int64_t t = page * tiles; t < (page + 1) * tiles; ++t) {
    for (int64_t n = 0; n < int64_t{rows} * geometry_.head_dim; ++n) {
      elements_[t * tile + n] = FromFloat(geometry_.dtype, uniform(*random));
    }
  }
}

}  // namespace flashcore::kernels

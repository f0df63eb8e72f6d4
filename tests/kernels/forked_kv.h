// K/V of spans that are forks of each other: pages in one arena, the leading pages shared.
#ifndef FLASHCORE_TESTS_KERNELS_FORKED_KV_H_
#define FLASHCORE_TESTS_KERNELS_FORKED_KV_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/attention.h"

namespace flashcore::kernels {

struct ForkShape {
  int32_t kv_rows = 0;
  int32_t parent = -1;       // index of an earlier span; -1: shares no page with one
  int32_t shared_pages = 0;  // leading pages shared with the parent
};

// Page numbers are in random order. Elements are uniform in [-1, 1]; rows that no span has are NaN.
// FP8: K and V of every KV head have different scales.
class ForkedKv {
 public:
  ForkedKv(const Geometry& geometry, const std::vector<ForkShape>& shapes, std::mt19937_64* random);
  ForkedKv(const ForkedKv&) = delete;
  ForkedKv& operator=(const ForkedKv&) = delete;

  // FP8 K/V keep their scales.
  void SetValue(int span, int32_t row, int32_t kv_head, int32_t d, float value);

  int num_spans() const { return static_cast<int>(views_.size()); }
  const KvView& view(int span) const { return views_[span]; }

 private:
  void FillPage(int32_t page, int32_t rows, std::mt19937_64* random);
  // Element `index` of a tile, which is K or V of one KV head of one page.
  void SetElement(int64_t tile, int64_t index, float value);

  const Geometry geometry_;
  std::vector<std::byte> bytes_;             // [pages][K, V][kv_heads][64][head_dim] elements
  std::vector<float> scales_;                // [K, V][kv_heads]
  std::vector<std::vector<int32_t>> pages_;  // [span]
  std::vector<KvView> views_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_FORKED_KV_H_

// K/V of spans that fork from each other: pages in one arena, the leading ones shared.
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
  int32_t parent = -1;       // index of an earlier span; -1: all pages are its own
  int32_t shared_pages = 0;  // leading pages that are the parent's too
};

// Page numbers are in random order. Elements are uniform in [-1, 1], those of rows that nobody has
// NaN. FP8 K/V have another scale for every KV head, of K and of V.
class ForkedKv {
 public:
  ForkedKv(const Geometry& geometry, const std::vector<ForkShape>& shapes, std::mt19937_64* random);
  ForkedKv(const ForkedKv&) = delete;
  ForkedKv& operator=(const ForkedKv&) = delete;

  int num_spans() const { return static_cast<int>(views_.size()); }
  const KvView& view(int span) const { return views_[span]; }

 private:
  void FillPage(int32_t page, int32_t rows, std::mt19937_64* random);
  void SetElement(int64_t tile, int64_t index, float value);

  const Geometry geometry_;
  std::vector<std::byte> bytes_;             // [pages][K, V][kv_heads][64][head_dim] elements
  std::vector<float> scales_;                // [K, V][kv_heads]
  std::vector<std::vector<int32_t>> pages_;  // of each span
  std::vector<KvView> views_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_FORKED_KV_H_

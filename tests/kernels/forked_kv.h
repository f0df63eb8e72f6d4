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
class ForkedKv {
 public:
  ForkedKv(const Geometry& geometry, const std::vector<ForkShape>& shapes, std::mt19937_64* random);
  ForkedKv(const ForkedKv&) = delete;
  ForkedKv& operator=(const ForkedKv&) = delete;

  // 8-bit rows are quantised again.
  void SetValue(int span, int32_t row, int32_t kv_head, int32_t d, float value);

  int num_spans() const { return static_cast<int>(views_.size()); }
  const KvView& view(int span) const { return views_[span]; }

 private:
  void FillPage(int32_t page, int32_t rows, std::mt19937_64* random);
  // `half` counts K and V of all pages.
  uint16_t* Row(int64_t half, int32_t kv_head, int32_t row);
  void Store8Bit(int64_t half, int32_t kv_head, int32_t row);

  const Geometry geometry_;
  std::vector<uint16_t> elements_;           // [pages][K, V][kv_heads][64][head_dim]
  std::vector<std::byte> bytes_;             // 8-bit K/V only: the same pages, quantised
  std::vector<std::vector<int32_t>> pages_;  // [span]
  std::vector<KvView> views_;
};

}  // namespace flashcore::kernels

#endif  // FLASHCORE_TESTS_KERNELS_FORKED_KV_H_

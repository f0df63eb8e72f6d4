// The block of bytes that carries spans and work items to a CUDA device.
#include "kernels/smxx/work_list.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace flashcore::kernels {
namespace {

Span MakeSpan(int32_t query_rows, int32_t kv_rows) {
  Span span;
  span.query_rows = query_rows;
  span.kv.rows = kv_rows;
  return span;
}

TEST(WorkList, HoldsSpansItemsByTileAndCombines) {
  const std::vector<Span> spans = {MakeSpan(1, 1000), MakeSpan(700, 300), MakeSpan(40, 70),
                                   MakeSpan(0, 10)};
  const AttentionBatch batch{{DType::kFloat16, 4, 2, 64}, spans.data(), 4};
  Plan plan;
  MakePlan(batch, kSm80Tiles[0].plan, 1, &plan);
  ASSERT_FALSE(plan.combines.empty());

  std::vector<Span> aligned(WorkListBytes(batch, plan) / sizeof(Span) + 1);
  auto* const block = reinterpret_cast<std::byte*>(aligned.data());
  PackWorkList(batch, plan, block);
  const WorkListView view(batch, plan, block);

  for (size_t s = 0; s < spans.size(); ++s) {
    EXPECT_EQ(view.spans[s].query_rows, spans[s].query_rows);
    EXPECT_EQ(view.spans[s].kv.rows, spans[s].kv.rows);
  }
  size_t items = 0;
  for (int kind = 0; kind < kCudaTileKinds; ++kind) {
    EXPECT_GT(view.tiles[kind].count, 0);
    items += view.tiles[kind].count;
    for (int32_t i = 0; i < view.tiles[kind].count; ++i) {
      const WorkItem& item = view.tiles[kind].items[i];
      EXPECT_LE(item.row_count, kCudaTileRows[kind]);
      if (kind > 0) {
        EXPECT_GT(item.row_count, kCudaTileRows[kind - 1]);
      }
    }
  }
  EXPECT_EQ(items, plan.items.size());
  EXPECT_EQ(
      std::memcmp(view.combines, plan.combines.data(), plan.combines.size() * sizeof(CombineItem)),
      0);
  EXPECT_EQ(reinterpret_cast<const std::byte*>(view.combines + plan.combines.size()),
            block + WorkListBytes(batch, plan));
}

TEST(WorkList, OfNothingIsEmpty) {
  const AttentionBatch batch{{DType::kFloat16, 1, 1, 64}, nullptr, 0};
  const Plan plan;
  EXPECT_EQ(WorkListBytes(batch, plan), 0u);
  PackWorkList(batch, plan, nullptr);
}

}  // namespace
}  // namespace flashcore::kernels

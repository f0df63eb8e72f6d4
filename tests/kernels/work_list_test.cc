// The block of bytes that carries the work of every thread block to a CUDA device.
#include "kernels/smxx/work_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace flashcore::kernels {
namespace {

Span MakeSpan(int32_t query_rows, int32_t kv_rows, Mask mask = Mask::None()) {
  Span span;
  span.query_rows = query_rows;
  span.kv.rows = kv_rows;
  span.mask = mask;
  return span;
}

// A batch with its packed block.
class PackedBatch {
 public:
  explicit PackedBatch(std::vector<Span> spans)
      : spans_(std::move(spans)),
        batch_{{DType::kFloat16, 4, 2, 64}, spans_.data(), static_cast<int32_t>(spans_.size())} {
    MakePlan(batch_, Sm80Plan(64), 1, &plan_);
    PlanOptions apart = Sm80Plan(64);
    apart.kv_heads_apart = true;
    MakePlan(batch_, apart, 1, &plan_of_all_heads_);
    aligned_.resize(WorkListBytes(plan_) / sizeof(BlockWork) + 1);
    PackWorkList(batch_, plan_, block());
  }

  const Plan& plan() const { return plan_; }
  const Plan& plan_of_all_heads() const { return plan_of_all_heads_; }
  std::byte* block() { return reinterpret_cast<std::byte*>(aligned_.data()); }
  size_t bytes() const { return WorkListBytes(plan_); }
  WorkListView view() { return WorkListView(batch_, plan_, block()); }

 private:
  const std::vector<Span> spans_;
  const AttentionBatch batch_;
  Plan plan_;
  Plan plan_of_all_heads_;
  std::vector<BlockWork> aligned_;
};

TEST(WorkList, HoldsTheItemsOfOneKvHeadByTile) {
  PackedBatch packed({MakeSpan(1, 1000), MakeSpan(700, 300), MakeSpan(20, 70), MakeSpan(0, 10)});
  ASSERT_FALSE(packed.plan().combines.empty());
  const WorkListView view = packed.view();
  size_t works = 0;
  for (int kind = 0; kind < kCudaTileKinds; ++kind) {
    works += view.tiles[kind].count;
    for (int32_t i = 0; i < view.tiles[kind].count; ++i) {
      const BlockWork& work = view.tiles[kind].works[i];
      EXPECT_LE(work.row_count, kCudaTileRows[kind]);
      EXPECT_EQ(work.group_stride, 2 * work.head_stride);
    }
  }
  EXPECT_EQ(works, packed.plan().items.size());
  EXPECT_EQ(reinterpret_cast<std::byte*>(view.finished + packed.plan().combines.size()),
            packed.block() + packed.bytes());
  for (size_t c = 0; c < packed.plan().combines.size(); ++c) EXPECT_EQ(view.finished[c], 0);
}

// Every split of every KV head must find the partial rows and the counter that the plan gave it.
TEST(WorkList, SplitsHaveThePlansPartialRows) {
  PackedBatch packed({MakeSpan(3, 1000), MakeSpan(1, 700)});
  const WorkListView view = packed.view();
  int found = 0;
  for (const auto& [works, count] : view.tiles) {
    for (const BlockWork* work = works; work < works + count; ++work) {
      for (const WorkItem& item : packed.plan_of_all_heads().items) {
        const CombineItem& combine = packed.plan_of_all_heads().combines[item.combine];
        if (item.kv_begin != work->kv_begin || item.kv_end != work->kv_end ||
            item.row_count != work->row_count) {
          continue;
        }
        EXPECT_EQ(work->num_splits, combine.num_splits);
        EXPECT_EQ(work->PartialRow(item.kv_head, work->split), item.partial_row);
        EXPECT_EQ(work->combine + item.kv_head, item.combine);
        ++found;
      }
    }
  }
  EXPECT_EQ(found, static_cast<int>(packed.plan_of_all_heads().items.size()));
  EXPECT_EQ(packed.plan().items.size() * 2, packed.plan_of_all_heads().items.size());
  EXPECT_EQ(packed.plan().combines.size(), packed.plan_of_all_heads().combines.size());
  EXPECT_EQ(packed.plan().partial_rows, packed.plan_of_all_heads().partial_rows);
}

// A plan of one KV head has the items that a plan of all has of it, in the same order.
TEST(WorkList, OneKvHeadStandsForAll) {
  PackedBatch packed({MakeSpan(1, 1000), MakeSpan(700, 300), MakeSpan(3, 4097), MakeSpan(20, 70)});
  std::vector<WorkItem> of_first_head;
  for (const WorkItem& item : packed.plan_of_all_heads().items) {
    if (item.kv_head == 0) of_first_head.push_back(item);
  }
  ASSERT_EQ(packed.plan().items.size(), of_first_head.size());
  for (size_t i = 0; i < of_first_head.size(); ++i) {
    const WorkItem &has = packed.plan().items[i], &want = of_first_head[i];
    EXPECT_EQ(has.span, want.span);
    EXPECT_EQ(has.kv_head, 0);
    EXPECT_EQ(has.row_begin, want.row_begin);
    EXPECT_EQ(has.row_count, want.row_count);
    EXPECT_EQ(has.kv_begin, want.kv_begin);
    EXPECT_EQ(has.kv_end, want.kv_end);
    EXPECT_EQ(has.partial_row, want.partial_row);
    EXPECT_EQ(has.combine, want.combine);
  }
}

// The last tile of a span with many rows may have as few as a span with few, but not its kernel:
// that one gives other bits.
TEST(WorkList, FewRowsOfManyAreNotTakenForASpanOfFew) {
  PackedBatch packed({MakeSpan(129, 64)});  // 258 packed rows: 128 + 128 + 2
  const WorkListView view = packed.view();
  EXPECT_EQ(view.tiles[0].count, 0);
  EXPECT_EQ(view.tiles[1].count, 1);
  EXPECT_EQ(view.tiles[kCudaTileKinds - 1].count, 2);
}

TEST(WorkList, KnowsWhatEveryRowSees) {
  PackedBatch causal({MakeSpan(100, 300, Mask::Causal())});  // rows 0 to 63, and 64 to 99
  for (const auto& [works, count] : causal.view().tiles) {
    for (const BlockWork* work = works; work < works + count; ++work) {
      EXPECT_EQ(work->all_begin, 0);
      EXPECT_EQ(work->all_end, work->row_begin / 2 + 200 + 1);
    }
  }
  PackedBatch window({MakeSpan(10, 300, Mask::SlidingWindow(20, 0))});
  const BlockWork& work = *window.view().tiles[1].works;
  EXPECT_EQ(work.all_begin, 299 - 20);
  EXPECT_EQ(work.all_end, 290 + 1);
  PackedBatch nothing({MakeSpan(20, 3, Mask::Causal())});  // rows 0 to 16 see nothing
  EXPECT_GE(nothing.view().tiles[1].works->all_begin, nothing.view().tiles[1].works->all_end);
}

TEST(WorkList, CarriesTheScalesOfFp8Kv) {
  const float scales[4] = {1, 2, 3, 4};
  Span span = MakeSpan(5, 100);
  span.kv.key_scale = scales;
  span.kv.value_scale = scales + 2;
  PackedBatch packed({span});
  const WorkListView view = packed.view();
  ASSERT_EQ(view.tiles[0].count, 1);
  EXPECT_EQ(view.tiles[0].works->key_scale, scales);
  EXPECT_EQ(view.tiles[0].works->value_scale, scales + 2);
}

TEST(WorkList, OfNothingIsEmpty) {
  const AttentionBatch batch{{DType::kFloat16, 1, 1, 64}, nullptr, 0};
  const Plan plan;
  EXPECT_EQ(WorkListBytes(plan), 0u);
  PackWorkList(batch, plan, nullptr);
}

TEST(RowDivider, DividesLikeDivision) {
  constexpr int32_t kLargest = std::numeric_limits<int32_t>::max();
  for (int32_t divisor = 1; divisor < 1100; ++divisor) {
    const RowDivider divider(divisor);
    for (int32_t n = 0; n < 3 * divisor; ++n) ASSERT_EQ(divider.Divide(n), n / divisor) << divisor;
    for (int32_t n = kLargest; n > kLargest - 3 * divisor; --n) {
      ASSERT_EQ(divider.Divide(n), n / divisor) << n << " / " << divisor;
    }
  }
  EXPECT_EQ(RowDivider(kLargest).Divide(kLargest), 1);
  EXPECT_EQ(RowDivider(kLargest).Divide(kLargest - 1), 0);
}

}  // namespace
}  // namespace flashcore::kernels

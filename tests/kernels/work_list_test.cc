// The work list that is copied to a CUDA device.
#include "kernels/cuda/work_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels/sm80/tiles.h"

namespace flashcore::kernels {
namespace {

Span MakeSpan(int32_t query_rows, int32_t kv_rows, Mask mask = Mask::None()) {
  Span span;
  span.query_rows = query_rows;
  span.kv.rows = kv_rows;
  span.terms.mask = mask;
  return span;
}

// A batch with its packed block.
class PackedBatch {
 public:
  explicit PackedBatch(std::vector<Span> spans, int32_t workers = 1, int32_t head_dim = 64)
      : spans_(std::move(spans)),
        batch_{
            {DType::kFloat16, 4, 2, head_dim}, spans_.data(), static_cast<int32_t>(spans_.size())} {
    PlanOptions options = sm80::PlanFor(head_dim);
    options.cascade_saving = 0;
    MakePlan(batch_, options, workers, &plan_);
    PlanOptions per_head = options;
    per_head.item_per_kv_head = true;
    MakePlan(batch_, per_head, workers, &plan_of_all_heads_);
    layout_.emplace(batch_, plan_);
    aligned_.resize(layout_->bytes / sizeof(WorkTile) + 1);
    PackWorkList(batch_, plan_, *layout_, list());
  }

  const Plan& plan() const { return plan_; }
  const Span& span(int32_t index) const { return spans_[index]; }
  const Plan& plan_of_all_heads() const { return plan_of_all_heads_; }
  const WorkListLayout& layout() const { return *layout_; }
  const WorkSpan* spans() { return reinterpret_cast<const WorkSpan*>(list()); }
  const WorkTile* tiles(const WorkListLayout::TileArray& array) { return array.In(list()); }
  const WorkTile* tiles_of_kind(int kind) { return tiles(layout_->kinds[kind]); }
  const void* end() { return list() + layout_->bytes; }

 private:
  std::byte* list() { return reinterpret_cast<std::byte*>(aligned_.data()); }

  const std::vector<Span> spans_;
  const AttentionBatch batch_;
  Plan plan_;
  std::optional<WorkListLayout> layout_;
  Plan plan_of_all_heads_;
  std::vector<WorkTile> aligned_;
};

TEST(WorkList, HoldsTheItemsOfOneKvHeadByTile) {
  PackedBatch packed({MakeSpan(1, 1000), MakeSpan(700, 300), MakeSpan(20, 70), MakeSpan(0, 10)},
                     132);
  ASSERT_FALSE(packed.plan().combines.empty());
  const WorkListLayout& layout = packed.layout();
  size_t tiles = 0;
  for (int kind = 0; kind < kTileKinds; ++kind) {
    tiles += layout.kinds[kind].count;
    for (int32_t i = 0; i < layout.kinds[kind].count; ++i) {
      const WorkTile& tile = packed.tiles_of_kind(kind)[i];
      EXPECT_LE(tile.row_count, sm80::TileRows(kind));
      const WorkSpan& span = packed.spans()[tile.span];
      EXPECT_EQ(span.position, packed.span(tile.span).kv.rows - packed.span(tile.span).query_rows);
      EXPECT_EQ(span.group_stride, 2 * span.head_stride);
    }
  }
  EXPECT_EQ(tiles, packed.plan().items.size());
  EXPECT_EQ(layout.combines.count, 0);  // the kernel for 16 rows combines them itself
  const auto& last = layout.kinds.back();
  EXPECT_EQ(packed.tiles(last) + last.count, packed.end());
}

TEST(WorkList, HoldsThePageTables) {
  const std::vector<int32_t> pages = {7, 3, 9};
  Span paged = MakeSpan(1, 150);
  paged.kv.pages = pages.data();
  PackedBatch packed({MakeSpan(1, 200), paged, paged, MakeSpan(1, 0)});
  const WorkListLayout& layout = packed.layout();
  for (const int32_t span : {1, 2}) {
    EXPECT_EQ(packed.spans()[span].PageOf(0), 7);
    EXPECT_EQ(packed.spans()[span].PageOf(127), 3);
    EXPECT_EQ(packed.spans()[span].PageOf(149), 9);
  }
  EXPECT_EQ(packed.spans()[0].PageOf(199), 3);
  EXPECT_EQ(layout.head_bytes, 4 * sizeof(WorkSpan) + 32);  // 6 pages, and room to align the tiles
  EXPECT_EQ(layout.kinds[0].count, 4);
  EXPECT_EQ(layout.kinds[0].begin, layout.head_bytes);
}

// Spans that share a prefix are combined by a kernel of its own, whatever their rows.
TEST(WorkList, HoldsTheMembersOfCascadeItems) {
  constexpr int32_t kSpans = 5, kPrefixPages = 8;
  std::vector<Span> spans;
  std::vector<std::vector<int32_t>> pages(kSpans);
  for (int32_t s = 0; s < kSpans; ++s) {
    spans.push_back(MakeSpan(2, 1000 + s));
    spans[s].kv = spans[0].kv;
    spans[s].kv.rows = 1000 + s;
    for (int32_t p = 0; p < 16; ++p) pages[s].push_back(p < kPrefixPages ? p : 100 * s + p);
    spans[s].kv.pages = pages[s].data();
  }
  PackedBatch packed(spans, 132);
  const Plan& plan = packed.plan();
  ASSERT_FALSE(plan.cascade_spans.empty());
  const WorkListLayout& layout = packed.layout();
  EXPECT_EQ(layout.cascades.members, static_cast<int32_t>(plan.cascade_spans.size()));
  EXPECT_EQ(layout.combines.count, kSpans);
  EXPECT_EQ(layout.combines.most_rows, 4);
  // Values of KV head 0.
  std::vector<int32_t> parts(kSpans), first_partial_rows(kSpans);
  for (const CombineItem& combine : plan.combines) {
    if (combine.kv_head == 0) first_partial_rows[combine.span] = combine.first_partial_row;
  }
  for (int32_t i = 0; i < layout.cascades.count; ++i) {
    const WorkTile& tile = packed.tiles(layout.cascades)[i];
    EXPECT_EQ(tile.row_count, 4 * tile.num_members);
    EXPECT_EQ(tile.all_begin, tile.kv_begin);
    EXPECT_EQ(tile.all_end, tile.kv_end);
    const Work work{tile, packed.spans()[tile.span]};
    for (int32_t n = 0; n < tile.num_members; ++n) {
      const Work member = work.Member(n);
      EXPECT_EQ(&member.span, packed.spans() + member.tile.span);
      EXPECT_EQ(member.tile.row_count, 4);
      EXPECT_EQ(tile.part, tile.kv_begin / tile.split_rows);
      EXPECT_EQ(member.tile.PartialRow(0, 0), first_partial_rows[member.tile.span]);
      ++parts[member.tile.span];
    }
  }
  const WorkListLayout::TileArray& tails = layout.kinds[0];
  for (int32_t i = 0; i < tails.count; ++i) {
    EXPECT_EQ(packed.tiles(tails)[i].combine, -1);
    ++parts[packed.tiles(tails)[i].span];
  }
  for (int32_t i = 0; i < layout.combines.count; ++i) {
    const WorkTile& tile = packed.tiles(layout.combines)[i];
    EXPECT_EQ(tile.part, 0);
    EXPECT_EQ(tile.num_parts, parts[tile.span]);
    parts[tile.span] = 0;  // once each
  }
  EXPECT_EQ(packed.tiles(layout.cascades) + layout.cascades.count + layout.cascades.members,
            packed.end());
}

// Splits of many rows are combined by a kernel of its own, tile by tile.
TEST(WorkList, HoldsTheFirstSplitOfTilesToCombine) {
  PackedBatch packed({MakeSpan(100, 9000), MakeSpan(1, 9000), MakeSpan(10, 9000)}, 132);
  const WorkListLayout& layout = packed.layout();
  ASSERT_GT(layout.combines.count, 2);  // of 200 and 20 packed rows
  int32_t rows = 0;
  for (int32_t i = 0; i < layout.combines.count; ++i) {
    const WorkTile& tile = packed.tiles(layout.combines)[i];
    EXPECT_EQ(tile.part, 0);
    EXPECT_GT(tile.num_parts, 1);
    EXPECT_NE(tile.span, 1);
    rows += tile.row_count;
  }
  EXPECT_EQ(rows, 220);
  EXPECT_EQ(packed.tiles(layout.combines) + layout.combines.count, packed.end());
}

// One block would take long for 128 partial results of 2 rows of 256.
TEST(WorkList, HoldsASmallTileOfManyPartialResultsToCombine) {
  PackedBatch packed({MakeSpan(1, 32768), MakeSpan(1, 4096)}, 132, 256);
  const WorkListLayout& layout = packed.layout();
  ASSERT_EQ(layout.combines.count, 1);
  const WorkTile& combine = *packed.tiles(layout.combines);
  EXPECT_EQ(combine.span, 0);
  EXPECT_EQ(combine.num_parts, 128);
  EXPECT_EQ(combine.row_count, 2);
  for (int32_t i = 0; i < layout.kinds[0].count; ++i) {
    const WorkTile& tile = packed.tiles_of_kind(0)[i];
    EXPECT_EQ(tile.combine < 0, tile.span == 0);
  }
}

// Eight spans of 9 splits fill 9 workers: a run of 8 splits and one of a single split each.
TEST(WorkList, TellsRunsFromSplits) {
  PackedBatch packed(std::vector<Span>(8, MakeSpan(40, 9000)), 9, 128);
  const WorkListLayout& layout = packed.layout();
  ASSERT_EQ(layout.kinds[3].count, 16);
  EXPECT_TRUE(layout.kinds[3].has_runs);
  for (int32_t i = 0; i < 16; ++i) {
    const WorkTile& tile = packed.tiles_of_kind(3)[i];
    EXPECT_EQ(tile.run_parts, 1);
    EXPECT_EQ(tile.num_parts, 2);
    EXPECT_EQ(tile.split_rows, tile.part == 0 ? 1024 : 9000 - 8 * 1024);
    EXPECT_EQ(tile.IsRun(), tile.part == 0);
  }
  ASSERT_EQ(layout.combines.count, 8);
  EXPECT_EQ(packed.tiles(layout.combines)->run_parts, 1);

  PackedBatch alone({MakeSpan(40, 9000)}, 9, 128);
  ASSERT_EQ(alone.layout().kinds[3].count, 9);
  EXPECT_FALSE(alone.layout().kinds[3].has_runs);
  EXPECT_EQ(alone.tiles_of_kind(3)->run_parts, kRunSplits);
  EXPECT_EQ(alone.tiles_of_kind(3)->num_parts, 9);
  EXPECT_FALSE(alone.tiles_of_kind(3)->IsRun());
}

// A decode of 12 splits, alone and in a batch of 40.
TEST(WorkList, TellsRunsOfSmallSpans) {
  PackedBatch alone({MakeSpan(1, 3000)}, 32, 128);
  ASSERT_GT(alone.layout().kinds[0].count, 4);
  EXPECT_FALSE(alone.layout().kinds[0].has_runs);
  EXPECT_EQ(alone.tiles_of_kind(0)->run_parts, kSmallRunSplits);

  PackedBatch packed(std::vector<Span>(40, MakeSpan(1, 3000)), 32, 128);
  ASSERT_EQ(packed.layout().kinds[0].count, 40 * 3);
  EXPECT_TRUE(packed.layout().kinds[0].has_runs);
  EXPECT_TRUE(packed.tiles_of_kind(0)->IsRun());
  EXPECT_EQ(packed.tiles_of_kind(0)->run_parts, 1);
  EXPECT_EQ(packed.tiles_of_kind(0)->split_rows, 256);
}

TEST(WorkList, TravelsInParametersUpToTheirSize) {
  constexpr size_t kBytes = sizeof(WorkSpan) + sizeof(WorkTile);
  constexpr size_t kMost = kMaxListInParameters / kBytes;
  const PackedBatch most(std::vector<Span>(kMost, MakeSpan(1, 10)));
  EXPECT_EQ(most.layout().bytes, kMost * kBytes);
  EXPECT_EQ(most.layout().BytesInMemory(), 0u);
  const PackedBatch more(std::vector<Span>(kMost + 1, MakeSpan(1, 10)));
  EXPECT_EQ(more.layout().BytesInMemory(), more.layout().bytes);
}

// Every split of every KV head must get the partial rows and the counter of the plan.
TEST(WorkList, SplitsHaveThePlansPartialRows) {
  PackedBatch packed({MakeSpan(3, 1000), MakeSpan(1, 700)}, 132);
  const WorkListLayout& layout = packed.layout();
  int found = 0;
  for (const WorkListLayout::TileArray& kind : layout.kinds) {
    const WorkTile* const tiles = packed.tiles(kind);
    for (const WorkTile* tile = tiles; tile < tiles + kind.count; ++tile) {
      for (const WorkItem& item : packed.plan_of_all_heads().items) {
        const CombineItem& combine = packed.plan_of_all_heads().combines[item.combine];
        if (item.kv_begin != tile->kv_begin || item.kv_end != tile->kv_end ||
            item.row_count != tile->row_count) {
          continue;
        }
        EXPECT_EQ(tile->num_parts, combine.num_parts);
        EXPECT_EQ(tile->PartialRow(item.kv_head, tile->part), item.partial_row);
        EXPECT_EQ(tile->combine + item.kv_head, item.combine);
        ++found;
      }
    }
  }
  EXPECT_EQ(found, static_cast<int>(packed.plan_of_all_heads().items.size()));
  EXPECT_EQ(packed.plan().items.size() * 2, packed.plan_of_all_heads().items.size());
  EXPECT_EQ(packed.plan().combines.size(), packed.plan_of_all_heads().combines.size());
  EXPECT_EQ(packed.plan().partial_rows, packed.plan_of_all_heads().partial_rows);
}

// Without item_per_kv_head, a plan has the items of KV head 0 in the same order.
TEST(WorkList, OneKvHeadStandsForAll) {
  PackedBatch packed({MakeSpan(1, 1000), MakeSpan(700, 300), MakeSpan(3, 4097), MakeSpan(20, 70)},
                     132);
  const auto by_place = [](const WorkItem& a, const WorkItem& b) {
    return std::tie(a.span, a.row_begin, a.kv_begin) < std::tie(b.span, b.row_begin, b.kv_begin);
  };
  std::vector<WorkItem> of_first_head;
  for (const WorkItem& item : packed.plan_of_all_heads().items) {
    if (item.kv_head == 0) of_first_head.push_back(item);
  }
  std::sort(of_first_head.begin(), of_first_head.end(), by_place);
  std::vector<WorkItem> items = packed.plan().items;
  std::sort(items.begin(), items.end(), by_place);
  ASSERT_EQ(items.size(), of_first_head.size());
  for (size_t i = 0; i < of_first_head.size(); ++i) {
    const WorkItem &has = items[i], &want = of_first_head[i];
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

// The last tile of a span may have few rows, but runs with the others.
TEST(WorkList, TilesOfASpanHaveOneKind) {
  PackedBatch packed({MakeSpan(965, 64), MakeSpan(33, 64), MakeSpan(20, 64), MakeSpan(1, 64)});
  const WorkListLayout& layout = packed.layout();
  // Packed rows: 15 * 128 + 10, 66, 40 and 2.
  EXPECT_EQ(layout.kinds[3].count, 17);
  EXPECT_EQ(layout.kinds[2].count, 1);
  EXPECT_EQ(layout.kinds[1].count, 0);
  EXPECT_EQ(layout.kinds[0].count, 1);
}

TEST(WorkList, KnowsWhatIsVisibleToEveryRow) {
  PackedBatch causal({MakeSpan(100, 300, Mask::Causal())});  // rows 0 to 63, and 64 to 99
  for (const WorkListLayout::TileArray& kind : causal.layout().kinds) {
    const WorkTile* const tiles = causal.tiles(kind);
    for (const WorkTile* tile = tiles; tile < tiles + kind.count; ++tile) {
      EXPECT_EQ(tile->all_begin, 0);
      EXPECT_EQ(tile->all_end, tile->row_begin / 2 + 200 + 1);
    }
  }
  PackedBatch window({MakeSpan(10, 300, Mask::SlidingWindow(20, 0))});
  const WorkTile& tile = *window.tiles_of_kind(1);
  EXPECT_EQ(tile.all_begin, 299 - 20);
  EXPECT_EQ(tile.all_end, 290 + 1);
  PackedBatch nothing({MakeSpan(20, 3, Mask::Causal())});  // nothing is visible to rows 0 to 16
  EXPECT_GE(nothing.tiles_of_kind(1)->all_begin, nothing.tiles_of_kind(1)->all_end);
}

TEST(WorkList, OfNothingIsEmpty) {
  const AttentionBatch batch{{DType::kFloat16, 1, 1, 64}, nullptr, 0};
  const Plan plan;
  const WorkListLayout layout(batch, plan);
  EXPECT_EQ(layout.bytes, 0u);
  PackWorkList(batch, plan, layout, nullptr);
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

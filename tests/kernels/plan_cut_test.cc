#include "kernels/plan_cut.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/cpu/tiles.h"
#include "kernels/sm80/tiles.h"
#include "tests/base/test_seed.h"

namespace flashcore::kernels {
namespace {

Span MakeSpan(int32_t query_rows, int32_t kv_rows, Mask mask = Mask::None()) {
  Span span;
  span.query_rows = query_rows;
  span.kv.rows = kv_rows;
  span.terms.mask = mask;
  return span;
}

AttentionBatch BatchOf(const std::vector<Span>& spans, int32_t heads, int32_t kv_heads) {
  return {{DType::kFloat16, heads, kv_heads, 64}, spans.data(), static_cast<int32_t>(spans.size())};
}

// The cells of an item, and which partial row of its combine it writes; -1: none.
using Item = std::tuple<int, int, int, int, int, int, int>;

std::vector<Item> ItemsOf(const AttentionBatch& batch, const PlanOptions& options) {
  Plan plan;
  MakePlan(batch, options, 1, &plan);
  std::vector<Item> items;
  std::vector<int> partial_rows(plan.partial_rows, 0);
  for (const WorkItem& item : plan.items) {
    int partial = -1;
    if (item.partial_row >= 0) {
      const CombineItem& combine = plan.combines[item.combine];
      EXPECT_EQ(combine.span, item.span);
      EXPECT_EQ(combine.kv_head, item.kv_head);
      partial = item.partial_row - combine.first_partial_row;
    }
    items.emplace_back(item.span, item.kv_head, item.row_begin, item.row_count, item.kv_begin,
                       item.kv_end, partial);
  }
  for (const CombineItem& combine : plan.combines) {
    for (int row = 0; row < combine.num_parts * combine.row_count; ++row) {
      ++partial_rows[combine.first_partial_row + row];
    }
  }
  EXPECT_TRUE(std::all_of(partial_rows.begin(), partial_rows.end(), [](int n) { return n == 1; }));
  return items;
}

std::vector<Span> Part(const std::vector<Span>& spans, const BatchPart& part) {
  std::vector<Span> cut = spans;
  for (size_t s = 0; s < cut.size(); ++s) cut[s].slices = part.SlicesOf(static_cast<int32_t>(s));
  return cut;
}

TEST(PlanCut, PartsHaveTheItemsOfTheWholeOnce) {
  std::mt19937_64 random(TestSeed());
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % n); };
  const PlanOptions every[] = {CpuPlan(), sm80::PlanFor(64), sm80::PlanFor(256)};
  const Mask masks[] = {Mask::None(), Mask::Causal(), Mask::SlidingWindow(900, 0)};
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<Span> spans;
    for (int s = below(6); s >= 0; --s) {
      const int32_t query_rows = below(3) == 0 ? below(700) : below(20);
      spans.push_back(MakeSpan(query_rows, below(3000), masks[below(3)]));
    }
    const int32_t kv_heads = 1 + below(5), group = 1 + below(9);
    const AttentionBatch batch = BatchOf(spans, kv_heads * group, kv_heads);
    for (PlanOptions options : every) {
      options.cascade_rows = 0;
      options.has_runs = options.has_small_runs = false;  // depend on the other spans of a part
      std::vector<Item> want = ItemsOf(batch, options), got;
      const CutOptions cut = {static_cast<double>(1 << below(30)), 1.0 + below(20)};
      for (const BatchPart& part : CutBatch(batch, options, 1 + below(4), cut)) {
        const std::vector<Span> cut_spans = Part(spans, part);
        const std::vector<Item> items =
            ItemsOf(BatchOf(cut_spans, kv_heads * group, kv_heads), options);
        EXPECT_TRUE(!items.empty() || want.empty());
        got.insert(got.end(), items.begin(), items.end());
      }
      std::sort(want.begin(), want.end());
      std::sort(got.begin(), got.end());
      ASSERT_EQ(got, want);
    }
  }
}

TEST(PlanCut, PartsAreAboutEqual) {
  const std::vector<Span> spans = {MakeSpan(64 * 128, 4096)};
  const AttentionBatch batch = BatchOf(spans, 2, 2);
  const double slice_flop = 4.0 * 128 * 4097 * 64;  // 128 slices
  const auto slices = [&](double max_slices, int workers) {
    std::vector<int64_t> counts;
    for (const BatchPart& part :
         CutBatch(batch, CpuPlan(), workers, {max_slices * slice_flop, 1})) {
      const SliceRange range = part.SlicesOf(0);
      counts.push_back(std::min<int64_t>(range.end, 128) - range.begin);
    }
    return counts;
  };
  EXPECT_EQ(slices(1000, 1), (std::vector<int64_t>{128}));
  EXPECT_EQ(slices(128, 1), (std::vector<int64_t>{128}));
  EXPECT_EQ(slices(127, 1), (std::vector<int64_t>{64, 64}));
  EXPECT_EQ(slices(32.1, 1), (std::vector<int64_t>{32, 32, 32, 32}));
  EXPECT_EQ(slices(0.001, 1), std::vector<int64_t>(128, 1));
  // Each worker has a slice, because that takes no longer than fewer.
  EXPECT_EQ(slices(0.001, 4), std::vector<int64_t>(32, 4));
  EXPECT_EQ(slices(5, 4), std::vector<int64_t>(16, 8));
  EXPECT_EQ(slices(0.001, 1000), (std::vector<int64_t>{128}));
}

TEST(PlanCut, CountsWhatTheMaskLeavesVisible) {
  // A tile of 128 rows meets 191 K/V rows: 1/21 of the work of no mask.
  const std::vector<Span> all = {MakeSpan(4096, 4096)};
  const std::vector<Span> window = {MakeSpan(4096, 4096, Mask::SlidingWindow(63, 0))};
  const CutOptions cut = {4.0 * 4096 * 4096 * 64 / 16, 1};
  EXPECT_EQ(CutBatch(BatchOf(all, 1, 1), CpuPlan(), 1, cut).size(), 16u);
  EXPECT_EQ(CutBatch(BatchOf(window, 1, 1), CpuPlan(), 1, cut).size(), 1u);
}

TEST(PlanCut, FewRowsCountAsMore) {
  const std::vector<Span> spans(64, MakeSpan(1, 4096));
  const double row_flop = 4.0 * 4097 * 64;
  EXPECT_EQ(CutBatch(BatchOf(spans, 1, 1), CpuPlan(), 1, {64 * row_flop, 1}).size(), 1u);
  EXPECT_EQ(CutBatch(BatchOf(spans, 1, 1), CpuPlan(), 1, {64 * row_flop, 8}).size(), 8u);
}

// For a kernel without items per KV head, whose results are copied row by row.
TEST(PlanCut, PartsHaveWholeQueryRows) {
  for (const int32_t group : {1, 3, 7, 16, 100}) {
    const std::vector<Span> spans = {MakeSpan(2000, 500), MakeSpan(3, 700), MakeSpan(999, 10)};
    const AttentionBatch batch = BatchOf(spans, 2 * group, 2);
    const PlanOptions options = sm80::PlanFor(64);
    std::vector<std::vector<int>> written;
    for (const Span& span : spans) written.emplace_back(span.query_rows, 0);
    const std::vector<BatchPart> parts = CutBatch(batch, options, 1, {1, 1});
    EXPECT_GT(parts.size(), 10u);
    for (const BatchPart& part : parts) {
      const std::vector<Span> cut = Part(spans, part);
      for (size_t s = 0; s < cut.size(); ++s) {
        const RowRange rows = QueryRowsOf(batch.geometry, options, cut[s]);
        EXPECT_LE(rows.begin, rows.end);
        for (int32_t row = rows.begin; row < rows.end; ++row) ++written[s][row];
      }
      // The items are those of these rows.
      Plan plan;
      MakePlan(BatchOf(cut, 2 * group, 2), options, 1, &plan);
      for (const WorkItem& item : plan.items) {
        const RowRange rows = QueryRowsOf(batch.geometry, options, cut[item.span]);
        EXPECT_GE(item.row_begin, rows.begin * group);
        EXPECT_LE(item.row_begin + item.row_count, rows.end * group);
      }
    }
    for (const std::vector<int>& rows : written) {
      EXPECT_EQ(rows, std::vector<int>(rows.size(), 1));
    }
  }
}

TEST(PlanCut, ABatchWithoutWorkIsOnePart) {
  const std::vector<Span> spans = {MakeSpan(0, 100)};
  EXPECT_EQ(CutBatch(BatchOf(spans, 1, 1), CpuPlan(), 1, {1, 1}).size(), 1u);
  EXPECT_EQ(CutBatch(BatchOf({}, 1, 1), CpuPlan(), 1, {1, 1}).size(), 1u);
}

}  // namespace
}  // namespace flashcore::kernels

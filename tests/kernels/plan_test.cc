#include "kernels/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cpu/tiles.h"
#include "kernels/sm80/tiles.h"
#include "tests/base/test_seed.h"

namespace flashcore::kernels {
namespace {

constexpr PlanOptions kOptions{128, 512, 16};

Span MakeSpan(int32_t query_rows, int32_t kv_rows, Mask mask = Mask::None()) {
  Span span;
  span.query_rows = query_rows;
  span.kv.rows = kv_rows;
  span.terms.mask = mask;
  return span;
}

Plan PlanOf(const std::vector<Span>& spans, int32_t heads, int32_t kv_heads,
            const PlanOptions& options = kOptions, int32_t workers = 1) {
  Plan plan;
  MakePlan({{DType::kFloat16, heads, kv_heads, 64}, spans.data(), static_cast<int>(spans.size())},
           options, workers, &plan);
  return plan;
}

bool IsVisible(const Mask& mask, int64_t position, int64_t j) {
  return (mask.left == Mask::kUnbounded || j >= position - mask.left) &&
         (mask.right == Mask::kUnbounded || j <= position + mask.right);
}

TEST(VisibleKv, IsTheUnionOverTheRows) {
  const Mask masks[] = {Mask::None(), Mask::Causal(), Mask::SlidingWindow(0, 0),
                        Mask::SlidingWindow(3, 1), Mask{2, Mask::kUnbounded}};
  for (const Mask& mask : masks) {
    for (int32_t q = 1; q <= 9; ++q) {
      for (int32_t kv = 0; kv <= 9; ++kv) {
        for (int32_t row = 0; row < q; ++row) {
          for (int32_t end = row + 1; end <= q; ++end) {
            std::vector<int32_t> visible;
            for (int32_t j = 0; j < kv; ++j) {
              bool any = false;
              for (int32_t i = row; i < end; ++i) any |= IsVisible(mask, i + kv - q, j);
              if (any) visible.push_back(j);
            }
            const KvRange range = VisibleKv(mask, q, kv, row, end);
            ASSERT_EQ(range.end - range.begin, static_cast<int32_t>(visible.size()));
            if (!visible.empty()) {
              ASSERT_EQ(range.begin, visible.front());
              ASSERT_EQ(range.end, visible.back() + 1);
            }
          }
        }
      }
    }
  }
}

TEST(VisibleKv, SurvivesExtremes) {
  const int32_t max = Mask::kUnbounded - 1;
  const KvRange range = VisibleKv(Mask{max, max}, 7, 1 << 30, 0, 7);
  EXPECT_EQ(range.begin, 0);
  EXPECT_EQ(range.end, 1 << 30);
}

using Ranges = std::vector<std::pair<int, int>>;

// The K/V ranges that a plan gives to each packed row: [{span, kv_head, packed row}].
std::map<std::tuple<int, int, int>, Ranges> Covered(const Plan& plan, const PlanOptions& options) {
  std::map<std::tuple<int, int, int>, Ranges> covered;
  for (const WorkItem& item : plan.items) {
    EXPECT_EQ(item.kv_begin % kPageTokens, 0);
    EXPECT_LE(item.kv_begin, item.kv_end);
    EXPECT_LE(item.row_count, options.tile_rows);
    if (item.partial_row >= 0 && options.items_per_worker == 0) {
      EXPECT_LE(item.kv_end - item.kv_begin, options.split_kv_rows);
    }
    for (int r = item.row_begin; r < item.row_begin + item.row_count; ++r) {
      covered[{item.span, item.kv_head, r}].push_back({item.kv_begin, item.kv_end});
    }
  }
  for (auto& [row, ranges] : covered) std::sort(ranges.begin(), ranges.end());
  return covered;
}

// Every packed row meets every K/V row that is visible to it, once.
void CheckCoverage(const std::vector<Span>& spans, int32_t kv_heads, int32_t group,
                   const PlanOptions& options, int32_t workers = 1) {
  const auto covered =
      Covered(PlanOf(spans, kv_heads * group, kv_heads, options, workers), options);
  const int heads = options.item_per_kv_head ? kv_heads : 1;
  for (int s = 0; s < static_cast<int>(spans.size()); ++s) {
    const Span& span = spans[s];
    for (int n = 0; n < heads * span.query_rows * group; ++n) {
      const int r = n / heads, i = r / group;
      const auto found = covered.find({s, n % heads, r});
      ASSERT_NE(found, covered.end());
      const Ranges& ranges = found->second;
      for (size_t k = 1; k < ranges.size(); ++k) {
        ASSERT_EQ(ranges[k].first, ranges[k - 1].second);
      }
      const KvRange visible = VisibleKv(span.terms.mask, span.query_rows, span.kv.rows, i, i + 1);
      if (visible.begin == visible.end) continue;
      ASSERT_LE(ranges.front().first, visible.begin) << "span " << s << ", row " << i;
      ASSERT_GE(ranges.back().second, visible.end) << "span " << s << ", row " << i;
      ASSERT_LE(ranges.back().second, span.kv.rows);
    }
  }
}

TEST(Plan, EveryPackedRowMeetsEveryVisibleKvRowOnce) {
  CheckCoverage(
      {MakeSpan(1, 4096), MakeSpan(300, 700, Mask::Causal()), MakeSpan(65, 0), MakeSpan(0, 100),
       MakeSpan(4, 2000, Mask::SlidingWindow(700, 0)), MakeSpan(200, 50, Mask::Causal())},
      2, 3, kOptions);
}

// The window is 1,024 rows, two splits. But it begins inside a page, so it takes a third split to
// reach the last row.
TEST(Plan, AWindowThatBeginsInsideAPageReachesTheLastRow) {
  const std::vector<Span> spans = {MakeSpan(1, 2000, Mask::SlidingWindow(1023, 0))};
  CheckCoverage(spans, 1, 1, kOptions);
  const Plan plan = PlanOf(spans, 1, 1);
  ASSERT_EQ(plan.items.size(), 3u);
  int32_t begin = 2000, end = 0;
  for (const WorkItem& item : plan.items) {
    begin = std::min(begin, item.kv_begin);
    end = std::max(end, item.kv_end);
  }
  EXPECT_EQ(begin, 960);
  EXPECT_EQ(end, 2000);
}

TEST(Plan, EveryPackedRowMeetsEveryVisibleKvRowOnceWithRandomWindows) {
  std::mt19937_64 random(TestSeed());
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % n); };
  // Windows of a whole number of pages or splits, nearly so, and of any size.
  const auto edge = [&] {
    const int32_t any = below(1500);
    const int32_t edges[] = {Mask::kUnbounded, 0,   64 * below(20) + below(3),
                             512 * below(4),   any, std::max(0, 512 * below(4) - 1)};
    return edges[below(6)];
  };
  const PlanOptions every[] = {kOptions, CpuPlan(), sm80::PlanFor(64), sm80::PlanFor(256),
                               sm80::PlanFor(128, Arch::kLargeShared, KvDType::kFloat8E4M3)};
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<Span> spans;
    for (int s = 0; s < 6; ++s) {
      const int32_t query_rows = below(3) == 0 ? 1 + below(150) : 1 + below(8);
      spans.push_back(MakeSpan(query_rows, below(3000), Mask{edge(), edge()}));
    }
    for (const PlanOptions& options : every) {
      CheckCoverage(spans, 2, 1 + below(4), options, 1 << below(10));
    }
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Plan, SplitsFewRowsOnly) {
  const Plan decode = PlanOf({MakeSpan(1, 4096)}, 32, 8);
  EXPECT_EQ(decode.items.size(), 8u * 8);
  EXPECT_EQ(decode.combines.size(), 8u);
  EXPECT_EQ(decode.partial_rows, 8 * 8 * 4);
  EXPECT_EQ(decode.workspace_bytes, 8u * 8 * 4 * (64 + 2) * sizeof(float));

  EXPECT_EQ(PlanOf({MakeSpan(4, 4096)}, 32, 8).combines.size(), 8u);  // 16 packed rows
  EXPECT_TRUE(PlanOf({MakeSpan(5, 4096)}, 32, 8).combines.empty());   // 20
  EXPECT_TRUE(PlanOf({MakeSpan(1, 512)}, 32, 8).combines.empty());    // one split is none
  EXPECT_EQ(PlanOf({MakeSpan(1, 513)}, 32, 8).combines.size(), 8u);
}

// The device of the expectations below: 132 workers that run two items at a time.
constexpr PlanOptions kDevice{128, 256,  kUnsplit, 0, true, true,
                              2,   true, true,     0, 0,    &sm80::kCosts};
constexpr int32_t kWorkers = 132;

// Plans that halve the tiles of spans, and split those of up to split_max_rows packed rows.
PlanOptions HalvingTiles(int32_t split_max_rows) {
  PlanOptions options{128, 256, split_max_rows, 0, true};
  options.costs = &sm80::kCosts;
  return options;
}

int32_t SplitRowsOf(int32_t packed_rows, int32_t kv_rows, int32_t kv_heads,
                    Mask mask = Mask::None(), int32_t workers = kWorkers) {
  return SplitRows({DType::kFloat16, kv_heads, kv_heads, 128}, MakeSpan(packed_rows, kv_rows, mask),
                   kDevice, workers);
}

// The shortest split: 256 K/V rows, 512 above 16 packed rows, 1024 above 64, or 512 where that is
// a sixth faster.
TEST(SplitRows, AreNoShorterThanTheRowsThatReadThemNeed) {
  EXPECT_EQ(SplitRowsOf(4, 4096, 8), 256);
  EXPECT_EQ(SplitRowsOf(16, 4096, 8), 256);
  EXPECT_EQ(SplitRowsOf(17, 4096, 8), 512);
  EXPECT_EQ(SplitRowsOf(64, 4096, 8), 512);
  EXPECT_EQ(SplitRowsOf(65, 8192, 8), 1024);
  EXPECT_EQ(SplitRowsOf(65, 2048, 8), 512);
  EXPECT_EQ(SplitRowsOf(4, 256, 8), kUnsplit);
  EXPECT_EQ(SplitRowsOf(4, 257, 8), kUnsplit);  // a split of one row costs more
  EXPECT_EQ(SplitRowsOf(4, 513, 8), 256);
  EXPECT_EQ(SplitRowsOf(64, 512, 8), kUnsplit);
  EXPECT_EQ(SplitRowsOf(512, 1024, 8), kUnsplit);
}

// A span alone has about as many items as run at a time: 264 here.
TEST(SplitRows, AreNoShorterThanItTakesToKeepAllWorkersBusy) {
  EXPECT_EQ(SplitRowsOf(4, 32768, 8), 1024);
  EXPECT_EQ(SplitRowsOf(4, 131072, 8), 4096);
  EXPECT_EQ(SplitRowsOf(64, 32768, 8), 1024);
  EXPECT_EQ(SplitRowsOf(256, 32768, 8), 2048);   // 2 tiles a head, 16 splits each
  EXPECT_EQ(SplitRowsOf(1024, 32768, 8), 8192);  // 8 tiles a head, 4 splits each
  EXPECT_EQ(SplitRowsOf(1024, 32768, 8, Mask::None(), 10000), 512);
  EXPECT_EQ(SplitRowsOf(1024, 32768, 8, Mask::None(), 4), kUnsplit);
  EXPECT_EQ(SplitRowsOf(4096, 32768, 8), kUnsplit);  // 256 tiles
  EXPECT_EQ(SplitRowsOf(8192, 8192, 8, Mask::Causal()), kUnsplit);
}

// Four waves of short items end before one of long ones: 18 * 8 tiles have 264 places, and
// 18 * 8 * 7 items nearly fill 4 * 264.
TEST(SplitRows, LeaveNoLargePartOfTheWorkersIdle) {
  EXPECT_EQ(SplitRowsOf(18 * 128, 32768, 8), 4736);
}

// K/V that a mask hides is not split.
TEST(SplitRows, CountWhatIsVisible) {
  EXPECT_EQ(SplitRowsOf(512, 32768, 8, Mask::SlidingWindow(800, 0)), kUnsplit);
  EXPECT_EQ(SplitRowsOf(4, 32768, 8, Mask::SlidingWindow(4095, 0)),
            SplitRowsOf(4, 4096 + kPageTokens, 8));
  // 64 tiles of one head, which see 4,096 rows on average.
  EXPECT_EQ(SplitRowsOf(8192, 8192, 1, Mask::Causal()), 1024);
}

TEST(SplitRows, ReachTheLastKvRowOfTheLongestSpan) {
  const int32_t longest = std::numeric_limits<int32_t>::max() / 2;
  for (int32_t rows : {1, 64, 2000}) {
    const int32_t split_rows = SplitRowsOf(rows, longest, 1);
    EXPECT_GT(split_rows, 0);
    EXPECT_EQ(split_rows % (2 * kPageTokens), 0);
  }
}

TEST(Plan, PartialRowsOfACombineAreThoseOfItsSplitsInOrder) {
  const Plan plan = PlanOf({MakeSpan(2, 1500), MakeSpan(3, 3000, Mask::Causal())}, 4, 2);
  std::vector<int> owners(plan.partial_rows, 0);
  for (const CombineItem& combine : plan.combines) {
    int32_t kv_row = -1;
    for (int s = 0; s < combine.num_parts; ++s) {
      const int32_t first = combine.first_partial_row + s * combine.row_count;
      const auto item = std::find_if(plan.items.begin(), plan.items.end(),
                                     [&](const WorkItem& w) { return w.partial_row == first; });
      ASSERT_NE(item, plan.items.end());
      EXPECT_EQ(item->span, combine.span);
      EXPECT_EQ(item->kv_head, combine.kv_head);
      EXPECT_EQ(item->row_begin, combine.row_begin);
      EXPECT_EQ(item->row_count, combine.row_count);
      EXPECT_GT(item->kv_begin, kv_row);
      kv_row = item->kv_begin;
      for (int r = 0; r < item->row_count; ++r) ++owners[first + r];
    }
  }
  for (int owner : owners) EXPECT_EQ(owner, 1);
}

TEST(Plan, LongestFirst) {
  const Plan plan =
      PlanOf({MakeSpan(1, 64), MakeSpan(500, 900, Mask::Causal()), MakeSpan(64, 64)}, 2, 2);
  const auto cost = [](const WorkItem& item) {
    return int64_t{item.row_count} * (item.kv_end - item.kv_begin + 1);
  };
  for (size_t n = 1; n < plan.items.size(); ++n) {
    EXPECT_GE(cost(plan.items[n - 1]), cost(plan.items[n]));
  }
}

// The order is strict, so a plan is a pure function of its batch.
TEST(Plan, EquallyLongItemsGoByPlace) {
  std::mt19937 random(TestSeed());
  PlanOptions one_head = kOptions;
  one_head.item_per_kv_head = false;
  // A block of 32, 64 or 128 rows takes equally long for fewer.
  const auto block_rows = [](int32_t rows) { return rows <= 32 ? 32 : rows <= 64 ? 64 : 128; };
  const auto order = [&](const PlanOptions& options, const WorkItem& item) {
    const int64_t rows = options.item_per_kv_head ? item.row_count : block_rows(item.tile_rows);
    const int64_t cost = rows * (item.kv_end - item.kv_begin + 1);
    return std::make_tuple(-cost, item.span, item.kv_head, item.row_begin, item.kv_begin);
  };
  for (int i = 0; i < 200; ++i) {
    std::vector<Span> spans;
    for (uint32_t s = 0; s < 1 + random() % 5; ++s) {
      spans.push_back(MakeSpan(1 + static_cast<int32_t>(random() % 2 * (random() % 300)),
                               static_cast<int32_t>(random() % 5 * 512 + random() % 2),
                               Mask::Causal()));
    }
    for (const PlanOptions& options : {kOptions, one_head}) {
      const Plan plan = PlanOf(spans, 4, 2, options);
      for (size_t n = 1; n < plan.items.size(); ++n) {
        ASSERT_LT(order(options, plan.items[n - 1]), order(options, plan.items[n]));
      }
    }
  }
}

// A causal span of 2 * 128 + 8 rows: the last 8 see most, and are a block as the others.
TEST(Plan, TheLastRowsOfASpanStartByTheirKvRows) {
  const std::vector<Span> spans = {MakeSpan(264, 1000, Mask::Causal())};
  PlanOptions options = kOptions;
  const auto first_rows = [&] {
    std::vector<int32_t> rows;
    for (const WorkItem& item : PlanOf(spans, 1, 1, options).items) rows.push_back(item.row_begin);
    return rows;
  };
  EXPECT_EQ(first_rows(), (std::vector<int32_t>{128, 0, 256}));
  options.item_per_kv_head = false;
  EXPECT_EQ(first_rows(), (std::vector<int32_t>{256, 128, 0}));
}

// The splits of each packed row of a span, as far as the row sees them: KV head, row, first and
// last K/V row. They leave out what other spans may change: tiles, order, partial rows, runs.
using Split = std::tuple<int, int, int, int>;
std::vector<Split> SplitsOf(const Plan& plan, int index, const Span& span, int32_t group) {
  std::vector<Split> splits;
  for (const WorkItem& item : plan.items) {
    if (item.span != index) continue;
    for (int32_t row = item.row_begin; row < item.row_begin + item.row_count; ++row) {
      const KvRange visible =
          VisibleKv(span.terms.mask, span.query_rows, span.kv.rows, row / group, row / group + 1);
      int32_t begin = item.kv_begin;
      do {
        const int32_t end =
            item.kv_end - begin > item.split_rows ? begin + item.split_rows : item.kv_end;
        const int32_t first = std::max(begin, visible.begin), last = std::min(end, visible.end);
        if (first < last) splits.emplace_back(item.kv_head, row, first, last);
        begin = end;
      } while (begin < item.kv_end);
    }
  }
  std::sort(splits.begin(), splits.end());
  return splits;
}

int CountRuns(const Plan& plan) {
  return static_cast<int>(std::count_if(plan.items.begin(), plan.items.end(),
                                        [](const WorkItem& item) { return item.IsRun(); }));
}

TEST(Plan, ASpansSplitsDoNotDependOnOtherSpans) {
  const std::vector<Span> spans = {MakeSpan(1, 5000),
                                   MakeSpan(130, 200, Mask::Causal()),
                                   MakeSpan(3, 777, Mask::SlidingWindow(600, 0)),
                                   MakeSpan(7, 7),
                                   MakeSpan(300, 9000, Mask::Causal()),
                                   MakeSpan(30, 3000)};
  for (const PlanOptions& options : {kOptions, kDevice}) {
    const Plan together = PlanOf(spans, 4, 2, options, kWorkers);
    for (int s = 0; s < static_cast<int>(spans.size()); ++s) {
      const Plan alone = PlanOf({spans[s]}, 4, 2, options, kWorkers);
      EXPECT_EQ(SplitsOf(together, s, spans[s], 2), SplitsOf(alone, 0, spans[s], 2));
    }
  }
}

// Spans of 9 splits of 1,024 K/V rows, and of 7. In a batch that fills the workers, the first are a
// run of 8 and a run of one, whose partial results are combined, and the others a run that writes
// its results itself.
TEST(Plan, RunsAreAlignedGroupsOfSplits) {
  std::vector<Span> spans(20, MakeSpan(100, 9000));
  spans.resize(65, MakeSpan(100, 7000));
  const Plan plan = PlanOf(spans, 8, 8, kDevice, kWorkers);
  ASSERT_EQ(plan.items.size(), 8u * (20 * 2 + 45));
  for (const WorkItem& item : plan.items) {
    const bool is_long = item.span < 20;
    EXPECT_EQ(item.split_rows, 1024);
    EXPECT_EQ(item.kv_begin, item.kv_end == 9000 ? 8192 : 0);
    EXPECT_EQ(item.kv_end, !is_long ? 7000 : item.kv_begin == 0 ? 8192 : 9000);
    EXPECT_GE(item.partial_row, 0);
    EXPECT_EQ(item.combine >= 0, is_long);
  }
  ASSERT_EQ(plan.combines.size(), 8u * 20);
  for (const CombineItem& combine : plan.combines) {
    EXPECT_EQ(combine.num_parts, 2);
    EXPECT_EQ(combine.run_parts, 1);
  }
  EXPECT_EQ(plan.partial_rows, 8 * 100 * (20 * 2 + 45));
}

// Decodes of 4,096 K/V rows, 16 splits: 4 runs in a batch that fills the workers. So have small
// spans beside large ones, and large ones none beside small ones.
TEST(Plan, RunsOfSmallSpansHaveFourSplits) {
  std::vector<Span> spans(16, MakeSpan(1, 4096));
  const auto check_small_runs = [&] {
    const Plan plan = PlanOf(spans, 32, 8, kDevice, kWorkers);
    for (const WorkItem& item : plan.items) {
      if (spans[item.span].query_rows > 1) continue;
      EXPECT_EQ(item.split_rows, 256);
      EXPECT_EQ(item.kv_end - item.kv_begin, 1024);
    }
    for (const CombineItem& combine : plan.combines) {
      const bool is_small = spans[combine.span].query_rows == 1;
      EXPECT_EQ(combine.num_parts, is_small ? 4 : 2) << combine.span;
      EXPECT_EQ(combine.run_parts, is_small ? 1 : kRunSplits);
    }
    return CountRuns(plan);
  };
  EXPECT_EQ(check_small_runs(), 16 * 8 * 4);
  spans.push_back(MakeSpan(100, 2048));
  EXPECT_EQ(check_small_runs(), 16 * 8 * 4);

  spans.resize(4);  // 128 runs
  EXPECT_EQ(CountRuns(PlanOf(spans, 32, 8, kDevice, kWorkers)), 0);
  for (const CombineItem& combine : PlanOf(spans, 32, 8, kDevice, kWorkers).combines) {
    EXPECT_EQ(combine.num_parts, 16);
    EXPECT_EQ(combine.run_parts, kSmallRunSplits);
  }
}

// 264 items run at a time. Runs begin where they fill 7/8 of their rounds.
TEST(Plan, TakesRunsWhereABatchFillsTheWorkers) {
  const auto plan_of = [](int spans, int32_t query_rows = 100) {
    return PlanOf(std::vector<Span>(spans, MakeSpan(query_rows, 8192)), 8, 8, kDevice, kWorkers);
  };
  EXPECT_EQ(CountRuns(plan_of(28)), 0);  // 224 runs
  EXPECT_EQ(CountRuns(plan_of(29)), 232);
  EXPECT_EQ(CountRuns(plan_of(33)), 264);
  // Two rounds would be half empty: one of runs, and 8 * 7 tiles of splits.
  EXPECT_EQ(CountRuns(plan_of(40)), 264);
  EXPECT_EQ(plan_of(40).items.size(), 264u + 8 * 7 * 8);
  EXPECT_EQ(CountRuns(plan_of(58)), 8 * 58);
  EXPECT_EQ(CountRuns(plan_of(400)), 8 * 400);
  EXPECT_EQ(CountRuns(plan_of(400, 64)), 0);  // few rows
  // The last 8 of 136 rows are a block as the others: 16 spans have 256.
  EXPECT_EQ(CountRuns(plan_of(13, 136)), 0);
  EXPECT_EQ(CountRuns(plan_of(16, 136)), 256);
}

// Over 8-bit K/V, 396 runs of spans of up to 8 packed rows run at a time. A last round is full
// where what it leaves of 264 places is less than a sixteenth of all rounds.
TEST(Plan, CountsThePlacesOfTheSmallestRuns) {
  const PlanOptions options = sm80::PlanFor(128, Arch::kLargeShared, KvDType::kInt8);
  const auto runs_of = [&](int spans, int32_t query_rows_of_last = 1) {
    std::vector<Span> batch(spans, MakeSpan(1, 4096));
    batch.back().query_rows = query_rows_of_last;
    return CountRuns(PlanOf(batch, 32, 8, options, kWorkers));
  };
  EXPECT_EQ(runs_of(7), 0);  // 224 with 8 KV heads
  EXPECT_EQ(runs_of(8), 8 * 4);
  EXPECT_EQ(runs_of(12), 12 * 4);
  EXPECT_EQ(runs_of(16), 12 * 4);  // and splits
  EXPECT_EQ(runs_of(16, 2), 12 * 4);
  EXPECT_EQ(runs_of(16, 3), 16 * 4);  // 264 places
  EXPECT_EQ(runs_of(19), 12 * 4);     // 212 runs are left, and 231 would be enough
  EXPECT_EQ(runs_of(20), 20 * 4);
  EXPECT_EQ(runs_of(66), 61 * 4);  // 132 of 165
  EXPECT_EQ(runs_of(68), 68 * 4);
}

// A run that has a worker for itself takes 0.6 of the time that it takes beside another. Where
// splits need a round more, or would be combined for nothing, runs are faster.
TEST(Plan, TakesRunsThatHaveAWorkerEach) {
  const auto runs_of = [](int spans, int32_t query_rows, int32_t kv_rows) {
    return CountRuns(
        PlanOf(std::vector<Span>(spans, MakeSpan(query_rows, kv_rows)), 8, 8, kDevice, kWorkers));
  };
  EXPECT_EQ(runs_of(16, 90, 1000), 128);
  EXPECT_EQ(runs_of(12, 128, 1500), 96);  // 288 splits are two rounds
  EXPECT_EQ(runs_of(10, 128, 1500), 0);   // 240 are one
  EXPECT_EQ(runs_of(8, 256, 8192), 0);
}

// 800 tiles of 64 rows are three rounds, because the last split of each has 452 K/V rows.
TEST(Plan, CountsTheKvRowsOfTheLastSplit) {
  const std::vector<Span> spans(16, MakeSpan(33, 2500));
  Plan plan;
  MakePlan({{DType::kFloat16, 16, 2, 256}, spans.data(), 16}, sm80::PlanFor(256), kWorkers, &plan);
  EXPECT_EQ(plan.items.size(), 16u * 5 * 5);
  EXPECT_EQ(plan.items[0].row_count, 64);
}

// 32 tiles of 128 rows, 64 of 64 or 128 of 32, whose rows take 8/7 and 3/2 as long. Which are done
// sooner depends on how many run at a time. A span with a window that is split keeps its tile,
// which determines its split boundaries.
TEST(Plan, HalvesTilesWhereTheyAreDoneSooner) {
  const PlanOptions options = HalvingTiles(64);
  const std::vector<Span> spans = {MakeSpan(512, 512),
                                   MakeSpan(60, 600, Mask::SlidingWindow(599, 0))};
  const struct {
    int workers;
    int32_t rows;
  } kCases[] = {{1, 128}, {31, 64},  {32, 128}, {63, 128},
                {64, 64}, {127, 64}, {128, 32}, {10000, 32}};
  for (const auto& [workers, rows] : kCases) {
    Plan plan;
    MakePlan({{DType::kFloat16, 8, 8, 64}, spans.data(), 2}, options, workers, &plan);
    for (const WorkItem& item : plan.items) {
      EXPECT_EQ(item.row_count, item.span == 0 ? rows : 60) << workers << " workers";
    }
  }
}

// 128 tiles of 64 rows and 256 of 32 have the same splits.
TEST(Plan, HalvesTilesOfSplits) {
  const auto plan_of = [](int spans) {
    return PlanOf(std::vector<Span>(spans, MakeSpan(256, 8192)), 8, 8, kDevice, kWorkers);
  };
  EXPECT_EQ(plan_of(1).items.size(), 8u * 4 * 8);  // 64 rows, 8 splits
  EXPECT_EQ(plan_of(2).items.size(), 2u * 8 * 2 * 8);
  EXPECT_EQ(plan_of(2).items[0].row_count, 128);
  EXPECT_EQ(CountRuns(plan_of(8)), 0);
  EXPECT_EQ(CountRuns(plan_of(16)), 16 * 8 * 2);  // runs are of the largest tiles
}

// Short spans run in small blocks whatever the tile size: they do not speak for small tiles. 40
// tiles of 128 rows and 120 blocks of 32 have the work of 85 of 128 rows.
TEST(Plan, CountsShortSpansByTheirOwnBlocks) {
  const PlanOptions options = HalvingTiles(0);
  std::vector<Span> spans(5, MakeSpan(128, 512));
  spans.resize(20, MakeSpan(20, 512));
  const auto rows_of = [&](int workers) {
    return PlanOf(spans, 8, 8, options, workers).items.front().row_count;
  };
  EXPECT_EQ(rows_of(85), 128);
  EXPECT_EQ(rows_of(84), 64);
}

// 128 tiles of 128 rows leave half of 264 places idle, where 256 of 64 rows do not. A split of
// fewer rows must be faster by a sixth.
TEST(SplitRows, ReckonWithSmallerTiles) {
  const auto split_rows = [](int32_t query_rows, int32_t kv_rows) {
    return SplitRows({DType::kFloat16, 8, 8, 128}, MakeSpan(query_rows, kv_rows), kDevice,
                     kWorkers);
  };
  EXPECT_EQ(split_rows(2048, 2048), kUnsplit);
  EXPECT_EQ(split_rows(1024, 2048), 1024);  // in tiles of 64; 256 of 32 take as long as 512 splits
  EXPECT_EQ(split_rows(512, 2048), 1024);   // in tiles of 32
  EXPECT_EQ(split_rows(256, 2048), 512);
  EXPECT_EQ(split_rows(128, 1024), 512);
  EXPECT_EQ(split_rows(128, 700), kUnsplit);
  EXPECT_EQ(split_rows(512, 4096), 1024);
}

// It has two arrays, between which the items are sorted.
TEST(Plan, ReusesItsMemory) {
  const std::vector<Span> big = {MakeSpan(1000, 1000)};
  Plan plan;
  std::set<const WorkItem*> memory;
  for (int i = 0; i < 8; ++i) {
    MakePlan({{DType::kFloat16, 8, 8, 64}, big.data(), 1}, kOptions, 1, &plan);
    memory.insert(plan.items.data());
    MakePlan({{DType::kFloat16, 8, 8, 64}, nullptr, 0}, kOptions, 1, &plan);
    EXPECT_TRUE(plan.items.empty());
    EXPECT_EQ(plan.workspace_bytes, 0u);
  }
  EXPECT_LE(memory.size(), 2u);
}

}  // namespace
}  // namespace flashcore::kernels

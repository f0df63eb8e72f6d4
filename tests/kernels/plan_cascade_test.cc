// Which work items spans with a shared prefix share, and that sharing changes nothing else of a
// plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/plan.h"
#include "kernels/sm80/tiles.h"
#include "tests/base/test_seed.h"
#include "tests/kernels/forked_kv.h"

namespace flashcore::kernels {
namespace {

constexpr PlanOptions kSharing{128, 512, 16, 128};

// As CUDA kernels share: one item for all KV heads, and splits of a span's own length.
constexpr PlanOptions SharingOnCuda() {
  PlanOptions options = sm80::PlanFor(128);
  options.cascade_saving = 0;
  return options;
}
constexpr int32_t kSplitPages = 512 / kPageTokens;
constexpr int32_t kHeads = 8, kKvHeads = 2, kGroup = 4;

// Decode spans over forked K/V.
class Forks {
 public:
  explicit Forks(const std::vector<ForkShape>& shapes)
      : random_(TestSeed()), kv_({DType::kFloat16, 1, 1, 32}, shapes, &random_) {
    for (int s = 0; s < kv_.num_spans(); ++s) {
      Span span;
      span.query_rows = 1;
      span.kv = kv_.view(s);
      span.terms.mask = Mask::Causal();
      spans.push_back(span);
    }
  }

  AttentionBatch batch() const {
    return {{DType::kFloat16, kHeads, kKvHeads, 64}, spans.data(), static_cast<int>(spans.size())};
  }

  std::vector<Span> spans;

 private:
  std::mt19937_64 random_;
  ForkedKv kv_;
};

// `count` forks of one prefix, with tails of at least `tail` rows.
std::vector<ForkShape> ForksOf(int32_t prefix_rows, int32_t count, int32_t tail) {
  std::vector<ForkShape> shapes = {{prefix_rows + tail}};
  for (int32_t s = 1; s < count; ++s) {
    shapes.push_back({prefix_rows + tail + s, 0, prefix_rows / kPageTokens});
  }
  return shapes;
}

// span, kv_head, row_begin, row_count, kv_begin, kv_end, partial_row, combine
using Item = std::tuple<int, int, int, int, int, int, int, int>;

// The items that the spans would have alone, sorted: cascade items are taken apart.
std::vector<Item> TakenApart(const Plan& plan) {
  std::vector<Item> items;
  for (const WorkItem& w : plan.items) {
    if (!w.IsCascade()) {
      items.emplace_back(w.span, w.kv_head, w.row_begin, w.row_count, w.kv_begin, w.kv_end,
                         w.partial_row, w.combine);
    }
    for (int m = 0; m < w.num_cascade_spans; ++m) {
      const CascadeSpan& part = plan.cascade_spans[w.first_cascade_span + m];
      items.emplace_back(part.span, w.kv_head, w.row_begin, part.row_count, w.kv_begin, w.kv_end,
                         part.PartialRow(w.CascadeSplit()), part.combine);
    }
  }
  std::sort(items.begin(), items.end());
  return items;
}

// How many K/V rows the items attend each span to, summed over its tiles.
std::vector<int32_t> AttendedRows(const AttentionBatch& batch, const Plan& plan) {
  std::vector<int32_t> rows(batch.num_spans);
  for (const WorkItem& item : plan.items) {
    const int32_t kv_rows = item.kv_end - item.kv_begin;
    if (!item.IsCascade()) rows[item.span] += kv_rows;
    for (int m = 0; m < item.num_cascade_spans; ++m) {
      rows[plan.cascade_spans[item.first_cascade_span + m].span] += kv_rows;
    }
  }
  return rows;
}

// A kernel relies on this: the spans' rows follow each other, and the same K/V is visible to all.
void CheckCascadeItem(const AttentionBatch& batch, const PlanOptions& options, const Plan& plan,
                      const WorkItem& item) {
  ASSERT_GE(item.num_cascade_spans, 2);
  EXPECT_LE(item.row_count, options.cascade_rows);
  EXPECT_EQ(item.row_begin, 0);
  EXPECT_EQ(item.kv_end - item.kv_begin, item.split_rows);
  const KvView& kv = batch.spans[item.span].kv;
  int32_t row = 0;
  for (int m = 0; m < item.num_cascade_spans; ++m) {
    const CascadeSpan& part = plan.cascade_spans[item.first_cascade_span + m];
    const Span& span = batch.spans[part.span];
    EXPECT_EQ(part.tile_row, row);
    EXPECT_EQ(part.row_count * item.num_cascade_spans, item.row_count);
    EXPECT_EQ(span.terms.score_terms(), batch.spans[item.span].terms.score_terms());
    // A CUDA kernel writes nothing but partial results of a cascade item.
    EXPECT_TRUE(options.item_per_kv_head || part.combine >= 0);
    row += part.row_count;
    for (int32_t i = 0; i < span.query_rows; ++i) {
      const KvRange visible = VisibleKv(span.terms.mask, span.query_rows, span.kv.rows, i, i + 1);
      EXPECT_LE(visible.begin, item.kv_begin);
      EXPECT_GE(visible.end, item.kv_end);
    }
    EXPECT_EQ(span.kv.key, kv.key);
    EXPECT_EQ(span.kv.value, kv.value);
    for (int32_t t = item.kv_begin / kPageTokens; t < item.kv_end / kPageTokens; ++t) {
      EXPECT_EQ(span.kv.pages[t], kv.pages[t]);
    }
  }
  EXPECT_EQ(item.row_count, row);
}

// Plans with cascade items and compares the plan with the one without, both without runs. Runs
// beside cascade items leave out no K/V row.
Plan Share(const AttentionBatch& batch, PlanOptions options = kSharing, int32_t workers = 1) {
  Plan plan, alone, with_runs;
  MakePlan(batch, options, workers, &with_runs);
  options.has_small_runs = false;
  MakePlan(batch, options, workers, &plan);
  for (const WorkItem& item : plan.items) {
    if (item.IsCascade()) CheckCascadeItem(batch, options, plan, item);
  }
  options.cascade_rows = 0;
  MakePlan(batch, options, workers, &alone);
  EXPECT_TRUE(alone.cascade_spans.empty());
  EXPECT_EQ(TakenApart(plan), TakenApart(alone));
  EXPECT_EQ(AttendedRows(batch, with_runs), AttendedRows(batch, alone));
  EXPECT_EQ(plan.partial_rows, alone.partial_rows);
  EXPECT_EQ(plan.workspace_bytes, alone.workspace_bytes);
  EXPECT_EQ(plan.combines.size(), alone.combines.size());
  for (size_t n = 0; n < std::min(plan.combines.size(), alone.combines.size()); ++n) {
    EXPECT_EQ(plan.combines[n].span, alone.combines[n].span);
    EXPECT_EQ(plan.combines[n].first_partial_row, alone.combines[n].first_partial_row);
    EXPECT_EQ(plan.combines[n].num_parts, alone.combines[n].num_parts);
  }
  return plan;
}

using Spans = std::vector<std::vector<int32_t>>;

// The spans of every cascade item of KV head 0, by split.
std::map<int32_t, Spans> Groups(const Plan& plan) {
  std::map<int32_t, Spans> groups;
  for (const WorkItem& item : plan.items) {
    if (!item.IsCascade() || item.kv_head != 0) continue;
    std::vector<int32_t>& spans = groups[item.kv_begin / item.split_rows].emplace_back();
    for (int m = 0; m < item.num_cascade_spans; ++m) {
      spans.push_back(plan.cascade_spans[item.first_cascade_span + m].span);
    }
    std::sort(spans.begin(), spans.end());
  }
  for (auto& [split, of_split] : groups) std::sort(of_split.begin(), of_split.end());
  return groups;
}

TEST(PlanCascade, ShareTheSplitsOfTheirPrefix) {
  const Forks forks(ForksOf(1024, 3, 70));
  const Plan plan = Share(forks.batch());
  EXPECT_EQ(Groups(plan), (std::map<int32_t, Spans>{{0, {{0, 1, 2}}}, {1, {{0, 1, 2}}}}));
  EXPECT_EQ(plan.items.size(), kKvHeads * (2u + 3u));  // two shared splits and three tails
  EXPECT_EQ(plan.items.front().row_count, 3 * kGroup);
}

TEST(PlanCascade, ForksOfForksShareWhatTheyHaveInCommon) {
  const Forks forks({{2100},
                     {1600, 0, 2 * kSplitPages + 3},
                     {1700, 1, 3 * kSplitPages},
                     {1100, 0, kSplitPages},
                     {1200, 3, 2 * kSplitPages},
                     {2100}});
  EXPECT_EQ(
      Groups(Share(forks.batch())),
      (std::map<int32_t, Spans>{{0, {{0, 1, 2, 3, 4}}}, {1, {{0, 1, 2}, {3, 4}}}, {2, {{1, 2}}}}));
}

TEST(PlanCascade, ASplitThatWritesItsOutputCanBeShared) {
  const Forks forks({{512}, {512, 0, kSplitPages}, {513, 0, kSplitPages}});
  const Plan plan = Share(forks.batch());
  EXPECT_EQ(Groups(plan), (std::map<int32_t, Spans>{{0, {{0, 1, 2}}}}));
}

TEST(PlanCascade, SpansOfEqualRowsShare) {
  const ForkShape fork{600, 0, kSplitPages};
  Forks forks({{600}, fork, fork, fork});
  forks.spans[1].query_rows = 4;
  forks.spans[2].terms.mask = Mask::None();
  forks.spans[3].query_rows = 4;
  EXPECT_EQ(Groups(Share(forks.batch())), (std::map<int32_t, Spans>{{0, {{0, 2}, {1, 3}}}}));
}

TEST(PlanCascade, SpansOfEqualSplitsShare) {
  // On 132 workers, 8,192 rows are split in 256, 9,000 in 512.
  constexpr int32_t kPrefix = 8192 / kPageTokens;
  const Forks forks({{8192}, {9000, 0, kPrefix}, {9000, 0, kPrefix}, {8192, 0, kPrefix}});
  AttentionBatch batch = forks.batch();
  batch.geometry = {DType::kFloat16, 32, 8, 128};
  const Plan plan = Share(batch, SharingOnCuda(), 132);
  std::map<int32_t, int32_t> items;  // of each length of splits
  for (const WorkItem& item : plan.items) {
    if (!item.IsCascade()) continue;
    EXPECT_EQ(item.num_cascade_spans, 2);
    ++items[item.split_rows];
  }
  EXPECT_EQ(items, (std::map<int32_t, int32_t>{{256, 32}, {512, 16}}));
}

TEST(PlanCascade, ItemsOfTheSameSpansHaveThemInCommon) {
  constexpr int32_t kLong = 4096 / kPageTokens, kShort = 1024 / kPageTokens;
  const Forks forks({{4200}, {4200, 0, kLong}, {4200, 0, kShort}});
  const Plan plan = Share(forks.batch(), SharingOnCuda(), 32);
  std::map<int32_t, std::set<int32_t>> lists;  // by their number of spans
  for (const WorkItem& item : plan.items) {
    if (item.IsCascade()) lists[item.num_cascade_spans].insert(item.first_cascade_span);
  }
  EXPECT_EQ(lists, (std::map<int32_t, std::set<int32_t>>{{2, {3}}, {3, {0}}}));
  EXPECT_EQ(plan.cascade_spans.size(), 5u);
}

TEST(PlanCascade, NothingIsSharedThatIsNotTheSameToAll) {
  const ForkShape parent{700}, fork{700, 0, kSplitPages};
  const auto is_shared = [](const Forks& forks) {
    return !Share(forks.batch()).cascade_spans.empty();
  };
  EXPECT_TRUE(is_shared(Forks({parent, fork})));
  EXPECT_FALSE(is_shared(Forks({parent, {700}})));                      // no page
  EXPECT_FALSE(is_shared(Forks({parent, {700, 0, kSplitPages - 1}})));  // not the split's last
  EXPECT_FALSE(is_shared(Forks({{511}, {511, 0, kSplitPages}})));       // not a whole split
  EXPECT_FALSE(is_shared(Forks({{1000}, {1000, 0, kSplitPages - 1}})));

  const auto is_shared_if = [&](void (*change)(Span*)) {
    Forks forks({parent, fork});
    change(&forks.spans[1]);
    return is_shared(forks);
  };
  EXPECT_TRUE(is_shared_if([](Span* s) { s->terms.mask = Mask::None(); }));
  EXPECT_FALSE(is_shared_if([](Span* s) { s->terms.softmax_scale = -3; }));
  EXPECT_FALSE(is_shared_if([](Span* s) { s->terms.mask = Mask::SlidingWindow(700, 0); }));
  EXPECT_FALSE(is_shared_if([](Span* s) { s->query_rows = 2; }));
  EXPECT_FALSE(is_shared_if([](Span* s) { s->query_rows = 0; }));
  EXPECT_FALSE(is_shared_if([](Span* s) { s->kv.pages = nullptr; }));
  EXPECT_FALSE(is_shared_if([](Span* s) { s->kv.key += 64; }));
  EXPECT_FALSE(is_shared_if([](Span* s) { s->kv.value += 64; }));
  EXPECT_FALSE(is_shared_if([](Span* s) { s->kv.page_stride *= 2; }));
  EXPECT_FALSE(is_shared_if([](Span* s) { s->kv.head_stride += 64; }));
  EXPECT_FALSE(is_shared_if([](Span* s) { s->kv.row_stride += 64; }));

  Forks larger({parent, fork});
  for (Span& span : larger.spans) span.query_rows = 5;  // 20 packed rows
  EXPECT_FALSE(is_shared(larger));
  EXPECT_TRUE(Share(larger.batch(), SharingOnCuda(), 4).cascade_spans.empty());
}

TEST(PlanCascade, TheWholeSplitIsVisibleToEveryRow) {
  Forks forks({{600}, {515, 0, kSplitPages}});
  forks.spans[0].query_rows = 4;
  forks.spans[1].query_rows = 4;  // the first row sees 512 K/V rows
  EXPECT_FALSE(Share(forks.batch()).cascade_spans.empty());
  forks.spans[1].kv.rows = 514;
  EXPECT_TRUE(Share(forks.batch()).cascade_spans.empty());
  forks.spans[1].terms.mask.right = 1;
  EXPECT_FALSE(Share(forks.batch()).cascade_spans.empty());
}

TEST(PlanCascade, ManyRowsBecomeSeveralItemsOfAboutEqualSize) {
  const Forks forks(ForksOf(512, 9, 1));  // 36 packed rows
  const auto rows = [&](int32_t most) {
    PlanOptions options = kSharing;
    options.cascade_rows = most;
    std::vector<size_t> sizes;
    const Spans groups = Groups(Share(forks.batch(), options))[0];
    for (const std::vector<int32_t>& group : groups) {
      sizes.push_back(group.size() * kGroup);
    }
    std::sort(sizes.begin(), sizes.end());
    return sizes;
  };
  EXPECT_EQ(rows(128), (std::vector<size_t>{36}));
  EXPECT_EQ(rows(35), (std::vector<size_t>{16, 20}));
  EXPECT_EQ(rows(12), (std::vector<size_t>{12, 12, 12}));
  EXPECT_EQ(rows(8), (std::vector<size_t>{8, 8, 8, 8}));  // and one alone
  EXPECT_TRUE(rows(7).empty());
}

TEST(PlanCascade, NoWorkerGoesIdleForSharing) {
  const Forks forks(ForksOf(2048, 8, 64));
  constexpr size_t kUnshared = 8 * 5 * kKvHeads;  // four splits and a tail each
  size_t fewest = kKvHeads * (4 + 8);
  for (size_t workers : {1, 10, 24, 25, 32, 50, 100}) {
    const Plan plan = Share(forks.batch(), kSharing, static_cast<int32_t>(workers));
    EXPECT_GE(plan.items.size(), std::min(workers, kUnshared));
    EXPECT_GE(plan.items.size(), fewest);
    EXPECT_EQ(plan.cascade_spans.empty(), workers > 32) << workers;
    fewest = plan.items.size();
  }
  EXPECT_EQ(fewest, kUnshared);
}

TEST(PlanCascade, LongestFirstAndAlwaysTheSame) {
  const Forks forks(ForksOf(1024, 7, 300));
  const Plan plan = Share(forks.batch()), again = Share(forks.batch());
  ASSERT_EQ(plan.items.size(), again.items.size());
  for (size_t n = 0; n < plan.items.size(); ++n) {
    const WorkItem &a = plan.items[n], &b = again.items[n];
    EXPECT_EQ(std::tie(a.span, a.kv_head, a.row_count, a.kv_begin, a.first_cascade_span),
              std::tie(b.span, b.kv_head, b.row_count, b.kv_begin, b.first_cascade_span));
    if (n == 0) continue;
    const WorkItem& longer = plan.items[n - 1];
    EXPECT_GE(longer.row_count * (longer.kv_end - longer.kv_begin + 1),
              a.row_count * (a.kv_end - a.kv_begin + 1));
  }
}

// In a batch that fills the workers, a run would take a split away from the spans that share it.
TEST(PlanCascade, SpansThatShareHaveNoRuns) {
  std::vector<ForkShape> shapes = ForksOf(1024, 4, 600);
  shapes.resize(40, ForkShape{1600});
  std::vector<int32_t> all;  // K/V rows
  for (const ForkShape& shape : shapes) all.push_back(shape.kv_rows);
  const Forks forks(shapes);
  PlanOptions options = SharingOnCuda();
  const auto count = [&] {
    Plan plan;
    MakePlan(forks.batch(), options, 8, &plan);
    EXPECT_EQ(AttendedRows(forks.batch(), plan), all);
    std::array<int, 2> runs = {};  // of spans that share, and of the others
    for (const WorkItem& item : plan.items) runs[item.span < 4 ? 0 : 1] += item.IsRun();
    EXPECT_EQ(plan.cascade_spans.empty(), options.cascade_saving > 0);
    return runs;
  };
  EXPECT_EQ(count(), (std::array<int, 2>{0, 36 * 2}));
  options.cascade_saving = 1 << 30;
  EXPECT_EQ(count(), (std::array<int, 2>{4 * 2, 36 * 2}));
}

TEST(PlanCascade, NothingIsSharedThatSavesTooLittle) {
  const Forks forks(ForksOf(2048, 4, 64));  // saves three times 2,048 rows of 64 for two KV heads
  PlanOptions options = kSharing;
  options.cascade_saving = 3 * 2048 * 64 * 2 / 10;
  EXPECT_FALSE(Share(forks.batch(), options, 10).cascade_spans.empty());
  EXPECT_TRUE(Share(forks.batch(), options, 11).cascade_spans.empty());
}

TEST(PlanCascade, SplitsThatKeepAllWorkersBusyAreSharedByAsManySpansAsFit) {
  const Forks forks(ForksOf(2048, 40, 64));
  const Plan plan = Share(forks.batch(), SharingOnCuda(), 132);
  for (const auto& [split, groups] : Groups(plan)) {
    ASSERT_EQ(groups.size(), 3u) << split;  // 160 packed rows
    for (const std::vector<int32_t>& group : groups) EXPECT_GE(group.size(), 12u);
  }
}

// Random trees of random spans, until so many of them share: Share() checks each.
void ShareRandomTrees(int wanted) {
  std::mt19937_64 random(TestSeed());
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % n); };
  int shared = 0, shared_on_cuda = 0;
  while (std::min(shared, shared_on_cuda) < wanted) {
    std::vector<ForkShape> shapes;
    const int32_t spans = 1 + below(12);
    for (int32_t s = 0; s < spans; ++s) {
      const int32_t parent = s == 0 ? -1 : below(s + 1) - 1;
      const int32_t most = parent < 0 ? 0 : shapes[parent].kv_rows / kPageTokens;
      const int32_t pages = below(2) == 0 ? most : below(most + 1);
      shapes.push_back({pages * kPageTokens + below(1500), parent, pages});
    }
    Forks forks(shapes);
    for (Span& span : forks.spans) {
      span.query_rows = 1 + below(5);
      const Mask masks[] = {Mask::Causal(), Mask::None(), Mask{below(3000), below(3) * 64},
                            Mask{Mask::kUnbounded, below(600)}};
      span.terms.mask = masks[below(4)];
    }
    PlanOptions options = kSharing;
    options.cascade_rows = 1 + below(128);
    shared += !Share(forks.batch(), options, 1 + below(4)).cascade_spans.empty();
    options = SharingOnCuda();
    options.cascade_rows = 1 + below(64);
    shared_on_cuda += !Share(forks.batch(), options, 1 + below(200)).cascade_spans.empty();
  }
}

TEST(PlanCascade, RandomTrees) { ShareRandomTrees(5); }

TEST(PlanCascade, RandomTreesStress) { ShareRandomTrees(100); }

}  // namespace
}  // namespace flashcore::kernels

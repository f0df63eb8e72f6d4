#include "kernels/plan_cache.h"

#include <gtest/gtest.h>

#include <random>
#include <tuple>
#include <vector>

#include "kernels/cpu/tiles.h"
#include "kernels/sm80/tiles.h"
#include "tests/base/test_seed.h"

namespace flashcore::kernels {
namespace {

constexpr Geometry kGeometry = {DType::kFloat16, 8, 2, 64};
constexpr int32_t kWorkers = 4;

// A batch of spans over pages, whose tables it owns. A copy needs SetTables.
struct Input {
  Geometry geometry = kGeometry;
  PlanOptions options = CpuPlan();
  int32_t workers = kWorkers;
  std::vector<Span> spans;
  std::vector<std::vector<int32_t>> tables;  // [spans], empty: dense

  void Add(int32_t query_rows, int32_t kv_rows, int32_t first_page, Mask mask = Mask::Causal()) {
    Span& span = spans.emplace_back();
    span.query_rows = query_rows;
    span.kv.rows = kv_rows;
    span.terms.mask = mask;
    std::vector<int32_t>& table = tables.emplace_back();
    for (int32_t page = 0; page < PagesFor(kv_rows); ++page) table.push_back(first_page + page);
    SetTables();
  }
  void SetTables() {
    for (size_t i = 0; i < spans.size(); ++i) {
      spans[i].kv.pages = tables[i].empty() ? nullptr : tables[i].data();
    }
  }
  AttentionBatch batch() const {
    return {geometry, spans.data(), static_cast<int32_t>(spans.size())};
  }
};

// Decodes of `count` sequences of about `rows` rows, each with pages of its own.
Input Decode(int count, int32_t rows, int32_t first_page = 0) {
  Input input;
  for (int i = 0; i < count; ++i) input.Add(1, rows + i, first_page + 1000 * i);
  return input;
}

using Numbers = std::vector<std::vector<int64_t>>;

// All that a kernel reads of a plan.
Numbers NumbersOf(const Plan& plan) {
  Numbers numbers = {{plan.partial_rows, static_cast<int64_t>(plan.workspace_bytes)}};
  for (const WorkItem& i : plan.items) {
    numbers.push_back({i.span, i.kv_head, i.row_begin, i.row_count, i.kv_begin, i.kv_end,
                       i.split_rows, i.partial_row, i.combine, i.first_cascade_span,
                       i.num_cascade_spans});
  }
  for (const CascadeSpan& s : plan.cascade_spans) {
    numbers.push_back({s.span, s.tile_row, s.row_count, s.first_partial_row});
  }
  for (const CombineItem& c : plan.combines) {
    numbers.push_back({c.span, c.kv_head, c.row_begin, c.row_count, c.first_partial_row,
                       c.num_parts, c.run_parts});
  }
  return numbers;
}

Numbers Planned(const Input& input) {
  Plan plan;
  MakePlan(input.batch(), input.options, input.workers, &plan);
  return NumbersOf(plan);
}

Numbers Cached(const Input& input, PlanCache* cache) {
  return NumbersOf(cache->Get(input.batch(), input.options, input.workers));
}

TEST(PlanCache, TheLayersOfAModelHaveOnePlan) {
  PlanCache cache;
  for (int32_t layer = 0; layer < 32; ++layer) {
    const Input input = Decode(64, 4096, 100 * layer);
    ASSERT_EQ(Cached(input, &cache), Planned(input)) << "layer " << layer;
  }
  EXPECT_EQ(cache.reused(), 31);
}

TEST(PlanCache, SeveralRequestsTakeTurns) {
  PlanCache cache;
  for (int32_t layer = 0; layer < 5; ++layer) {
    for (const int count : {1, 2, 3, 4}) {
      const Input input = Decode(count, 700, layer);
      ASSERT_EQ(Cached(input, &cache), Planned(input));
    }
  }
  EXPECT_EQ(cache.reused(), 16);
}

// A difference in any value that MakePlan reads makes another plan.
TEST(PlanCache, PlansAnewWhateverDiffers) {
  std::vector<Input> others(13, Decode(3, 2000));
  for (Input& input : others) input.SetTables();
  others[1].spans[2].kv.rows += 1;
  others[2].spans[2].query_rows = 2;
  others[3].spans[1].terms.mask.left = 900;
  others[4].spans[1].terms.mask.right = 5;
  others[5].spans[0].slices.end = 1;
  others[6].spans[0].slices.begin = 1;
  others[7].geometry.num_kv_heads = 4;
  others[8].geometry.head_dim = 128;
  others[9].options.split_kv_rows = 256;
  others[10].workers = 1;  // makes no other plan, but might
  others[11].spans.pop_back();
  others[12].options.item_per_kv_head = false;
  for (size_t first = 0; first < others.size(); ++first) {
    for (size_t second = 0; second < others.size(); ++second) {
      PlanCache cache;
      Cached(others[first], &cache);
      ASSERT_EQ(Cached(others[second], &cache), Planned(others[second]));
      ASSERT_EQ(cache.reused(), first == second ? 1 : 0) << first << " and " << second;
    }
  }
}

// Which spans share a prefix depends on their pages, which the cache does not compare.
TEST(PlanCache, NeverReusesAPlanWhereSpansMaySharePages) {
  Input apart = Decode(3, 2000);
  Input shared = apart;
  shared.tables[1] = shared.tables[0];
  shared.SetTables();
  Input other_pair = apart;
  other_pair.tables[2] = other_pair.tables[0];
  other_pair.SetTables();
  apart.SetTables();
  ASSERT_NE(Planned(apart), Planned(shared));
  ASSERT_NE(Planned(other_pair), Planned(shared));
  PlanCache cache;
  for (int i = 0; i < 3; ++i) {
    for (const Input* input : {&apart, &shared, &other_pair}) {
      ASSERT_EQ(Cached(*input, &cache), Planned(*input));
    }
  }
  EXPECT_EQ(cache.reused(), 2) << "of the spans with pages of their own";
}

TEST(PlanCache, AgreesWithMakePlanOnRandomBatches) {
  std::mt19937 random(TestSeed());
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % n); };
  PlanCache cpu_cache, cuda_cache;
  for (int i = 0; i < 3000; ++i) {
    Input input;
    for (int s = below(3); s >= 0; --s) {
      // Few values, so that batches repeat, and that some spans share pages.
      input.Add(below(2) * 199 + 1, 600 * below(3) + 200, 1000 * below(12),
                below(4) == 0 ? Mask::SlidingWindow(300, 0) : Mask::Causal());
    }
    ASSERT_EQ(Cached(input, &cpu_cache), Planned(input));
    input.options = sm80::PlanFor(64);
    ASSERT_EQ(Cached(input, &cuda_cache), Planned(input));
  }
  EXPECT_GT(cpu_cache.reused(), 0);
  EXPECT_GT(cuda_cache.reused(), 0);
}

}  // namespace
}  // namespace flashcore::kernels

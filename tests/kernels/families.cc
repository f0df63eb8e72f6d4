#include "tests/kernels/families.h"

#include <utility>

namespace flashcore::kernels {
namespace {

constexpr Layout kLayouts[] = {Layout::kDenseNhd, Layout::kDenseHnd, Layout::kPaged};

std::vector<SpanShape> EveryLengthWithEveryMaskAndLayout() {
  const Mask masks[] = {Mask::None(),
                        Mask::Causal(),
                        Mask::SlidingWindow(0, 0),
                        Mask::SlidingWindow(5, 0),
                        Mask::SlidingWindow(70, 3),
                        Mask{Mask::kUnbounded, 2}};
  std::vector<SpanShape> shapes;
  int turn = 0;
  for (int32_t query_rows : {1, 3, 65}) {
    for (int32_t kv_rows : {0, 1, 63, 64, 65}) {
      for (const Mask& mask : masks) {
        if (query_rows == 65 && turn % 2 != 0) {  // half of the expensive ones
          ++turn;
          continue;
        }
        shapes.push_back({query_rows, kv_rows, mask, kLayouts[turn++ % 3]});
      }
    }
  }
  return shapes;
}

Family Forked(const char* name, int32_t heads, int32_t kv_heads, std::vector<ForkedSpan> spans) {
  Family family{name, heads, kv_heads, {}, std::move(spans), {}};
  for (size_t s = 0; s < family.forked.size(); ++s) {
    family.scales.push_back(s + 2 < family.forked.size() ? 1.1f : -1.5f);
  }
  return family;
}

void AddForkedFamilies(std::vector<Family>* all) {
  const int32_t heads[][2] = {{2, 2}, {2, 1}, {6, 2}, {4, 1}, {8, 1}, {16, 1}};
  for (const auto& [num_heads, kv_heads] : heads) {
    all->push_back(Forked("EveryGroupOfQueryHeads", num_heads, kv_heads, ForkTree()));
  }
  std::vector<ForkedSpan> spans = ForkTree();
  for (size_t s = 0; s < spans.size(); ++s) {
    spans[s].query_rows = 1 + static_cast<int32_t>(s) / 2 % 5;
  }
  all->push_back(Forked("SeveralQueryRows", 3, 1, spans));
  spans = {{{1200}}};
  for (int32_t s = 1; s < 40; ++s) spans.push_back({{1025 + s, 0, 2 * kSplitPages}});
  all->push_back(Forked("MoreRowsThanAnItemHolds", 4, 1, spans));
  // One K/V of 40,000 rows, and prefixes of it. The last span is not split: it has 18 packed rows.
  const int32_t all_pages = 40000 / kPageTokens, most_pages = 33000 / kPageTokens;
  all->push_back(Forked("MoreThan32768Rows", 2, 1,
                        {{{40000}},
                         {{33000, 0, most_pages}, 1, Mask::None()},
                         {{40000, 0, all_pages}, 2},
                         {{40000, 0, all_pages}, 3, Mask::SlidingWindow(33500, 0)},
                         {{33001, 0, most_pages}, 2, Mask::SlidingWindow(32800, 1)},
                         {{40000, 0, all_pages}, 9, Mask::SlidingWindow(500, 0)}}));
  all->back().long_kv = true;
}

std::vector<Family> MakeFamilies() {
  std::vector<Family> all;
  all.push_back({"EveryLengthWithEveryMaskAndLayout", 2, 1, EveryLengthWithEveryMaskAndLayout()});
  all.push_back({"ManyTiles",
                 2,
                 2,
                 {{150, 330, Mask::Causal(), Layout::kPaged},
                  {140, 200, Mask::None(), Layout::kDenseNhd},
                  {150, 300, Mask::SlidingWindow(100, 0), Layout::kDenseHnd}}});
  // Enough packed rows per KV head (600, 520) for the largest tile of every kernel.
  all.push_back({"ManyRows",
                 8,
                 2,
                 {{150, 200, Mask::Causal(), Layout::kPaged},
                  {130, 65, Mask::None(), Layout::kDenseNhd},
                  {150, 190, Mask::SlidingWindow(40, 5), Layout::kDenseHnd}}});
  all.push_back({"DecodeSplitsOverManyTiles",
                 4,
                 1,
                 {{1, 1, Mask::Causal()},
                  {1, 513, Mask::Causal(), Layout::kDenseNhd},
                  {1, 1700, Mask::None(), Layout::kPaged},
                  {4, 1100, Mask::Causal(), Layout::kPaged},
                  {3, 1500, Mask::SlidingWindow(600, 0), Layout::kDenseHnd},
                  {1, 2000, Mask::SlidingWindow(1023, 0), Layout::kPaged}}});
  // More partial results than one block combines, and fewer.
  all.push_back({"DecodeOfManyPartialResults",
                 16,
                 1,
                 {{1, 4500, Mask::Causal(), Layout::kPaged}, {1, 700, Mask::None()}}});
  // 20 to 260 packed rows: prefill in chunks, and verification of several tokens.
  all.push_back({"ManyRowsOnLongKv",
                 4,
                 2,
                 {{10, 2100, Mask::Causal(), Layout::kPaged},
                  {40, 2500, Mask::None(), Layout::kDenseHnd},
                  {130, 2200, Mask::Causal(), Layout::kPaged},
                  {70, 3000, Mask::SlidingWindow(2200, 3), Layout::kDenseNhd}}});
  const int32_t heads[][2] = {{2, 2}, {2, 1}, {3, 1}, {8, 2}, {8, 1}, {12, 1}};
  for (const auto& [num_heads, kv_heads] : heads) {
    all.push_back({"GroupedQueryHeads",
                   num_heads,
                   kv_heads,
                   {{1, 130}, {33, 97, Mask::Causal()}, {7, 66, Mask::None(), Layout::kDenseHnd}}});
  }
  all.push_back({"RowsWithoutVisibleKv",
                 2,
                 1,
                 {{200, 70, Mask::Causal()},  // 130 query rows are before the first K/V row
                  {20, 3, Mask::Causal()},
                  {5, 0, Mask::None()},
                  {100, 10, Mask::SlidingWindow(4, 0), Layout::kDenseNhd}}});
  Family large{"LargeMagnitudes",
               2,
               1,
               {{40, 200, Mask::Causal(), Layout::kPaged, 10},
                {40, 200, Mask::None(), Layout::kPaged, 100},
                {1, 700, Mask::None(), Layout::kPaged, 100}}};
  large.fits_float16_sums = false;
  all.push_back(large);
  // The scale multiplies the errors of scores. 4 times the usual one is steep, also for float16.
  Family scales{"ScalesOfEitherSignAndZero", 2, 1, {{20, 130}, {20, 130}, {1, 600}, {1, 600}}};
  scales.scales = {0, -2, 0, -4};
  all.push_back(scales);
  scales.shapes = {{20, 130}, {1, 600}};
  scales.scales = {-16, 30};
  scales.fits_float16_sums = false;
  all.push_back(scales);
  AddForkedFamilies(&all);
  return all;
}

}  // namespace

const std::vector<ForkedSpan>& ForkTree() {
  static const std::vector<ForkedSpan> kTree = {
      {{1700}},
      {{1100, 0, 2 * kSplitPages}},
      {{1024, 1, 2 * kSplitPages}, 1, Mask::None()},
      {{1537, 0, 3 * kSplitPages}},
      {{1600, 3, 3 * kSplitPages}},
      {{512, 0, kSplitPages}},  // one split: writes its output itself
      {{513, 0, kSplitPages}},
      {{700, 0, kSplitPages - 1}},
      {{1030, 0, 2 * kSplitPages}, 1, Mask::SlidingWindow(600, 0)},
      {{1200, 0, 2 * kSplitPages}},
      {{1300, 0, 2 * kSplitPages + 1}},
  };
  return kTree;
}

const std::vector<Family>& AllFamilies() {
  static const std::vector<Family>* const kAll = new std::vector<Family>(MakeFamilies());
  return *kAll;
}

std::vector<Family> FamiliesNamed(const std::string& name) {
  std::vector<Family> named;
  for (const Family& family : AllFamilies()) {
    if (family.name == name) named.push_back(family);
  }
  return named;
}

FamilyProblem::FamilyProblem(const Family& family, Geometry geometry, std::mt19937_64* random) {
  geometry.num_heads = family.heads;
  geometry.num_kv_heads = family.kv_heads;
  std::vector<SpanShape> shapes = family.shapes;
  if (!family.forked.empty()) {
    std::vector<ForkShape> forks;
    for (const ForkedSpan& span : family.forked) {
      forks.push_back(span.kv);
      shapes.push_back({span.query_rows, 0, span.mask});
    }
    forked_kv_ = std::make_unique<ForkedKv>(geometry, forks, random);
  }
  problem_ = std::make_unique<Problem>(geometry, shapes, random);
  for (int s = 0; s < problem_->num_spans(); ++s) {
    Span& span = problem_->span(s).mutable_span();
    if (forked_kv_ != nullptr) span.kv = forked_kv_->view(s);
    if (!family.scales.empty()) span.terms.softmax_scale *= family.scales[s];
  }
}

}  // namespace flashcore::kernels

#include "kernels/plan_forks.h"

#include <algorithm>
#include <tuple>

namespace flashcore::kernels {
namespace {

using Forks = std::vector<Fork>;

// The memory that page numbers of a span count in.
auto Memory(const KvView& kv) {
  return std::make_tuple(reinterpret_cast<uintptr_t>(kv.key), reinterpret_cast<uintptr_t>(kv.value),
                         kv.page_stride, kv.head_stride, kv.row_stride);
}

// Leading pages that two forks share.
int32_t SharedPages(const Fork& a, const Fork& b) {
  if (a.first_page != b.first_page || Memory(*a.kv) != Memory(*b.kv)) return 0;
  const int32_t pages = std::min(a.num_pages, b.num_pages);
  const int32_t* begin = a.kv->pages;
  return static_cast<int32_t>(std::mismatch(begin, begin + pages, b.kv->pages).first - begin);
}

// In this order forks that share pages stand side by side, those that share more the closer, and
// what any two of them share is the least that two neighbours between them share. The first page
// comes first because it nearly always decides between spans that share nothing.
bool StandsBefore(const Fork& a, const Fork& b) {
  if (a.first_page != b.first_page) return a.first_page < b.first_page;
  const auto a_memory = Memory(*a.kv), b_memory = Memory(*b.kv);
  if (a_memory != b_memory) return a_memory < b_memory;
  const int32_t shared = SharedPages(a, b);
  if (shared < std::min(a.num_pages, b.num_pages)) {
    return a.kv->pages[shared] < b.kv->pages[shared];
  }
  if (a.num_pages != b.num_pages) return a.num_pages < b.num_pages;
  return a.first_item < b.first_item;
}

// Rewrites the items that sorted forks have for the same pages.
class Sharing {
 public:
  Sharing(const Forks& forks, int32_t num_kv_heads, int32_t max_rows, Plan* plan)
      : forks_(forks), num_kv_heads_(num_kv_heads), max_rows_(max_rows), plan_(plan) {}

  // Shares `split` of the forks [begin, end), which all have its pages in common: as few items as
  // max_rows allows, of about equal size.
  void ShareSplit(size_t begin, size_t end, int32_t split) {
    int32_t rows = 0;
    for (size_t f = begin; f < end; ++f) rows += forks_[f].rows;
    const int32_t items = (rows + max_rows_ - 1) / max_rows_;
    const int32_t enough = (rows + items - 1) / items;
    for (size_t first = begin, last; first < end; first = last) {
      int32_t item_rows = 0;
      for (last = first; last < end && item_rows < enough; ++last) {
        if (last > first && item_rows + forks_[last].rows > max_rows_) break;
        item_rows += forks_[last].rows;
      }
      if (last - first < 2) continue;
      for (int32_t head = 0; head < num_kv_heads_; ++head) ShareItem(first, last, split, head);
    }
  }

 private:
  // Makes one item of those of the forks [first, last). The item of the first becomes it; those of
  // the others are left with no rows.
  void ShareItem(size_t first, size_t last, int32_t split, int32_t head) {
    const auto item_of = [&](const Fork& fork) -> WorkItem& {
      return plan_->items[fork.first_item + head * fork.splits + split];
    };
    const size_t first_member = plan_->members.size();
    int32_t rows = 0;
    for (size_t f = first; f < last; ++f) {
      WorkItem& item = item_of(forks_[f]);
      plan_->members.push_back({item.span, rows, item.row_count, item.partial_row});
      rows += item.row_count;
      item.row_count = 0;
    }
    WorkItem& shared = item_of(forks_[first]);
    shared.row_count = rows;
    shared.partial_row = -1;
    shared.first_member = static_cast<int32_t>(first_member);
    shared.num_members = static_cast<int32_t>(last - first);
  }

  const Forks& forks_;
  const int32_t num_kv_heads_;
  const int32_t max_rows_;
  Plan* const plan_;
};

// Sets shared_splits of every sorted fork; returns the largest.
int32_t CountSharedSplits(const PlanOptions& options, Forks* forks) {
  const int32_t split_pages = options.split_kv_rows / kPageTokens;
  int32_t most = 0;
  for (size_t f = 0; f + 1 < forks->size(); ++f) {
    (*forks)[f].shared_splits = SharedPages((*forks)[f], (*forks)[f + 1]) / split_pages;
    most = std::max(most, (*forks)[f].shared_splits);
  }
  return most;
}

// Rows that a shared item may have so that none is more than one worker's part of the launch.
int32_t MaxSharedRows(const PlanOptions& options, int32_t workers, const Plan& plan) {
  int64_t work = 0;  // row * K/V row
  for (const WorkItem& item : plan.items) {
    work += int64_t{item.row_count} * (item.kv_end - item.kv_begin);
  }
  return static_cast<int32_t>(
      std::min<int64_t>(options.shared_rows, work / workers / options.split_kv_rows));
}

}  // namespace

void AddFork(const AttentionBatch& batch, const PlanOptions& options, const Plan& plan,
             size_t first_item, std::vector<Fork>* forks) {
  if (first_item == plan.items.size()) return;  // no query rows
  const WorkItem& item = plan.items[first_item];
  const Span& span = batch.spans[item.span];
  if (span.kv.pages == nullptr || span.mask.left != Mask::kUnbounded) return;
  // The first query row sees the fewest K/V rows.
  const KvRange seen = VisibleKv(span.mask, span.query_rows, span.kv.rows, 0, 1);
  const int32_t whole_splits = seen.end / options.split_kv_rows;
  if (whole_splits == 0) return;
  Fork fork;
  fork.kv = &span.kv;
  fork.first_page = span.kv.pages[0];
  fork.num_pages = whole_splits * (options.split_kv_rows / kPageTokens);
  fork.splits = static_cast<int32_t>(plan.items.size() - first_item) / batch.geometry.num_kv_heads;
  fork.rows = item.row_count;
  fork.first_item = first_item;
  forks->push_back(fork);
}

void ShareItems(const Geometry& geometry, const PlanOptions& options, int32_t workers,
                std::vector<Fork>* forks, Plan* plan) {
  if (forks->size() < 2) return;
  std::sort(forks->begin(), forks->end(), StandsBefore);
  const int32_t most = CountSharedSplits(options, forks);
  const int32_t max_rows = most > 0 ? MaxSharedRows(options, workers, *plan) : 0;
  if (max_rows == 0) return;

  Sharing sharing(*forks, geometry.num_kv_heads, max_rows, plan);
  for (int32_t split = 0; split < most; ++split) {
    for (size_t begin = 0, end; begin < forks->size(); begin = end) {
      end = begin + 1;
      while ((*forks)[end - 1].shared_splits > split) ++end;  // the last fork's is 0
      if (end - begin > 1) sharing.ShareSplit(begin, end, split);
    }
  }
  const auto is_empty = [](const WorkItem& item) { return item.row_count == 0; };
  plan->items.erase(std::remove_if(plan->items.begin(), plan->items.end(), is_empty),
                    plan->items.end());
}

}  // namespace flashcore::kernels

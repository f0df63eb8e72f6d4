// Pure host arithmetic that turns a batch into a work list: which tile, how many KV splits, in
// which order. No device is touched, so all of it is tested without one.
//
// The rule that makes output bits independent of company: the KV split of a span is chosen from
// that span alone (its query and K/V rows, mask, heads and head_dim), and so is its tile, or else
// among tiles in which the kernel gives a row the same bits (PlanOptions::min_tile_rows). Other
// spans of the batch only change the order in which work items run, and which spans' rows an item
// serves.
#ifndef FLASHCORE_KERNELS_PLAN_H_
#define FLASHCORE_KERNELS_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention.h"

namespace flashcore::kernels {

// Query rows and query heads that share one KV head are packed into the rows of a tile: packed row
// r of (span, kv_head) is query row r / group of query head kv_head * group + r % group.
//
// A work item attends the packed rows [row_begin, row_begin + row_count) of one KV head of one span
// to the K/V rows [kv_begin, kv_end), which the mask has already narrowed to tiles that at least
// one of the packed rows sees. kv_begin is a multiple of kPageTokens. An empty range is legal: it
// writes zeros and -inf.
//
// Spans that share pages (forks of one prefix) may share an item, so that those pages are read once
// for all of them. Such an item has members: they fill its row_count rows, row_begin is 0, `span`
// is any of them (its K/V is everybody's), and every row sees every K/V row of the range. Each
// member's share of it is the item that it would have alone, down to the partial rows, so a kernel
// that gives every row the arithmetic of its span alone gives it the same bits.
struct WorkItem {
  int32_t span = 0;
  int32_t kv_head = 0;
  int32_t row_begin = 0;
  int32_t row_count = 0;
  int32_t kv_begin = 0;
  int32_t kv_end = 0;
  int32_t partial_row = -1;  // first row of its partial result; -1: writes O itself
  int32_t combine = -1;      // in Plan::combines, if partial_row >= 0
  int32_t first_member = 0;  // in Plan::members
  int32_t num_members = 0;   // 0: not shared; otherwise at least 2, and partial_row means nothing
};

// The packed rows of one span in a shared item: all that it has of the KV head.
struct Member {
  int32_t span = 0;
  int32_t tile_row = 0;  // its first row in the item; rows of the members follow each other
  int32_t row_count = 0;
  int32_t partial_row = -1;  // as in WorkItem, its own
};

// Merges the partial results of the KV splits of one tile of packed rows, in split order: partial
// rows first_partial_row + s * row_count + r for split s and row r.
struct CombineItem {
  int32_t span = 0;
  int32_t kv_head = 0;
  int32_t row_begin = 0;
  int32_t row_count = 0;
  int32_t first_partial_row = 0;
  int32_t num_splits = 0;
};

// What a kernel family wants of its plan. Depends on the kernel, never on the batch.
struct PlanOptions {
  int32_t tile_rows = 128;      // packed rows a work item, at most
  int32_t split_kv_rows = 512;  // K/V rows a split; a multiple of kPageTokens
  int32_t split_max_rows = 16;  // spans with more packed rows per KV head than this do not split
  int32_t shared_rows = 0;      // packed rows a shared item, at most; 0: items are never shared
  // Tiles of spans that do not split are halved, down to min_tile_rows, as long as there are too
  // few of them for the workers. Only for kernels that give a row the same bits in any of these
  // tiles. 0: never.
  int32_t min_tile_rows = 0;
  // Whether every KV head has items of its own. If not, those of KV head 0 stand for all: a kernel
  // runs each for every KV head, whose combines and partial rows follow each other. Then items are
  // not shared.
  bool kv_heads_apart = true;
};

struct Plan {
  std::vector<WorkItem> items;  // longest first
  std::vector<Member> members;  // of the shared items, those of an item next to each other
  std::vector<CombineItem> combines;
  int32_t partial_rows = 0;    // rows of partial results over all splits
  size_t workspace_bytes = 0;  // partial rows: head_dim + 2 floats each (O, max, sum)
};

// Plans `batch` into `*plan`, whose memory is reused, for a device that runs `workers` items at a
// time (CPU: threads), at least 1: items are shared only so far that all of them keep busy. Reads
// page numbers but no tensor bytes.
void MakePlan(const AttentionBatch& batch, const PlanOptions& options, int32_t workers, Plan* plan);

// The K/V rows [begin, end) that query rows [row_begin, row_end) of a span see between them.
// Empty (begin == end) if they see none.
struct KvRange {
  int32_t begin = 0;
  int32_t end = 0;
};
KvRange VisibleKv(const Mask& mask, int32_t query_rows, int32_t kv_rows, int32_t row_begin,
                  int32_t row_end);

}  // namespace flashcore::kernels

#endif  // FLASHCORE_KERNELS_PLAN_H_

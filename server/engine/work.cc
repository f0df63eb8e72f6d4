#include "server/engine/work.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/plan.h"
#include "kernels/plan_cut.h"

namespace flashcore::server {
namespace {

// Kernels take no more; a sequence that grows beyond it cannot be launched.
constexpr uint64_t kMaxRows = std::numeric_limits<int32_t>::max() / 2;

int32_t ClampRows(uint64_t rows) { return static_cast<int32_t>(std::min(rows, kMaxRows)); }

struct Visible {
  double pairs = 0;    // of a query row and a K/V row
  double kv_rows = 0;  // that any query row reads
};

// Visible ranges move right with the row, so their mean size is about that of the first and last.
Visible VisibleOf(const kernels::Mask& mask, int32_t query_rows, int32_t kv_rows) {
  const auto size = [&](int32_t begin, int32_t end) {
    const kernels::KvRange range = kernels::VisibleKv(mask, query_rows, kv_rows, begin, end);
    return static_cast<double>(range.end - range.begin);
  };
  if (query_rows == 0) return {};
  const double mean = (size(0, 1) + size(query_rows - 1, query_rows)) / 2;
  return {mean * query_rows, size(0, query_rows)};
}

}  // namespace

Nanoseconds EstimateWork(const AttendOperation& operation, bool is_launched,
                         const DeviceSpeed& speed) {
  const AttendRequest& request = operation.request;
  double pairs = 0, kv_rows = 0;
  for (size_t i = 0; i < request.spans.size(); ++i) {
    const SpanShape& span = request.spans[i];
    uint64_t rows = span.kv_rows;
    if (!span.sequence_id.empty() && !operation.sequence_lengths.empty()) {
      rows = operation.sequence_lengths[i] + (is_launched ? 0 : span.kv_rows);
    }
    const Visible visible =
        VisibleOf(request.terms.mask, ClampRows(span.query_rows), ClampRows(rows));
    pairs += visible.pairs;
    kv_rows += visible.kv_rows;
  }
  const double flop = 4 * pairs * request.num_heads * request.head_dim;
  const auto tensor_bytes = static_cast<double>(request.query_bytes + request.output_bytes() +
                                                request.key_bytes + request.value_bytes);
  const double kv_bytes =
      kv_rows / kernels::kPageTokens *
      static_cast<double>(kernels::PageLayoutOf(request.geometry()).page_bytes());
  const double seconds =
      std::max(flop / speed.flop_per_s, (tensor_bytes + kv_bytes) / speed.bytes_per_s);
  constexpr double kMaxSeconds = 1e9;
  const auto estimate = std::chrono::duration_cast<Nanoseconds>(
      std::chrono::duration<double>(std::min(seconds, kMaxSeconds)));
  return std::max(estimate + speed.request, Nanoseconds(1));
}

std::shared_ptr<CutLaunch> Cut(const Device& device, Nanoseconds max_part, Launch* launch) {
  std::vector<kernels::Span> spans;
  AppendSpans(*launch, device.kv_memory().base, launch->pages.data(), &spans);
  const kernels::Geometry geometry = launch->geometry();
  const auto kernel = device.KernelFor(geometry);
  if (spans.empty() || !kernel.ok()) return nullptr;
  const DeviceInfo& info = device.info();
  const kernels::CutOptions options = {Seconds(max_part) * info.speed.flop_per_s,
                                       info.speed.flop_per_s / info.speed.bytes_per_s};
  std::vector<kernels::BatchPart> parts =
      CutBatch({geometry, spans.data(), static_cast<int32_t>(spans.size())},
               (*kernel)->plan_options, std::max(1, info.compute_units), options);
  if (parts.size() == 1) return nullptr;
  auto cut = std::make_shared<CutLaunch>();
  cut->launch = std::move(*launch);
  cut->launch.in_parts = true;
  cut->launch.part = parts[0];
  cut->part_work = cut->launch.operations.front()->work / static_cast<int64_t>(parts.size());
  cut->parts = std::move(parts);
  return cut;
}

}  // namespace flashcore::server

#include "server/request/request.h"

namespace flashcore::server {

int64_t AttendRequest::query_rows() const {
  int64_t rows = 0;
  for (const SpanShape& span : spans) rows += span.query_rows;
  return rows;
}

int64_t AttendRequest::kv_rows() const {
  int64_t rows = 0;
  for (const SpanShape& span : spans) rows += span.kv_rows;
  return rows;
}

size_t AttendRequest::TensorBytes(int64_t rows, uint32_t heads) const {
  size_t bytes = size_t{heads} * head_dim;
  const bool overflow = __builtin_mul_overflow(bytes, kernels::DTypeBytes(dtype), &bytes) ||
                        __builtin_mul_overflow(bytes, rows, &bytes);
  return overflow ? SIZE_MAX : bytes;
}

absl::Status AttendRequest::CheckRegions() const {
  const SharedRegion* checked = nullptr;  // most requests have one region
  for (const MemoryRange& range : ranges) {
    if (range.region == nullptr || range.region.get() == checked) continue;
    checked = range.region.get();
    if (absl::Status status = checked->Check(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace flashcore::server

#include "server/core/request.h"

#include <utility>

#include "server/core/align.h"

namespace flashcore::server {
namespace {

size_t AlignUp(size_t bytes) { return server::AlignUp(bytes, StagingPool::kAlignment); }

}  // namespace

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

absl::Status AttendTensors::Allocate(const AttendRequest& request, StagingPool* pool) {
  key_offset_ = AlignUp(request.query_bytes);
  value_offset_ = key_offset_ + AlignUp(request.key_bytes);
  lse_offset_ = request.return_lse ? AlignUp(request.output_bytes()) : 0;
  claim_.input_bytes = value_offset_ + request.value_bytes;
  claim_.result_bytes =
      request.return_lse ? lse_offset_ + request.lse_bytes() : request.output_bytes();
  return pool->Lend(&claim_);
}

}  // namespace flashcore::server

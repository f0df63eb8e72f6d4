#include "server/transport/memory_ranges.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/transport/register_memory.h"

namespace flashcore::server {
namespace {

absl::Status ToRange(const v1::MemoryRange& message, const char* field, const SharedMemory* memory,
                     MemoryRange* range) {
  absl::Status status;
  if (memory == nullptr) {
    status = CannotShareMemory();
  } else if (auto region = memory->Find(message.region_id()); region.ok()) {
    range->region = *std::move(region);
    range->offset = message.offset();
  } else {
    status = region.status();
  }
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(field, ": ", status.message()));
}

// Sets the size of an input that lies in shared memory.
absl::Status SetBytes(const MemoryRange& range, const char* field, size_t want, size_t* bytes) {
  if (range.region == nullptr) return absl::OkStatus();
  if (*bytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": ", *bytes, " bytes came, although ", field, "_range is set"));
  }
  *bytes = want;
  return absl::OkStatus();
}

}  // namespace

absl::Status ToMemoryRanges(const v1::AttendRequest& message, const SharedMemory* memory,
                            AttendRequest* request) {
  auto& ranges = request->ranges;
  absl::Status status;
  const auto read = [&](bool has, const v1::MemoryRange& range, const char* field, Tensor tensor) {
    if (has && status.ok()) status = ToRange(range, field, memory, &ranges[tensor]);
  };
  read(message.has_query_range(), message.query_range(), "query_range", kQuery);
  read(message.has_key_range(), message.key_range(), "key_range", kKey);
  read(message.has_value_range(), message.value_range(), "value_range", kValue);
  read(message.has_output_range(), message.output_range(), "output_range", kOutput);
  read(message.has_lse_range(), message.lse_range(), "lse_range", kLse);
  if (status.ok()) status = request->CheckRegions();
  if (!status.ok()) return status;

  const size_t query_bytes = request->TensorBytes(request->query_rows(), request->num_heads);
  const size_t kv_bytes = request->TensorBytes(request->kv_rows(), request->num_kv_heads);
  status.Update(SetBytes(ranges[kQuery], "query", query_bytes, &request->query_bytes));
  status.Update(SetBytes(ranges[kKey], "key", kv_bytes, &request->key_bytes));
  status.Update(SetBytes(ranges[kValue], "value", kv_bytes, &request->value_bytes));
  return status;
}

}  // namespace flashcore::server

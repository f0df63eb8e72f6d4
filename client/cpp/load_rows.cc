#include "client/cpp/load_rows.h"

#include <algorithm>
#include <cstring>

#include "client/cpp/encode.h"

namespace flashcore::client {

constexpr uint64_t kPageRows = 64;  // of a page of K/V on the server

void CopyRows(const RowsToLoad& rows, absl::Span<const std::byte> tensor, uint64_t first,
              uint64_t count, void* to) {
  const size_t row_bytes = rows.RowBytes();
  const uint32_t heads = rows.layout == Layout::kNHD ? 1 : rows.num_kv_heads;
  const size_t head_row_bytes = row_bytes / heads;
  for (uint32_t head = 0; head < heads; ++head) {
    std::memcpy(static_cast<std::byte*>(to) + head * count * head_row_bytes,
                tensor.data() + (head * rows.num_rows + first) * head_row_bytes,
                count * head_row_bytes);
  }
}

v1::LoadSequenceRequest ChunkFields(const RowsToLoad& rows, uint64_t first, uint64_t count) {
  v1::LoadSequenceRequest small;
  if (first == 0) small.set_sequence_id(rows.sequence_id);
  if (rows.expected_length.has_value()) small.set_expected_length(*rows.expected_length + first);
  small.set_layer(rows.layer);
  small.set_layout(ToProto(rows.layout));
  small.set_rows(static_cast<uint32_t>(count));
  return small;
}

uint64_t ChunkRows(const RowsToLoad& rows, size_t message_bytes) {
  const uint64_t fit =
      (std::max(message_bytes, kSmallLoadBytes) - kSmallLoadBytes) / (2 * rows.RowBytes());
  return fit >= kPageRows ? fit / kPageRows * kPageRows : std::max<uint64_t>(1, fit);
}

}  // namespace flashcore::client

// Rows of K/V on their way to a sequence, in messages of a part of them each. Internal to the
// client.
#ifndef FLASHCORE_CLIENT_CPP_LOAD_ROWS_H_
#define FLASHCORE_CLIENT_CPP_LOAD_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/types/span.h"
#include "flashcore/sequence.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore::client {

inline constexpr size_t kSmallLoadBytes = 128;  // most bytes of a message without its tensors

// Rows to append to a layer of a sequence. Does not own the tensors.
struct RowsToLoad {
  std::string sequence_id;
  uint32_t layer = 0;
  std::optional<uint64_t> expected_length;  // of the layer, before the first row
  Layout layout = Layout::kNHD;
  uint64_t num_rows = 0;      // at least 1
  uint32_t num_kv_heads = 0;  // divides the bytes of a row
  // [num_rows, num_kv_heads, head_dim] or [num_kv_heads, num_rows, head_dim], of equal size.
  absl::Span<const std::byte> key;
  absl::Span<const std::byte> value;

  size_t RowBytes() const { return key.size() / num_rows; }
};

// Copies rows [first, first + count) of one tensor of `rows`, in its layout.
void CopyRows(const RowsToLoad& rows, absl::Span<const std::byte> tensor, uint64_t first,
              uint64_t count, void* to);
// The fields of a chunk of rows [first, first + count), without tensors.
v1::LoadSequenceRequest ChunkFields(const RowsToLoad& rows, uint64_t first, uint64_t count);
// Rows in one message of at most `message_bytes`: whole pages, if one fits.
uint64_t ChunkRows(const RowsToLoad& rows, size_t message_bytes);

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_LOAD_ROWS_H_

// One LoadSequence: rows of K and V, cut into messages. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOAD_ROWS_H_
#define FLASHCORE_CLIENT_CPP_LOAD_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/attend.h"
#include "client/cpp/connection.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore::client {

// Owns no tensor.
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

// Blocks until all rows are appended, in messages of at most `message_bytes` each, and of the
// client's limit; a row always travels whole (RESOURCE_EXHAUSTED if one is over that limit). Each
// message is copied once from the tensors, and gRPC's flow control bounds how many are under way.
// If `rows` has an expected_length, every message says what it makes of it. Any error may leave the
// first messages in effect.
absl::StatusOr<v1::LoadSequenceResponse> LoadRows(const Connection& connection,
                                                  const RowsToLoad& rows, size_t message_bytes,
                                                  absl::Time deadline, absl::string_view affinity);

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_LOAD_ROWS_H_

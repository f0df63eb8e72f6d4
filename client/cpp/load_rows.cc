#include "client/cpp/load_rows.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "client/cpp/codec.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "grpcpp/support/sync_stream.h"
#include "proto/wire.h"

namespace flashcore::client {
namespace {

constexpr char kLoadMethod[] = "/flashcore.v1.AttentionService/LoadSequence";
constexpr size_t kSmallBytes = 128;  // of a message without its tensors, at most
constexpr uint64_t kPageRows = 64;   // of a page of K/V on the server

// Rows [first, first + count) of one tensor of `rows`, in its layout.
grpc::Slice CopyRows(const RowsToLoad& rows, absl::Span<const std::byte> tensor, uint64_t first,
                     uint64_t count) {
  const size_t row_bytes = rows.RowBytes();
  if (rows.layout == Layout::kNHD) {
    return grpc::Slice(tensor.data() + first * row_bytes, count * row_bytes);
  }
  grpc_slice slice = grpc_slice_malloc(count * row_bytes);
  const size_t head_row_bytes = row_bytes / rows.num_kv_heads;
  for (uint32_t head = 0; head < rows.num_kv_heads; ++head) {
    std::memcpy(GRPC_SLICE_START_PTR(slice) + head * count * head_row_bytes,
                tensor.data() + (head * rows.num_rows + first) * head_row_bytes,
                count * head_row_bytes);
  }
  return grpc::Slice(slice, grpc::Slice::STEAL_REF);
}

// A LoadSequenceRequest of rows [first, first + count).
grpc::ByteBuffer EncodeChunk(const RowsToLoad& rows, uint64_t first, uint64_t count) {
  v1::LoadSequenceRequest small;
  if (first == 0) small.set_sequence_id(rows.sequence_id);
  if (rows.expected_length.has_value()) small.set_expected_length(*rows.expected_length + first);
  small.set_layer(rows.layer);
  small.set_layout(ToProto(rows.layout));
  small.set_rows(static_cast<uint32_t>(count));
  const grpc::Slice key = CopyRows(rows, rows.key, first, count);
  const grpc::Slice value = CopyRows(rows, rows.value, first, count);
  const std::array<grpc::Slice, 4> slices = {
      grpc::Slice(small.SerializeAsString() +
                  wire::FieldHeader(v1::LoadSequenceRequest::kKeyFieldNumber, key.size())),
      key, grpc::Slice(wire::FieldHeader(v1::LoadSequenceRequest::kValueFieldNumber, value.size())),
      value};
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// Rows of one message of at most `message_bytes`: whole pages, if one fits.
uint64_t ChunkRows(const RowsToLoad& rows, size_t message_bytes) {
  const uint64_t fit = (std::max(message_bytes, kSmallBytes) - kSmallBytes) / (2 * rows.RowBytes());
  return fit >= kPageRows ? fit / kPageRows * kPageRows : std::max<uint64_t>(1, fit);
}

}  // namespace

absl::StatusOr<v1::LoadSequenceResponse> LoadRows(const Connection& connection,
                                                  const RowsToLoad& rows, size_t message_bytes,
                                                  absl::Time deadline, absl::string_view affinity) {
  const size_t limit = connection.options().max_message_bytes;
  if (2 * rows.RowBytes() + kSmallBytes > limit) {
    return absl::ResourceExhaustedError(absl::StrCat("key, value: a row of 2 * ", rows.RowBytes(),
                                                     " bytes is over this client's limit of ",
                                                     limit, " a message"));
  }
  const uint64_t chunk_rows = ChunkRows(rows, std::min(message_bytes, limit));

  grpc::ClientContext context;
  connection.Prepare(deadline, affinity, &context);
  v1::LoadSequenceResponse response;
  const grpc::internal::RpcMethod method(kLoadMethod, grpc::internal::RpcMethod::CLIENT_STREAMING);
  const std::unique_ptr<grpc::ClientWriter<grpc::ByteBuffer>> writer(
      grpc::internal::ClientWriterFactory<grpc::ByteBuffer>::Create(connection.channel().get(),
                                                                    method, &context, &response));
  uint64_t first = 0;
  while (first < rows.num_rows) {
    const uint64_t count = std::min(chunk_rows, rows.num_rows - first);
    if (!writer->Write(EncodeChunk(rows, first, count))) break;  // over: Finish says why
    first += count;
  }
  if (first == rows.num_rows) writer->WritesDone();
  absl::Status status = FromGrpc(writer->Finish());
  if (!status.ok()) return status;
  if (first < rows.num_rows) {
    return absl::InternalError("the server ended the load before its last rows");
  }
  return response;
}

}  // namespace flashcore::client

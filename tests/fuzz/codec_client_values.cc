// The client's part of codec_values.h.
#include <cstddef>
#include <optional>
#include <string>

#include "client/cpp/answer.h"
#include "client/cpp/encode.h"
#include "client/cpp/local/ring_request.h"
#include "server/transport/grpc/adapters.h"
#include "server/transport/rpc/message.h"
#include "tests/client/set_terms.h"
#include "tests/fuzz/codec_values.h"
#include "tests/fuzz/require.h"

namespace flashcore::fuzz {
namespace {

// The client's shared memory: one region that the server may write, one that it may not. Outside
// both lies memory that travels in messages.
constexpr size_t kClientBytes = 8192;
struct ClientMemory {
  ClientMemory() {
    for (size_t i = 0; i < kClientBytes; ++i) {
      plain[i] = shared[i] = read_only[i] = static_cast<std::byte>(i % 251);
    }
    table.Add(shared, {kClientBytes, "shared", false, false});
    table.Add(read_only, {kClientBytes, "read only", true, false});
  }

  alignas(16) std::byte plain[kClientBytes];
  alignas(16) std::byte shared[kClientBytes];
  alignas(16) std::byte read_only[kClientBytes];
  client::RegionTable table;
};

ClientMemory& Client() {
  static auto* const kClient = new ClientMemory;
  return *kClient;
}

// Where a tensor of `bytes` lies; sets `*range` if the request must name it by its range.
std::byte* Place(bool has, const v1::MemoryRange& asked, size_t bytes, bool to_write,
                 v1::MemoryRange* range) {
  if (!has) return Client().plain;
  const bool read_only = asked.region_id().size() % 2 != 0;
  const size_t offset = asked.offset() % (kClientBytes - bytes + 1) / 4 * 4;  // of a float
  if (bytes > 0 && offset % 16 == 0 && !(read_only && to_write)) {
    range->set_region_id(read_only ? "read only" : "shared");
    range->set_offset(offset);
    range->set_bytes(bytes);
  }
  return (read_only ? Client().read_only : Client().shared) + offset;
}

// The request without its tensors; none if the client cannot express it.
std::optional<AttendRequest> ShapeOf(const v1::AttendRequest& message) {
  if (!HasKnownEnums(message)) return std::nullopt;
  AttendRequest request;
  request.request_id = message.request_id();
  for (const v1::Span& span : message.spans()) {
    SpanShape& to = request.spans.emplace_back();
    to = {span.query_rows(), span.kv_rows(), span.sequence_id(), {}};
    if (span.has_expected_length()) to.expected_length = span.expected_length();
  }
  request.dtype = client::FromProto(message.dtype());
  request.num_heads = message.num_heads();
  request.num_kv_heads = message.num_kv_heads();
  request.head_dim = message.head_dim();
  request.layout = message.layout() == v1::LAYOUT_NHD ? Layout::kNHD : Layout::kHND;
  SetTerms(message, &request);
  request.precision = client::FromProto(message.precision());
  request.layer = message.layer();
  return request;
}

// Whether every tensor of the request fits ClientMemory.
bool FitsClient(const AttendRequest& request) {
  const auto bytes = [&](uint32_t SpanShape::*rows, uint64_t heads, uint64_t row_bytes) {
    unsigned __int128 sum = 0;
    for (const SpanShape& span : request.spans) sum += span.*rows;
    return sum * heads * row_bytes;
  };
  const uint64_t row_bytes = uint64_t{request.head_dim} * kElementBytes;
  return bytes(&SpanShape::query_rows, request.num_heads, row_bytes) <= kClientBytes &&
         bytes(&SpanShape::query_rows, request.num_heads, sizeof(float)) <= kClientBytes &&
         bytes(&SpanShape::kv_rows, request.num_kv_heads, row_bytes) <= kClientBytes;
}

// Gives `request` its tensors, at the places that `message` asks for. Sets in `*want` how the
// tensors must appear in a request that names those in shared memory by their ranges.
void PlaceTensors(const v1::AttendRequest& message, AttendRequest* request,
                  v1::AttendRequest* want) {
  v1::MemoryRange range;
  const size_t query_bytes = request->QueryBytes();
  const size_t kv_bytes = request->KvBytes();
  const auto input = [&](bool has, const v1::MemoryRange& asked, size_t bytes, auto set_bytes,
                         auto mutable_range) {
    range.Clear();
    const std::byte* data = Place(has, asked, bytes, /*to_write=*/false, &range);
    if (range.region_id().empty()) {
      set_bytes(std::string(reinterpret_cast<const char*>(data), bytes));
    } else {
      *mutable_range() = range;
    }
    return absl::MakeConstSpan(data, bytes);
  };
  request->query = input(
      message.has_query_range(), message.query_range(), query_bytes,
      [&](const std::string& b) { want->set_query(b); },
      [&] { return want->mutable_query_range(); });
  request->key = input(
      message.has_key_range(), message.key_range(), kv_bytes,
      [&](const std::string& b) { want->set_key(b); }, [&] { return want->mutable_key_range(); });
  request->value = input(
      message.has_value_range(), message.value_range(), kv_bytes,
      [&](const std::string& b) { want->set_value(b); },
      [&] { return want->mutable_value_range(); });

  range.Clear();
  std::byte* const output =
      Place(message.has_output_range(), message.output_range(), query_bytes, true, &range);
  request->output = absl::MakeSpan(output, query_bytes);
  if (!range.region_id().empty()) *want->mutable_output_range() = range;
  if (!message.return_lse()) return;
  range.Clear();
  const size_t elements = request->LseElements();
  std::byte* const lse =
      Place(message.has_lse_range(), message.lse_range(), elements * sizeof(float), true, &range);
  request->lse = absl::MakeSpan(reinterpret_cast<float*>(lse), elements);
  if (!range.region_id().empty()) *want->mutable_lse_range() = range;
}

void ClearTensors(v1::AttendRequest* message) {
  message->clear_query();
  message->clear_key();
  message->clear_value();
  message->clear_query_range();
  message->clear_key_range();
  message->clear_value_range();
  message->clear_output_range();
  message->clear_lse_range();
}

// The statuses that FromMessage can give for `status`.
void CheckStatus(const absl::Status& got, const v1::Status& status) {
  const int code = status.code() >= 0 && status.code() <= 16 ? status.code() : 2;
  Require(static_cast<int>(got.code()) == code, "status.code");
  if (code == 0) return;
  const std::string message =
      status.message().empty() ? "the server gave no message" : status.message();
  Require(got.message() == message, "status.message");
  // The server's encoding of it says the same. It has no details of a client.
  const auto again = client::ParseAnswer(server::ToByteBuffer(server::EncodeError("id", got)), 0);
  Require(again.ok() && again->status == absl::Status(got.code(), got.message()) &&
              again->result.request_id == "id",
          "an error's reply");
}

v1::AttendResponse ToMessage(const client::Answer& answer) {
  v1::AttendResponse out;
  const AttendResult& result = answer.result;
  out.set_request_id(result.request_id);
  v1::Timing* timing = out.mutable_timing();
  timing->set_receive_ns(result.timing.receive_ns);
  timing->set_staging_wait_ns(result.timing.staging_wait_ns);
  timing->set_queue_ns(result.timing.queue_ns);
  timing->set_copy_in_ns(result.timing.copy_in_ns);
  timing->set_kernel_ns(result.timing.kernel_ns);
  timing->set_copy_out_ns(result.timing.copy_out_ns);
  for (const uint64_t length : result.sequence_lengths) out.add_sequence_lengths(length);
  return out;
}

}  // namespace

void CheckClientRequest(const v1::AttendRequest& message) {
  std::optional<AttendRequest> request = ShapeOf(message);
  if (!request.has_value() || !FitsClient(*request)) return;
  v1::AttendRequest want = message;
  want.DiscardUnknownFields();
  want.clear_timeout_ns();   // only a stream sets it
  v1::AttendRequest points;  // of a request on a CUDA stream
  if (want.has_inputs_ready()) points.mutable_inputs_ready()->Swap(want.mutable_inputs_ready());
  if (want.has_results_ready()) points.mutable_results_ready()->Swap(want.mutable_results_ready());
  want.clear_inputs_ready();
  want.clear_results_ready();
  ClearTensors(&want);
  if (!HasBound(message.mask()) && message.mask().kind() == v1::Mask::KIND_NONE) want.clear_mask();
  PlaceTensors(message, &*request, &want);

  if (!CheckRequest(*request).ok()) return;  // it is never encoded
  // A ring's request copies what is elsewhere, which needs a server.
  if (want.query().empty() && want.key().empty() && want.value().empty() &&
      (want.has_output_range() || request->output.empty()) &&
      (want.has_lse_range() || request->lse.empty())) {
    client::local::RingRequest in_ring;
    const absl::Status prepared = in_ring.Prepare(*request, Client().table, /*pool=*/nullptr,
                                                  client::local::SteadyTime::max());
    Require(prepared.ok(), "the client refuses a request for a ring");
    in_ring.Append(points.SerializeAsString());
    v1::AttendRequest got, want_in_ring = want;
    want_in_ring.MergeFrom(points);
    Require(got.ParseFromString(in_ring.Serialized()), "a malformed ring request");
    Require(got.SerializeAsString() == want_in_ring.SerializeAsString(),
            "the client writes other values to a ring");
  }

  // Over gRPC, all tensors travel.
  ClearTensors(&want);
  const auto set = [](absl::Span<const std::byte> tensor, std::string* field) {
    field->assign(reinterpret_cast<const char*>(tensor.data()), tensor.size());
  };
  set(request->query, want.mutable_query());
  set(request->key, want.mutable_key());
  set(request->value, want.mutable_value());
  client::BorrowedMemory borrowed;
  const bool copies = message.layer() % 2 != 0;
  const auto encoded =
      client::EncodeRequest(*request, size_t{1} << 20, copies ? nullptr : &borrowed);
  Require(encoded.ok(), "the client refuses to encode a request");
  v1::AttendRequest got;
  Require(got.ParseFromString(BytesOf(encoded->message)), "the client writes a malformed request");
  Require(got.SerializeAsString() == want.SerializeAsString(), "the client writes other values");
  const client::Destination& to = encoded->destination;
  Require(to.output.size() == request->output.size(), "output");
  Require(to.lse.size() == request->lse.size(), "lse");
}

void CheckClientReply(const grpc::ByteBuffer& message, bool well_formed,
                      const v1::AttendResponse& parsed) {
  const auto answer = client::ParseAnswer(message, /*max_spans=*/0);
  Require(answer.ok() == well_formed, "the client and the generated parser disagree on a reply");
  if (!well_formed) return;
  CheckStatus(answer->status, parsed.status());
  Require(Payload(message, answer->output) == parsed.output(), "output");
  Require(Payload(message, answer->lse) == parsed.lse(), "lse");
  Require(answer->result.response_bytes == message.Length(), "response_bytes");

  v1::AttendResponse want = parsed;
  want.DiscardUnknownFields();
  want.clear_status();
  want.clear_output();
  want.clear_lse();
  want.mutable_timing();  // unset is all zeros
  Require(ToMessage(*answer).SerializeAsString() == want.SerializeAsString(),
          "the client reads other values");
}

}  // namespace flashcore::fuzz

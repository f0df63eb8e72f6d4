#include "client/cpp/grpc/transport.h"

#include <array>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cpp/answer.h"
#include "client/cpp/connection.h"
#include "client/cpp/encode.h"
#include "client/cpp/grpc/channel.h"
#include "client/cpp/grpc_status.h"
#include "client/cpp/status.h"
#include "flashcore/v1/attention.grpc.pb.h"  // how gRPC serializes messages
#include "proto/grpc/grpc_compat.h"
#include "proto/grpc/message_view.h"

namespace flashcore::client {
namespace {

constexpr char kDeviceMemory[] =
    "device memory and CUDA streams need a local: target, of a server with --local_listen and "
    "--local_device_tensors";
constexpr char kService[] = "/flashcore.v1.AttentionService/";
constexpr char kLoadMethod[] = "/flashcore.v1.AttentionService/LoadSequence";
constexpr char kHealthMethod[] = "/grpc.health.v1.Health/Check";
constexpr char kNameKey[] = "flashcore-client";
constexpr char kAffinityKey[] = "x-flashcore-sequence";
// Longer than kReconnectMs with gRPC's jitter, 1.2 times.
constexpr absl::Duration kConnectionWait = absl::Milliseconds(700);

grpc::Slice CopyRowsToSlice(const RowsToLoad& rows, absl::Span<const std::byte> tensor,
                            uint64_t first, uint64_t count) {
  grpc_slice slice = grpc_slice_malloc(count * rows.RowBytes());
  CopyRows(rows, tensor, first, count, GRPC_SLICE_START_PTR(slice));
  return grpc::Slice(slice, grpc::Slice::STEAL_REF);
}

// A LoadSequenceRequest of rows [first, first + count).
grpc::ByteBuffer EncodeChunk(const RowsToLoad& rows, uint64_t first, uint64_t count) {
  const grpc::Slice key = CopyRowsToSlice(rows, rows.key, first, count);
  const grpc::Slice value = CopyRowsToSlice(rows, rows.value, first, count);
  const std::array<grpc::Slice, 4> slices = {
      grpc::Slice(ChunkFields(rows, first, count).SerializeAsString() +
                  wire::FieldHeader(v1::LoadSequenceRequest::kKeyFieldNumber, key.size())),
      key, grpc::Slice(wire::FieldHeader(v1::LoadSequenceRequest::kValueFieldNumber, value.size())),
      value};
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace

absl::StatusOr<std::shared_ptr<Transport>> GrpcTransport::Create(absl::string_view target,
                                                                 const ClientOptions& options) {
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = MakeChannel(target, options);
  if (!channel.ok()) return channel.status();
  std::unique_ptr<TokenFile> token;
  if (!options.token_file.empty()) {
    absl::StatusOr<std::unique_ptr<TokenFile>> opened = TokenFile::Open(options.token_file);
    if (!opened.ok()) return opened.status();
    token = *std::move(opened);
  }
  return std::shared_ptr<Transport>(
      new GrpcTransport(options, std::move(token), *std::move(channel)));
}

GrpcTransport::GrpcTransport(const ClientOptions& options, std::unique_ptr<TokenFile> token,
                             std::shared_ptr<grpc::Channel> channel)
    : name_(options.name),
      max_message_bytes_(options.max_message_bytes),
      token_(std::move(token)),
      channel_(std::move(channel)) {}

void GrpcTransport::Prepare(absl::Time deadline, absl::string_view affinity,
                            grpc::ClientContext* context) const {
  context->set_deadline(ToGrpc(deadline));
  if (!name_.empty()) context->AddMetadata(kNameKey, name_);
  if (token_ != nullptr) context->AddMetadata("authorization", "Bearer " + token_->Token());
  if (!affinity.empty()) context->AddMetadata(kAffinityKey, absl::CHexEscape(affinity));
}

absl::Status GrpcTransport::Call(const google::protobuf::Message& request, const CallOptions& call,
                                 google::protobuf::Message* response) {
  absl::string_view name = request.GetDescriptor()->name();
  absl::ConsumeSuffix(&name, "Request");
  const std::string method = absl::StrCat(kService, name);
  grpc::ClientContext context;
  Prepare(*call.deadline, call.affinity, &context);
  return FromGrpc(grpc_compat::CallUnary<google::protobuf::MessageLite>(
      channel_.get(), method.c_str(), &context, request, response));
}

absl::Status GrpcTransport::CallBytes(const char* method, const CallOptions& call,
                                      const grpc::ByteBuffer& request,
                                      grpc::ByteBuffer* reply) const {
  grpc::ClientContext context;
  Prepare(*call.deadline, call.affinity, &context);
  return FromGrpc(
      grpc_compat::CallUnary<grpc::ByteBuffer>(channel_.get(), method, &context, request, reply));
}

// Each message is copied once from the tensors, and gRPC's flow control bounds how many are in
// flight.
absl::StatusOr<v1::LoadSequenceResponse> GrpcTransport::LoadRows(const RowsToLoad& rows,
                                                                 const CallOptions& call) {
  const size_t limit = MaxMessageBytes();
  if (2 * rows.RowBytes() + kSmallLoadBytes > limit) {
    return absl::ResourceExhaustedError(absl::StrCat("key, value: a row of 2 * ", rows.RowBytes(),
                                                     " bytes; a message may have at most ", limit,
                                                     " bytes (max_message_bytes of the client, "
                                                     "--max_message_bytes of the server)"));
  }
  const uint64_t chunk_rows = ChunkRows(rows, std::min(Sequence::kMessageBytes, limit));

  grpc::ClientContext context;
  Prepare(*call.deadline, call.affinity, &context);
  v1::LoadSequenceResponse response;
  const auto writer = grpc_compat::OpenWriter(channel_.get(), kLoadMethod, &context, &response);
  uint64_t first = 0;
  while (first < rows.num_rows) {
    const uint64_t count = std::min(chunk_rows, rows.num_rows - first);
    if (!writer->Write(EncodeChunk(rows, first, count))) break;  // Finish has the reason
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

// HealthCheckRequest { string service = 1 } and HealthCheckResponse { ServingStatus status = 1 }:
// Debian's gRPC ships no generated header for them.
absl::StatusOr<HealthStatus> GrpcTransport::CheckHealth(absl::string_view service,
                                                        const CallOptions& call) {
  const grpc::Slice slice(wire::FieldHeader(1, service.size()) + std::string(service));
  grpc::ByteBuffer response;
  absl::Status status = CallBytes(kHealthMethod, call, grpc::ByteBuffer(&slice, 1), &response);
  if (!status.ok()) return status;
  // One varint field of one byte; an empty message is its default, UNKNOWN.
  std::string fields;
  status = wire::SplitMessage(wire::ViewOf(response), /*max_small_bytes=*/1024, {}, &fields);
  if (!status.ok()) return absl::InternalError(absl::StrCat("reply: ", status.message()));
  HealthStatus health = HealthStatus::kUnknown;
  if (fields.size() >= 2 && fields[0] == 0x08) {
    if (fields[1] == 1) health = HealthStatus::kServing;
    if (fields[1] == 2) health = HealthStatus::kNotServing;
  }
  return health;
}

absl::StatusOr<std::shared_ptr<local::Memory>> GrpcTransport::CreateMemory(
    size_t /*bytes*/, bool /*inputs_only*/, const CallOptions& /*call*/) {
  return absl::UnimplementedError(
      "shared memory needs a local: target, of a server with --local_listen");
}

absl::StatusOr<std::shared_ptr<const local::DeviceMemory>> GrpcTransport::AllocateDeviceMemory(
    size_t /*bytes*/, const std::string& /*device_id*/, const CallOptions& /*call*/) {
  return absl::UnimplementedError(kDeviceMemory);
}

absl::StatusOr<std::unique_ptr<Attempts>> GrpcTransport::MakeCudaStreamAttempt(
    const AttendRequest& /*request*/, void* /*stream*/, const CallOptions& /*call*/) {
  return absl::UnimplementedError(kDeviceMemory);
}

const std::shared_ptr<grpc::Channel>& GrpcTransport::callback_channel() const {
  KeepCallbackThreads();
  return channel_;
}

bool GrpcTransport::WaitForConnected(absl::Time deadline) {
  return channel_->WaitForConnected(ToGrpc(deadline));
}

void GrpcTransport::AwaitConnection(absl::Time deadline) {
  if (channel_->GetState(/*try_to_connect=*/true) != GRPC_CHANNEL_TRANSIENT_FAILURE) return;
  // Leaves time for an attempt, which says why there is no connection.
  const absl::Time now = absl::Now();
  const absl::Duration wait = std::min(kConnectionWait, (deadline - now) / 2);
  channel_->WaitForConnected(ToGrpc(now + wait));
}

// By itself, gRPC looks up again a name that does not resolve after up to two minutes.
void GrpcTransport::PrepareRetry(const absl::Status& status) {
  if (NeverSent(status) && absl::StartsWith(status.message(), kNotResolved)) {
    grpc::experimental::ChannelResetConnectionBackoff(channel_.get());
  }
}

void GrpcTransport::Pause(const absl::Status& status, absl::Duration wait) {
  if (!NeverSent(status)) return absl::SleepFor(wait);
  channel_->WaitForConnected(ToGrpc(absl::Now() + wait));
}

bool GrpcTransport::connected() const {
  return channel_->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_READY;
}

}  // namespace flashcore::client

#include "flashcore/client.h"

#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/answer.h"
#include "client/cpp/attend_call.h"
#include "client/cpp/connection.h"
#include "client/cpp/encode.h"
#include "client/cpp/local/link.h"

namespace flashcore {

using Stub = v1::AttentionService::Stub;

constexpr char kEchoMethod[] = "/flashcore.v1.DebugService/Echo";
constexpr char kHealthMethod[] = "/grpc.health.v1.Health/Check";
constexpr absl::Duration kConnectPause = absl::Milliseconds(20);
constexpr uint32_t kPageSize = 1000;  // of ListSequences, the most that a server gives

Client::Client(std::shared_ptr<const client::Connection> connection)
    : connection_(std::move(connection)) {}
Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Create(absl::string_view target,
                                                       ClientOptions options) {
  absl::StatusOr<std::shared_ptr<const client::Connection>> connection =
      client::Connection::Create(target, std::move(options));
  if (!connection.ok()) return connection.status();
  return absl::WrapUnique(new Client(*std::move(connection)));
}

absl::Status Client::Attend(const AttendRequest& request, AttendResult* result,
                            const CallOptions& call) {
  return client::CallAttend(*connection_, request, result, call);
}

CallHandle Client::AttendAsync(const AttendRequest& request, AttendCallback done,
                               const CallOptions& call) {
  AttendCall::Args args;
  args.deadline = connection_->Deadline(call);
  auto attempts = client::MakeAttempts(connection_, request, args.deadline, call.affinity);
  if (!attempts.ok()) {
    done(attempts.status(), {});
    return {};
  }
  args.connection = connection_;
  args.attempts = *std::move(attempts);
  args.safe_to_repeat = request.SafeToRepeat();
  args.done = std::move(done);
  auto async = std::make_shared<AttendCall>(std::move(args));
  async->Start();
  return CallHandle(async);
}

void CallHandle::Cancel() {
  if (const std::shared_ptr<AttendCall> call = call_.lock()) call->Cancel();
}

absl::StatusOr<std::unique_ptr<SharedMemory>> Client::CreateSharedMemory(
    size_t bytes, const SharedMemoryOptions& options, const CallOptions& call) {
  return SharedMemory::Create(connection_, bytes, options, call);
}

std::unique_ptr<AttendStream> Client::OpenStream(const StreamOptions& options) {
  return AttendStream::Open(connection_, options);
}

absl::StatusOr<v1::GetServerInfoResponse> Client::GetServerInfo(const CallOptions& call) {
  absl::StatusOr<v1::GetServerInfoResponse> info =
      connection_->Call(&Stub::GetServerInfo, {}, /*safe_to_repeat=*/true, call);
  if (info.ok() && info->limits().max_message_bytes() > 0) {
    connection_->SetServerMessageBytes(info->limits().max_message_bytes());
  }
  return info;
}

absl::StatusOr<Sequence> Client::CreateSequence(const SequenceOptions& options,
                                                const CallOptions& call) {
  return Sequence::Create(connection_, options, call);
}

absl::StatusOr<Sequence> Client::OpenSequence(absl::string_view id, const CallOptions& call) {
  return Sequence::Open(connection_, id, call);
}

absl::StatusOr<std::vector<v1::SequenceInfo>> Client::ListSequences(const CallOptions& call) {
  const CallOptions whole = {connection_->Deadline(call), call.affinity};  // of all pages together
  std::vector<v1::SequenceInfo> sequences;
  v1::ListSequencesRequest request;
  request.set_page_size(kPageSize);
  while (true) {
    absl::StatusOr<v1::ListSequencesResponse> page =
        connection_->Call(&Stub::ListSequences, request, /*safe_to_repeat=*/true, whole);
    if (!page.ok()) return page.status();
    for (v1::SequenceInfo& info : *page->mutable_sequences()) {
      sequences.push_back(std::move(info));
    }
    if (page->next_page_token().empty()) return sequences;
    if (page->next_page_token() == request.page_token()) {
      return absl::InternalError("reply: next_page_token: the same again");
    }
    request.set_page_token(page->next_page_token());
  }
}

absl::Status Client::Echo(absl::Span<const std::byte> payload, absl::Span<std::byte> reply,
                          const CallOptions& call) {
  if (absl::Status status = connection_->CheckProcess(); !status.ok()) return status;
  client::BorrowedMemory borrowed;  // outlives the message
  const client::EncodedRequest encoded = client::EncodeEcho("", payload, reply, &borrowed);
  grpc::ByteBuffer response;
  connection_->AwaitConnection(connection_->Deadline(call));
  absl::Status status = connection_->CallBytes(kEchoMethod, call, encoded.message, &response);
  if (!status.ok()) return status;
  const absl::StatusOr<client::Answer> answer = client::ParseEcho(response);
  return answer.ok() ? client::CopyAnswer(response, *answer, encoded.destination) : answer.status();
}

std::unique_ptr<EchoStream> Client::OpenEchoStream(const StreamOptions& options) {
  return EchoStream::Open(connection_, options);
}

// HealthCheckRequest { string service = 1 } and HealthCheckResponse { ServingStatus status = 1 }:
// Debian's gRPC ships no generated header for them.
absl::StatusOr<HealthStatus> Client::CheckHealth(absl::string_view service,
                                                 const CallOptions& call) {
  if (absl::Status status = connection_->CheckProcess(); !status.ok()) return status;
  if (connection_->local() != nullptr) return CheckLocalHealth(service, call);
  connection_->AwaitConnection(connection_->Deadline(call));
  const grpc::Slice slice(wire::FieldHeader(1, service.size()) + std::string(service));
  grpc::ByteBuffer response;
  absl::Status status =
      connection_->CallBytes(kHealthMethod, call, grpc::ByteBuffer(&slice, 1), &response);
  if (!status.ok()) return status;
  // One varint field of one byte; an empty message is its default, UNKNOWN.
  std::string fields;
  status = wire::SplitMessage(response, /*max_small_bytes=*/1024, {}, &fields);
  if (!status.ok()) return absl::InternalError(absl::StrCat("reply: ", status.message()));
  HealthStatus health = HealthStatus::kUnknown;
  if (fields.size() >= 2 && fields[0] == 0x08) {
    if (fields[1] == 1) health = HealthStatus::kServing;
    if (fields[1] == 2) health = HealthStatus::kNotServing;
  }
  return health;
}

// The local socket has no health service. A server that drains answers UNAVAILABLE.
absl::StatusOr<HealthStatus> Client::CheckLocalHealth(absl::string_view service,
                                                      const CallOptions& call) {
  if (!service.empty() && service != v1::AttentionService::service_full_name()) {
    return absl::NotFoundError(absl::StrCat("service: '", service, "' is unknown"));
  }
  const auto reply =
      connection_->local()->Call("GetServerInfo", v1::GetServerInfoRequest().SerializeAsString(),
                                 client::local::ToSteady(connection_->Deadline(call)));
  if (!reply.ok()) return reply.status();
  return HealthStatus::kServing;
}

bool Client::WaitForConnected(absl::Time deadline) {
  if (!connection_->OfThisProcess()) return false;
  if (connection_->local() != nullptr) {
    while (true) {
      if (connection_->local()->Connect(client::local::ToSteady(deadline)).ok()) return true;
      if (absl::Now() + kConnectPause >= deadline) return false;
      absl::SleepFor(kConnectPause);
    }
  }
  return connection_->channel()->WaitForConnected(client::ToGrpc(deadline));
}

}  // namespace flashcore

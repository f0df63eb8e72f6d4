#include "flashcore/client.h"

#include <string>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/attend_call.h"
#include "client/cpp/connection.h"

namespace flashcore {

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
  const CallOptions whole = {connection_->Deadline(call), call.affinity};  // of all attempts
  return StartCall(client::MakeAttempts(*connection_, request, whole), request.SafeToRepeat(),
                   *whole.deadline, std::move(done));
}

CallHandle Client::AttendOnCudaStream(const AttendRequest& request, void* stream,
                                      AttendCallback done, const CallOptions& call) {
  const CallOptions whole = {connection_->Deadline(call), call.affinity};
  return StartCall(client::MakeCudaStreamAttempt(*connection_, request, stream, whole),
                   /*safe_to_repeat=*/false, *whole.deadline, std::move(done));
}

CallHandle Client::StartCall(absl::StatusOr<std::unique_ptr<client::Attempts>> attempts,
                             bool safe_to_repeat, absl::Time deadline, AttendCallback done) {
  if (!attempts.ok()) {
    done(attempts.status(), {});
    return {};
  }
  AttendCall::Args args;
  args.connection = connection_;
  args.attempts = *std::move(attempts);
  args.safe_to_repeat = safe_to_repeat;
  args.deadline = deadline;
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

absl::StatusOr<DeviceMemory> Client::AllocateDeviceMemory(size_t bytes,
                                                          const std::string& device_id,
                                                          const CallOptions& call) {
  return DeviceMemory::Allocate(connection_, bytes, device_id, call);
}

std::unique_ptr<AttendStream> Client::OpenStream(const StreamOptions& options) {
  return AttendStream::Open(connection_, options);
}

absl::StatusOr<v1::GetServerInfoResponse> Client::GetServerInfo(const CallOptions& call) {
  absl::StatusOr<v1::GetServerInfoResponse> info =
      connection_->Call<v1::GetServerInfoResponse>(v1::GetServerInfoRequest(),
                                                   /*safe_to_repeat=*/true, call);
  if (info.ok() && info->limits().max_message_bytes() > 0) {
    connection_->transport().SetServerMessageBytes(info->limits().max_message_bytes());
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
        connection_->Call<v1::ListSequencesResponse>(request, /*safe_to_repeat=*/true, whole);
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

absl::StatusOr<HealthStatus> Client::CheckHealth(absl::string_view service,
                                                 const CallOptions& call) {
  if (absl::Status status = connection_->CheckProcess(); !status.ok()) return status;
  const CallOptions whole = {connection_->Deadline(call), call.affinity};
  connection_->transport().AwaitConnection(*whole.deadline);
  return connection_->transport().CheckHealth(service, whole);
}

bool Client::WaitForConnected(absl::Time deadline) {
  return connection_->OfThisProcess() && connection_->transport().WaitForConnected(deadline);
}

}  // namespace flashcore

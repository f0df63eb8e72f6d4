#include "client/cpp/client.h"

#include <new>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/async_call.h"
#include "client/cpp/codec.h"
#include "client/cpp/target.h"
#include "flashcore/v1/attention.grpc.pb.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/impl/client_unary_call.h"

namespace flashcore {
namespace {

constexpr char kEchoMethod[] = "/flashcore.v1.DebugService/Echo";
constexpr char kHealthMethod[] = "/grpc.health.v1.Health/Check";

std::unique_ptr<grpc::ClientContext> NewContext(absl::Time deadline) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(absl::ToChronoTime(deadline));
  return context;
}

// The blocking call polls on this thread: one thread hand-off less than a callback.
absl::Status BlockingCall(grpc::Channel* channel, const char* method, absl::Time deadline,
                          const grpc::ByteBuffer& request, grpc::ByteBuffer* reply) {
  const std::unique_ptr<grpc::ClientContext> context = NewContext(deadline);
  const grpc::internal::RpcMethod rpc(method, grpc::internal::RpcMethod::NORMAL_RPC);
  return client::FromGrpc(
      grpc::internal::BlockingUnaryCall(channel, rpc, context.get(), request, reply));
}

// gRPC 1.51 runs callbacks on threads that it joins when the last channel that used them goes. If
// one of these threads drops that channel itself, with the last reference from a call that outlived
// its Client, it joins itself and the completion queue is freed twice. One call on a channel that
// is never freed (and never connects) keeps the threads for the life of the process.
void KeepCallbackThreads() {
  struct Keeper {
    const std::shared_ptr<grpc::Channel> channel = grpc::CreateChannel("", nullptr);
    grpc::ClientContext context;
    const grpc::Slice empty;
    const grpc::ByteBuffer request = grpc::ByteBuffer(&empty, 1);
    grpc::ByteBuffer reply;
  };
  // Not on the heap, where a leak checker would not find the optimised pointer to it.
  alignas(Keeper) static std::byte storage[sizeof(Keeper)];
  static const bool started = [] {
    auto* keeper = new (storage) Keeper;
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>(keeper->channel)
        .UnaryCall(&keeper->context, kAttendMethod, {}, &keeper->request, &keeper->reply,
                   [](const grpc::Status&) {});
    return true;
  }();
  static_cast<void>(started);
}

// Sets what the caller has left unset.
void SetDefault(const grpc::ChannelArguments& given, const char* name, int value,
                grpc::ChannelArguments* out) {
  const grpc_channel_args args = given.c_channel_args();
  for (size_t i = 0; i < args.num_args; ++i) {
    if (absl::string_view(args.args[i].key) == name) return;
  }
  out->SetInt(name, value);
}

grpc::ChannelArguments WithDefaults(absl::string_view target, const ClientOptions& options) {
  const grpc::ChannelArguments& given = options.channel_arguments;
  grpc::ChannelArguments out = given;
  const int limit = static_cast<int>(std::min<size_t>(options.max_message_bytes, INT32_MAX));
  SetDefault(given, GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, limit, &out);
  SetDefault(given, GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, limit, &out);
  // Two Clients of one address are two connections.
  SetDefault(given, GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1, &out);
  // gRPC's own default of a second would outlast our first retries.
  SetDefault(given, GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100, &out);
  SetDefault(given, GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 5000, &out);
  if (client::IsUnixTarget(target)) SetDefault(given, GRPC_ARG_ENABLE_HTTP_PROXY, 0, &out);
  return out;
}

}  // namespace

struct Client::Channel {
  ClientOptions options;
  std::shared_ptr<grpc::Channel> grpc;

  absl::Time Deadline(const CallOptions& call) const {
    return call.deadline.has_value() ? *call.deadline : absl::Now() + options.timeout;
  }
};

Client::Client(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}
Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Create(absl::string_view target,
                                                       ClientOptions options) {
  if (absl::Status status = client::CheckTarget(target); !status.ok()) return status;
  if (options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("timeout: must be positive");
  }
  if (options.credentials == nullptr) options.credentials = grpc::InsecureChannelCredentials();
  KeepCallbackThreads();
  auto channel = std::make_shared<Channel>();
  channel->grpc = grpc::CreateCustomChannel(std::string(target), options.credentials,
                                            WithDefaults(target, options));
  channel->options = std::move(options);
  return absl::WrapUnique(new Client(std::move(channel)));
}

absl::Status Client::Attend(const AttendRequest& request, AttendResult* result,
                            const CallOptions& call) {
  const absl::Time deadline = channel_->Deadline(call);
  const ClientOptions& options = channel_->options;
  const absl::StatusOr<grpc::ByteBuffer> message =
      client::EncodeRequest(request, options.max_message_bytes);
  if (!message.ok()) return message.status();
  grpc::ByteBuffer reply;
  absl::Status status;
  int attempts = 0;
  while (true) {
    status = BlockingCall(channel_->grpc.get(), kAttendMethod, deadline, *message, &reply);
    ++attempts;
    if (status.ok()) break;
    absl::InsecureBitGen random;
    const std::optional<absl::Duration> wait = client::NextBackoff(
        options.retry, status, request.SafeToRepeat(), attempts, absl::Now(), deadline, random);
    if (!wait.has_value()) break;
    absl::SleepFor(*wait);
  }
  AttendResult ignored;
  if (result == nullptr) result = &ignored;
  *result = {};
  if (status.ok()) {
    absl::StatusOr<client::Answer> answer = client::ParseAnswer(reply, request.spans.size());
    status = answer.status();
    if (status.ok()) status = client::CopyTensors(reply, *answer, {request.output, request.lse});
    if (status.ok()) *result = std::move(answer->result);
  }
  result->attempts = attempts;
  result->request_bytes = message->Length();
  return status;
}

CallHandle Client::AttendAsync(const AttendRequest& request, AttendCallback done,
                               const CallOptions& call) {
  const ClientOptions& options = channel_->options;
  AsyncCall::Args args;
  args.deadline = channel_->Deadline(call);
  absl::StatusOr<grpc::ByteBuffer> message =
      client::EncodeRequest(request, options.max_message_bytes);
  if (!message.ok()) {
    done(message.status(), {});
    return {};
  }
  args.channel = channel_->grpc;
  args.message = *std::move(message);
  args.destination = {request.output, request.lse};
  args.num_spans = request.spans.size();
  args.safe_to_repeat = request.SafeToRepeat();
  args.retry = options.retry;
  args.done = std::move(done);
  auto async = std::make_shared<AsyncCall>(std::move(args));
  async->Start();
  return CallHandle(async);
}

void CallHandle::Cancel() {
  if (const std::shared_ptr<AsyncCall> call = call_.lock()) call->Cancel();
}

std::unique_ptr<AttendStream> Client::OpenStream(const StreamOptions& options) {
  return AttendStream::Open(channel_->grpc, options, channel_->options.max_message_bytes);
}

absl::StatusOr<v1::GetServerInfoResponse> Client::GetServerInfo(const CallOptions& call) {
  const std::unique_ptr<v1::AttentionService::Stub> stub =
      v1::AttentionService::NewStub(channel_->grpc);
  const std::unique_ptr<grpc::ClientContext> context = NewContext(channel_->Deadline(call));
  v1::GetServerInfoResponse response;
  absl::Status status = client::FromGrpc(stub->GetServerInfo(context.get(), {}, &response));
  if (!status.ok()) return status;
  return response;
}

absl::Status Client::Echo(absl::Span<const std::byte> payload, absl::Span<std::byte> reply,
                          const CallOptions& call) {
  grpc::ByteBuffer response;
  absl::Status status = BlockingCall(channel_->grpc.get(), kEchoMethod, channel_->Deadline(call),
                                     client::EncodeEcho(payload, reply.size()), &response);
  if (!status.ok()) return status;
  return client::DecodeEcho(response, reply);
}

// HealthCheckRequest { string service = 1 } and HealthCheckResponse { ServingStatus status = 1 }:
// Debian's gRPC ships no generated header for them.
absl::StatusOr<HealthStatus> Client::CheckHealth(absl::string_view service,
                                                 const CallOptions& call) {
  const grpc::Slice slice(wire::FieldHeader(1, service.size()) + std::string(service));
  grpc::ByteBuffer response;
  absl::Status status = BlockingCall(channel_->grpc.get(), kHealthMethod, channel_->Deadline(call),
                                     grpc::ByteBuffer(&slice, 1), &response);
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

bool Client::WaitForConnected(absl::Time deadline) {
  return channel_->grpc->WaitForConnected(absl::ToChronoTime(deadline));
}

}  // namespace flashcore

#include "client/cpp/connection.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>

#include "absl/memory/memory.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/target.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/impl/client_unary_call.h"

namespace flashcore::client {
namespace {

constexpr char kNameKey[] = "flashcore-client";
constexpr char kAffinityKey[] = "x-flashcore-sequence";
constexpr size_t kMaxNameBytes = 64;

// gRPC 1.51 runs callbacks on threads that it joins when the last channel that used them goes. If
// one of these threads drops that channel itself, with the last reference from a call that outlived
// its Client, it joins itself and the completion queue is freed twice. One call on a channel that
// is never freed (and never connects) keeps the threads for the life of the process.
//
// Once there, they poll all sockets of the process, and a blocking call has to take its reply from
// them: some 10% of a decode step. So they are started by the first callback, not before.
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
        .UnaryCall(&keeper->context, "/", {}, &keeper->request, &keeper->reply,
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
  if (IsUnixTarget(target)) SetDefault(given, GRPC_ARG_ENABLE_HTTP_PROXY, 0, &out);
  return out;
}

absl::Status CheckName(absl::string_view name) {
  const bool printable =
      std::all_of(name.begin(), name.end(), [](char c) { return c >= ' ' && c <= '~'; });
  if (printable && name.size() <= kMaxNameBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("name: ", name.size(), " bytes", printable ? "" : ", not all printable",
                   "; want at most ", kMaxNameBytes, " of printable ASCII"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Connection>> Connection::Create(absl::string_view target,
                                                                     ClientOptions options) {
  if (absl::Status status = CheckTarget(target); !status.ok()) return status;
  if (absl::Status status = CheckName(options.name); !status.ok()) return status;
  if (options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("timeout: must be positive");
  }
  if (options.credentials == nullptr) options.credentials = grpc::InsecureChannelCredentials();
  std::shared_ptr<grpc::Channel> channel = grpc::CreateCustomChannel(
      std::string(target), options.credentials, WithDefaults(target, options));
  return absl::WrapUnique(new Connection(std::move(options), std::move(channel)));
}

Connection::Connection(ClientOptions options, std::shared_ptr<grpc::Channel> channel)
    : options_(std::move(options)),
      channel_(std::move(channel)),
      stub_(v1::AttentionService::NewStub(channel_)) {}

const std::shared_ptr<grpc::Channel>& Connection::callback_channel() const {
  KeepCallbackThreads();
  return channel_;
}

void Connection::Prepare(absl::Time deadline, absl::string_view affinity,
                         grpc::ClientContext* context) const {
  context->set_deadline(absl::ToChronoTime(deadline));
  if (!options_.name.empty()) context->AddMetadata(kNameKey, options_.name);
  if (!affinity.empty()) context->AddMetadata(kAffinityKey, absl::CHexEscape(affinity));
}

std::optional<absl::Duration> Connection::Backoff(const absl::Status& status, bool safe_to_repeat,
                                                  int attempts, absl::Time deadline) const {
  if (status.ok()) return std::nullopt;
  absl::InsecureBitGen random;
  return NextBackoff(options_.retry, status, safe_to_repeat, attempts, absl::Now(), deadline,
                     random);
}

// The blocking call polls on this thread: one thread hand-off less than a callback.
absl::Status Connection::CallBytes(const char* method, absl::Time deadline,
                                   absl::string_view affinity, const grpc::ByteBuffer& request,
                                   grpc::ByteBuffer* reply) const {
  grpc::ClientContext context;
  Prepare(deadline, affinity, &context);
  const grpc::internal::RpcMethod rpc(method, grpc::internal::RpcMethod::NORMAL_RPC);
  return FromGrpc(grpc::internal::BlockingUnaryCall(channel_.get(), rpc, &context, request, reply));
}

}  // namespace flashcore::client

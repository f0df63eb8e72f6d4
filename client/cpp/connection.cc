#include "client/cpp/connection.h"

#include <grpc/support/cpu.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/local/link.h"
#include "client/cpp/status.h"
#include "client/cpp/target.h"
#include "client/local/memory.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "proto/wire/grpc_compat.h"
#include "proto/wire/start_thread.h"

namespace flashcore::client {
namespace {

constexpr char kNameKey[] = "flashcore-client";
constexpr char kAffinityKey[] = "x-flashcore-sequence";
constexpr size_t kMaxNameBytes = 64;
constexpr int kReconnectMs = 500;  // at most, between two attempts of gRPC to connect
// Longer than that with gRPC's jitter, 1.2 times.
constexpr absl::Duration kConnectionWait = absl::Milliseconds(700);

// gRPC 1.51 runs callbacks on threads that it joins when the last channel that used them is freed.
// If one of these threads frees that channel itself (a call that outlived its Client has the last
// reference), it joins itself and frees the completion queue twice. One call on a channel that is
// never freed, and never connects, keeps the threads for the life of the process.
//
// Once started, these threads poll all sockets of the process, and a blocking call has to get its
// reply from them, which costs about 10% of a decode step. So the first callback starts them.
void KeepCallbackThreads() {
  struct Keeper {
    const std::shared_ptr<grpc::Channel> channel = grpc::CreateChannel("", nullptr);
    grpc::ClientContext context;
    const grpc::Slice empty;
    const grpc::ByteBuffer request = grpc::ByteBuffer(&empty, 1);
    grpc::ByteBuffer reply;
  };
  // Static, because a leak checker does not find the optimised pointer to a heap object.
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

// RESOURCE_EXHAUSTED unless so many more files can be opened.
absl::Status CheckFiles(int wanted) {
  std::vector<local::File> files(wanted);
  for (local::File& file : files) {
    file = local::File(eventfd(0, EFD_CLOEXEC));
    if (file.get() >= 0) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "gRPC needs ", wanted, " open files: ", std::strerror(errno), "; the limit is ulimit -n"));
  }
  return absl::OkStatus();
}

// RESOURCE_EXHAUSTED unless so many more threads can be made.
absl::Status CheckThreads(int wanted) {
  absl::Notification end;
  std::vector<std::thread> threads(wanted);
  int error = 0;
  for (std::thread& thread : threads) {
    error = StartThread(&thread, [&end] { end.WaitForNotification(); });
    if (error != 0) break;
  }
  end.Notify();
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
  if (error == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("gRPC needs ", wanted, " threads: ", NoThreadMessage(error)));
}

// gRPC 1.51 opens files and makes threads with its first channel. Where it can open none, it ends
// the program; where it can make no thread, it leaves work to one that does not exist, and calls
// wait until their deadlines. So this takes as many and gives them back, until it has succeeded
// once.
absl::Status CheckRoomForGrpc() {
  static std::atomic<bool> succeeded{false};
  if (succeeded) return absl::OkStatus();
  const int cores = static_cast<int>(gpr_cpu_num_cores());
  constexpr int kFiles = 8;  // 4 as it starts, those of a connection, and one to spare
  // Its event engine and pollers; two executors and two timers.
  const int threads = std::clamp(cores, 2, 32) + std::clamp(cores / 2, 2, 16) + 4;
  absl::Status status = CheckFiles(kFiles);
  if (status.ok()) status = CheckThreads(threads);
  succeeded = status.ok();
  return status;
}

// INVALID_ARGUMENT if the path or the options make no sense for a local socket.
absl::Status CheckLocal(absl::string_view path, const ClientOptions& options) {
  absl::Status status = local::ToAbsl(local::CheckPath({path.data(), path.size()}));
  if (!status.ok()) return status;
  const auto error = [path](absl::string_view option, absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat(option, ": not with the target local:", path, ", ", why));
  };
  constexpr char kWhoCalls[] = "where the server knows who calls by the user id of the process";
  if (!options.token_file.empty()) return error("token_file", kWhoCalls);
  if (options.tls.has_value()) return error("tls", "which never leaves this host");
  if (options.credentials != nullptr) return error("credentials", kWhoCalls);
  if (options.local_spin < absl::ZeroDuration() || options.local_spin > absl::Seconds(1)) {
    return absl::InvalidArgumentError("local_spin: want 0 to 1 s");
  }
  return absl::OkStatus();
}

// gRPC has no threads in a child that was forked, and waits there for events of its parent's
// sockets.
absl::Status CheckGrpc() {
  static const local::Process first;  // that has used it
  if (first.Here()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "process ", getpid(), " was forked from process ", first.pid(),
      ", which has used gRPC, and gRPC does not survive a fork: make the first client after the "
      "fork, or use local:/path"));
}

// The argument with this name; null: the caller has not set it.
const grpc_arg* Find(const grpc::ChannelArguments& given, absl::string_view name) {
  const grpc_channel_args args = given.c_channel_args();
  const grpc_arg* const begin = args.args;
  const grpc_arg* const end = begin + args.num_args;
  const grpc_arg* const found =
      std::find_if(begin, end, [name](const grpc_arg& arg) { return arg.key == name; });
  return found == end ? nullptr : found;
}

// Sets an argument unless the caller has.
void SetDefault(const grpc::ChannelArguments& given, const char* name, int value,
                grpc::ChannelArguments* out) {
  if (Find(given, name) == nullptr) out->SetInt(name, value);
}

// INVALID_ARGUMENT if a proxy is asked for where none may be taken.
absl::Status CheckProxy(absl::string_view target, const ClientOptions& options) {
  if (options.http_proxy && !options.tls.has_value() && !StaysOnHost(target)) {
    return absl::InvalidArgumentError(
        absl::StrCat("http_proxy: set for ", target, " without tls; want TLS through a proxy"));
  }
  const grpc_arg* const argument = Find(options.channel_arguments, GRPC_ARG_ENABLE_HTTP_PROXY);
  if (argument == nullptr || argument->value.integer == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("channel_arguments: ", GRPC_ARG_ENABLE_HTTP_PROXY, "; want http_proxy"));
}

grpc::ChannelArguments WithDefaults(absl::string_view target, const ClientOptions& options) {
  const grpc::ChannelArguments& given = options.channel_arguments;
  grpc::ChannelArguments out = given;
  const int limit = static_cast<int>(std::min<size_t>(options.max_message_bytes, INT32_MAX));
  SetDefault(given, GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, limit, &out);
  SetDefault(given, GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, limit, &out);
  // Two Clients of one address are two connections.
  SetDefault(given, GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1, &out);
  // A server that is back is found within half a second, also under a new address of its name.
  // gRPC's defaults are up to two minutes.
  SetDefault(given, GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100, &out);
  SetDefault(given, GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMs, &out);
  SetDefault(given, GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, kReconnectMs, &out);
  // By itself gRPC calls loopback and plaintext addresses through the proxy of $http_proxy, too.
  if (!UsesHttpProxy(target, options)) {
    out.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    out.SetString("grpc.address_http_proxy_enabled_addresses", "");  // of gRPC 1.57 and later
  }
  if (options.tls.has_value() && !options.tls->server_name.empty()) {
    out.SetSslTargetNameOverride(options.tls->server_name);
  }
  return out;
}

absl::Status CheckRetry(const RetryPolicy& retry) {
  const auto error = [](absl::string_view field, absl::Duration found) {
    return absl::InvalidArgumentError(
        absl::StrCat("retry.", field, ": ", absl::FormatDuration(found), "; want more than 0"));
  };
  if (retry.max_attempts < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("retry.max_attempts: ", retry.max_attempts, "; want at least 0"));
  }
  if (retry.initial_backoff <= absl::ZeroDuration()) {
    return error("initial_backoff", retry.initial_backoff);
  }
  if (retry.max_backoff <= absl::ZeroDuration()) return error("max_backoff", retry.max_backoff);
  return absl::OkStatus();
}

absl::Status CheckName(absl::string_view name) {
  const bool printable =
      std::all_of(name.begin(), name.end(), [](char c) { return c >= ' ' && c <= '~'; });
  if (printable && name.size() <= kMaxNameBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("name: ", name.size(), " bytes", printable ? "" : ", not all printable",
                   "; want at most ", kMaxNameBytes, " of printable ASCII"));
}

// Sets options->credentials. INVALID_ARGUMENT if a token would leave the host in clear text.
absl::Status SetCredentials(absl::string_view target, ClientOptions* options) {
  if (options->credentials != nullptr) {
    if (!options->tls.has_value() && options->token_file.empty() && !options->http_proxy) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        "credentials: want none beside tls, token_file and http_proxy");
  }
  // Servers take no TLS on Unix sockets, which nobody can listen in on.
  if (absl::StartsWith(target, "unix:") || absl::StartsWith(target, "unix-abstract:")) {
    options->tls.reset();
  }
  if (options->tls.has_value()) {
    auto credentials = MakeTlsCredentials(*options->tls);
    if (!credentials.ok()) return credentials.status();
    options->credentials = *std::move(credentials);
    return absl::OkStatus();
  }
  if (!options->token_file.empty() && !StaysOnHost(target)) {
    return absl::InvalidArgumentError(
        absl::StrCat("token_file: the token would go to ", target,
                     " in clear text; use TLS (tls_ca_file), or an address of this host"));
  }
  options->credentials = grpc::InsecureChannelCredentials();
  return absl::OkStatus();
}

}  // namespace

bool NeverSent(const absl::Status& status) {
  return absl::IsUnavailable(status) && (absl::StartsWith(status.message(), kNotConnected) ||
                                         absl::StartsWith(status.message(), kNotResolved));
}

std::optional<absl::Duration> NextBackoff(const RetryPolicy& policy, const absl::Status& status,
                                          bool safe_to_repeat, int attempts, absl::Time now,
                                          absl::Time deadline, absl::BitGenRef random) {
  if (!absl::IsUnavailable(status) || !(safe_to_repeat || NeverSent(status))) return std::nullopt;
  if (policy.max_attempts > 0 && attempts >= policy.max_attempts) return std::nullopt;
  absl::Duration ceiling = policy.initial_backoff;
  for (int i = 1; i < attempts && ceiling < policy.max_backoff; ++i) ceiling *= 2;
  ceiling = std::min(ceiling, policy.max_backoff);
  // Jitter, so that clients that failed at the same time do not retry at the same time.
  const absl::Duration wait = ceiling * absl::Uniform(random, 0.5, 1.0);
  if (now + wait >= deadline) return std::nullopt;
  return wait;
}

absl::StatusOr<std::shared_ptr<const Connection>> Connection::Create(absl::string_view target,
                                                                     ClientOptions options) {
  absl::string_view path = target;
  const bool local = absl::ConsumePrefix(&path, kLocalScheme);
  absl::Status status = local ? CheckLocal(path, options) : CheckTarget(target);
  status.Update(CheckName(options.name));
  status.Update(CheckRetry(options.retry));
  if (!status.ok()) return status;
  if (options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("timeout: ", absl::FormatDuration(options.timeout),
                     "; want more than 0; absl::InfiniteDuration() for none"));
  }
  if (local)
    return local::OwnHere<const Connection>(new Connection(std::move(options), std::string(path)));
  status = CheckGrpc();
  status.Update(CheckProxy(target, options));
  status.Update(CheckRoomForGrpc());  // before anything of gRPC is made
  if (!status.ok()) return status;
  status.Update(SetCredentials(target, &options));
  if (!status.ok()) return status;
  std::unique_ptr<TokenFile> token;
  if (!options.token_file.empty()) {
    absl::StatusOr<std::unique_ptr<TokenFile>> opened = TokenFile::Open(options.token_file);
    if (!opened.ok()) return opened.status();
    token = *std::move(opened);
  }
  std::shared_ptr<grpc::Channel> channel = grpc::CreateCustomChannel(
      std::string(target), options.credentials, WithDefaults(target, options));
  return local::OwnHere<const Connection>(
      new Connection(std::move(options), std::move(token), std::move(channel)));
}

absl::Status Connection::CheckProcess() const {
  if (OfThisProcess()) return absl::OkStatus();
  return absl::FailedPreconditionError(process_.Refusal());
}

Connection::Connection(ClientOptions options, std::unique_ptr<TokenFile> token,
                       std::shared_ptr<grpc::Channel> channel)
    : options_(std::move(options)),
      token_(std::move(token)),
      channel_(std::move(channel)),
      stub_(v1::AttentionService::NewStub(channel_)),
      lease_(options_.lease ? std::make_unique<Lease>(this) : nullptr) {}

Connection::Connection(ClientOptions options, std::string path)
    : options_(std::move(options)),
      local_(std::make_unique<local::Link>(
          std::move(path),
          absl::StrCat("flashcore-cpp", options_.name.empty() ? "" : " ", options_.name),
          options_.local_spin, &regions_)),
      lease_(options_.lease ? std::make_unique<Lease>(this) : nullptr) {}

Connection::~Connection() = default;

absl::Status Connection::CallLocal(const google::protobuf::Message& request, absl::Time deadline,
                                   google::protobuf::Message* response) const {
  // The request of the RPC Name is a NameRequest.
  absl::string_view method = request.GetDescriptor()->name();
  absl::ConsumeSuffix(&method, "Request");
  const absl::StatusOr<std::string> reply =
      local_->Call(method, request.SerializeAsString(), local::ToSteady(deadline));
  if (!reply.ok()) return reply.status();
  if (response->ParseFromString(*reply)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("reply: not a ", response->GetDescriptor()->name()));
}

const std::shared_ptr<grpc::Channel>& Connection::callback_channel() const {
  KeepCallbackThreads();
  return channel_;
}

void Connection::AwaitConnection(absl::Time deadline) const {
  if (local_ != nullptr) return;
  if (channel_->GetState(/*try_to_connect=*/true) != GRPC_CHANNEL_TRANSIENT_FAILURE) return;
  // Leaves time for an attempt, which says why there is no connection.
  const absl::Time now = absl::Now();
  const absl::Duration wait = std::min(kConnectionWait, (deadline - now) / 2);
  channel_->WaitForConnected(ToGrpc(now + wait));
}

void Connection::Pause(const absl::Status& status, absl::Duration wait) const {
  if (local_ != nullptr || !NeverSent(status)) return absl::SleepFor(wait);
  channel_->WaitForConnected(ToGrpc(absl::Now() + wait));
}

void Connection::Prepare(absl::Time deadline, absl::string_view affinity,
                         grpc::ClientContext* context) const {
  context->set_deadline(ToGrpc(deadline));
  if (!options_.name.empty()) context->AddMetadata(kNameKey, options_.name);
  if (token_ != nullptr) context->AddMetadata("authorization", "Bearer " + token_->Token());
  if (!affinity.empty()) context->AddMetadata(kAffinityKey, absl::CHexEscape(affinity));
}

absl::Status Connection::ExplainDeadline(absl::Status status, absl::Time begin) const {
  if (!absl::IsDeadlineExceeded(status) || status.message() != kNoAnswer) return status;
  const absl::Duration waited = absl::Trunc(absl::Now() - begin, absl::Milliseconds(1));
  const bool connected =
      local_ != nullptr || channel_->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_READY;
  return absl::DeadlineExceededError(
      absl::StrCat(kNoAnswer, ", ", absl::FormatDuration(waited),
                   " after the call began; it may have taken effect, or still may",
                   connected ? "" : "; at the moment there is no connection to the server"));
}

std::optional<absl::Duration> Connection::Backoff(const absl::Status& status, bool safe_to_repeat,
                                                  int attempts, absl::Time deadline) const {
  if (status.ok()) return std::nullopt;
  // By itself, gRPC looks up again a name that does not resolve after up to two minutes.
  if (local_ == nullptr && NeverSent(status) && absl::StartsWith(status.message(), kNotResolved)) {
    grpc::experimental::ChannelResetConnectionBackoff(channel_.get());
  }
  absl::InsecureBitGen random;
  return NextBackoff(options_.retry, status, safe_to_repeat, attempts, absl::Now(), deadline,
                     random);
}

absl::Status Connection::CallBytes(const char* method, const CallOptions& call,
                                   const grpc::ByteBuffer& request, grpc::ByteBuffer* reply) const {
  if (local_ != nullptr) {
    return absl::UnimplementedError(
        absl::StrCat(method, ": not over the local socket; use an address of gRPC"));
  }
  grpc::ClientContext context;
  Prepare(Deadline(call), call.affinity, &context);
  return FromGrpc(grpc_compat::CallUnary(channel_.get(), method, &context, request, reply));
}

}  // namespace flashcore::client

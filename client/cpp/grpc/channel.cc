#include "client/cpp/grpc/channel.h"

#include <grpc/support/cpu.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/security.h"
#include "client/cpp/target.h"
#include "client/local/memory.h"
#include "client/local/process.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "proto/wire/start_thread.h"

namespace flashcore::client {
namespace {

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

// gRPC has no threads in a child that was forked, and waits there for events of its parent's
// sockets.
absl::Status CheckGrpc() {
  static const local::Process first;  // that has used it
  if (first.Here()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("process ", getpid(), " was forked from process ", first.pid(),
                   ", which has used gRPC, and gRPC does not survive a fork: make the first "
                   "client after the fork, or use local:/path"));
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
    out.SetString("grpc.address_http_proxy_enabled_addresses",
                  "");  // of gRPC 1.57 and later
  }
  if (options.tls.has_value() && !options.tls->server_name.empty()) {
    out.SetSslTargetNameOverride(options.tls->server_name);
  }
  return out;
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

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(absl::string_view target,
                                                           ClientOptions options) {
  absl::Status status = CheckTarget(target);
  status.Update(CheckGrpc());
  status.Update(CheckProxy(target, options));
  status.Update(CheckRoomForGrpc());  // before anything of gRPC is made
  if (!status.ok()) return status;
  status.Update(SetCredentials(target, &options));
  if (!status.ok()) return status;
  return grpc::CreateCustomChannel(std::string(target), options.credentials,
                                   WithDefaults(target, options));
}

}  // namespace flashcore::client

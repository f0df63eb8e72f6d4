// The way to one server, a gRPC channel or the server's local socket, and how calls are made on it:
// deadline, name, token, retries. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_CONNECTION_H_
#define FLASHCORE_CLIENT_CPP_CONNECTION_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/random/bit_gen_ref.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "client/cpp/grpc_status.h"
#include "client/cpp/lease.h"
#include "client/cpp/memory.h"
#include "client/cpp/security.h"
#include "client/local/process.h"
#include "flashcore/options.h"
#include "flashcore/v1/attention.grpc.pb.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

namespace flashcore::client {

namespace local {
class Link;
}

inline constexpr char kLocalScheme[] = "local:";  // of a target: then the path of the socket

// For gRPC, to which a time before 1970 is infinitely late.
inline std::chrono::system_clock::time_point ToGrpc(absl::Time deadline) {
  return absl::ToChronoTime(std::max(deadline, absl::UnixEpoch()));
}

// Whether a call that ended with `status` reached no server, so that it had no effect.
bool NeverSent(const absl::Status& status);

// The wait before the next attempt, after `attempts` attempts of which the last ended at `now` with
// `status`. None if there is no next attempt: another status, too many attempts, sent and not safe
// to repeat, or the wait would end after the deadline.
std::optional<absl::Duration> NextBackoff(const RetryPolicy& policy, const absl::Status& status,
                                          bool safe_to_repeat, int attempts, absl::Time now,
                                          absl::Time deadline, absl::BitGenRef random);

// A unary method of the generated stub.
template <typename Request, typename Response>
using Method = grpc::Status (v1::AttentionService::Stub::*)(grpc::ClientContext*, const Request&,
                                                            Response*);

// Shared by a Client and the handles that may outlive it. Thread-safe. Whatever uses it
// calls CheckProcess first, before it takes a lock.
class Connection {
 public:
  // Does not connect: the first call does. INVALID_ARGUMENT if target or options make no sense.
  // FAILED_PRECONDITION over gRPC in a child of a process that has used it.
  static absl::StatusOr<std::shared_ptr<const Connection>> Create(absl::string_view target,
                                                                  ClientOptions options);
  ~Connection();

  // FAILED_PRECONDITION in a child that was forked from the process that made this.
  absl::Status CheckProcess() const;
  bool OfThisProcess() const { return process_.Here(); }

  const ClientOptions& options() const { return options_; }
  // The local socket, if that is the target, else null. Then the channels and Prepare are not used.
  local::Link* local() const { return local_.get(); }
  // Null without ClientOptions::lease.
  Lease* lease() const { return lease_.get(); }
  // Not over the local socket.
  v1::AttentionService::Stub* stub() const { return stub_.get(); }
  // For blocking calls.
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  // For calls with callbacks; starts the threads that run them.
  const std::shared_ptr<grpc::Channel>& callback_channel() const;

  absl::Time Deadline(const CallOptions& call) const {
    return call.deadline.has_value() ? *call.deadline : absl::Now() + options_.timeout;
  }

  // The limit of a message: the client's, or the server's if that is less. The server's is known
  // from the last GetServerInfo.
  size_t MaxMessageBytes() const {
    return std::min(options_.max_message_bytes, server_message_bytes_.load());
  }
  void SetServerMessageBytes(size_t bytes) const { server_message_bytes_ = bytes; }

  // `status` of a call that began at `begin`; kNoAnswer with how long it took and what that means.
  absl::Status ExplainDeadline(absl::Status status, absl::Time begin) const;

  // Changes as memory is registered and unregistered.
  RegionTable& regions() const { return regions_; }

  // Before a call that blocks: over gRPC, waits a moment for a connection, if connecting has
  // failed. Such calls alone poll the sockets, and they do not if they fail at once.
  void AwaitConnection(absl::Time deadline) const;

  // Sets up a new context for a call until `deadline`. `affinity`: see CallOptions.
  void Prepare(absl::Time deadline, absl::string_view affinity, grpc::ClientContext* context) const;

  // NextBackoff with this client's policy.
  std::optional<absl::Duration> Backoff(const absl::Status& status, bool safe_to_repeat,
                                        int attempts, absl::Time deadline) const;

  // Calls `attempt`, which returns a status, until Backoff allows no other.
  template <typename Attempt>
  absl::Status WithRetries(bool safe_to_repeat, absl::Time deadline, int* attempts,
                           Attempt attempt) const {
    const absl::Time begin = absl::Now();
    AwaitConnection(deadline);
    for (*attempts = 1;; ++*attempts) {
      absl::Status status = attempt();
      const std::optional<absl::Duration> wait =
          Backoff(status, safe_to_repeat, *attempts, deadline);
      if (!wait.has_value()) return ExplainDeadline(std::move(status), begin);
      Pause(status, *wait);
    }
  }

  // One attempt of a unary call with raw messages; not over the local socket.
  absl::Status CallBytes(const char* method, const CallOptions& call,
                         const grpc::ByteBuffer& request, grpc::ByteBuffer* reply) const;

  // A call with retries. `attempts`, unless null, is set to how many were made.
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(Method<Request, Response> method, const Request& request,
                                bool safe_to_repeat, const CallOptions& call,
                                int* attempts = nullptr) const {
    if (absl::Status status = CheckProcess(); !status.ok()) return status;
    const absl::Time deadline = Deadline(call);
    Response response;
    int ignored = 0;
    absl::Status status = WithRetries(
        safe_to_repeat, deadline, attempts == nullptr ? &ignored : attempts, [&]() -> absl::Status {
          if (local_ != nullptr) return CallLocal(request, deadline, &response);
          grpc::ClientContext context;
          Prepare(deadline, call.affinity, &context);
          return FromGrpc((stub_.get()->*method)(&context, request, &response));
        });
    if (!status.ok()) return status;
    return response;
  }

 private:
  Connection(ClientOptions options, std::unique_ptr<TokenFile> token,
             std::shared_ptr<grpc::Channel> channel);
  // Over the local socket at `path`.
  Connection(ClientOptions options, std::string path);

  // Waits before the next attempt, after one that ended with `status`; less if it was never sent
  // and a connection comes.
  void Pause(const absl::Status& status, absl::Duration wait) const;
  // One attempt of the RPC whose request this is.
  absl::Status CallLocal(const google::protobuf::Message& request, absl::Time deadline,
                         google::protobuf::Message* response) const;

  const local::Process process_;
  const ClientOptions options_;
  const std::unique_ptr<TokenFile> token_;  // null: none
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::AttentionService::Stub> stub_;
  mutable RegionTable regions_;
  mutable std::atomic<size_t> server_message_bytes_{SIZE_MAX};
  const std::unique_ptr<local::Link> local_;  // null unless the target is local
  const std::unique_ptr<Lease> lease_;        // last: it uses the others
};

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_CONNECTION_H_

// The RPCs of AttentionService: how each is served, and those that move no tensors, whatever
// transport they come by.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_ATTENTION_METHODS_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_ATTENTION_METHODS_H_

#include <cstddef>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "flashcore/v1/attention.pb.h"
#include "google/protobuf/descriptor.h"
#include "server/engine/device_memory.h"
#include "server/engine/fleet.h"
#include "server/memory/shared_memory.h"
#include "server/transport/rpc/page_token.h"
#include "server/transport/rpc/rpc_scope.h"
#include "server/transport/rpc/unknown_fields.h"

namespace flashcore::server {

// A method fills in `response`, does not block, and holds no lock while K/V bytes move. The client
// is admitted already. Thread-safe. Does not own the fleet or the context.
class AttentionMethods {
 public:
  static constexpr int kMaxSequenceOperations = 256;  // of one ManageSequences
  // Size of the SequenceInfos in one reply, more or less: it must fit in a frame of the local
  // socket.
  static constexpr size_t kMaxInfoBytes = size_t{256} << 10;

  struct Options {
    size_t max_message_bytes = 0;  // reported to clients; RpcContext's is enforced
    int max_stream_inflight = 0;
    SharedMemory::Options shared_memory;
    DeviceMemory::Options device_memory{/*total_bytes=*/0};
    std::string version;
    // Reported to clients; the accept loop and the gRPC server enforce them.
    int max_connections = 0;
    int max_connections_per_host = 0;
    int max_connections_per_client = 0;
    int max_connection_streams = 0;
    int max_connection_rings = 0;  // 0: no local socket
  };

  // The kind of code that serves an RPC.
  enum class Kind {
    kQuick,    // a method below
    kLong,     // a method below, which may take milliseconds
    kSteps,    // a method below, or its Operations one by one
    kTensors,  // an Exchange
    kLease,    // whoever keeps the lease
  };

  // The RPCs that move tensors. Each transport has its own code for them, and for HoldLease.
  static constexpr const char* kTensorMethods[] = {"Attend", "AttendStream", "LoadSequence"};

  static const google::protobuf::ServiceDescriptor& Service();

  AttentionMethods(const Options& options, Fleet* fleet, RpcContext* context);

  // Calls visit(name, kind, &AttentionMethods::Method) for each of the others: every transport
  // serves those.
  template <typename Visit>
  static void ForEach(const Visit& visit) {
    visit("GetServerInfo", Kind::kQuick, &AttentionMethods::GetServerInfo);
    visit("CreateSequence", Kind::kQuick, &AttentionMethods::CreateSequence);
    visit("ForkSequence", Kind::kQuick, &AttentionMethods::ForkSequence);
    visit("TruncateSequence", Kind::kQuick, &AttentionMethods::TruncateSequence);
    visit("DeleteSequence", Kind::kQuick, &AttentionMethods::DeleteSequence);
    visit("GetSequence", Kind::kQuick, &AttentionMethods::GetSequence);
    visit("ListSequences", Kind::kLong, &AttentionMethods::ListSequences);
    visit("ManageSequences", Kind::kSteps, &AttentionMethods::ManageSequences);
  }
  template <typename Request, typename Response>
  using Method = absl::Status (AttentionMethods::*)(const Identity& client, const Request& request,
                                                    Response* response) const;

  // Runs `method`, unless the request has fields that this server does not know.
  template <typename Request, typename Response>
  absl::Status Run(Method<Request, Response> method, const Identity& client, const Request& request,
                   Response* response) const {
    absl::Status status = CheckKnownFields(request);
    return status.ok() ? (this->*method)(client, request, response) : status;
  }

  absl::Status GetServerInfo(const Identity& client, const v1::GetServerInfoRequest& request,
                             v1::GetServerInfoResponse* response) const;
  absl::Status CreateSequence(const Identity& client, const v1::CreateSequenceRequest& request,
                              v1::CreateSequenceResponse* response) const;
  absl::Status ForkSequence(const Identity& client, const v1::ForkSequenceRequest& request,
                            v1::ForkSequenceResponse* response) const;
  absl::Status TruncateSequence(const Identity& client, const v1::TruncateSequenceRequest& request,
                                v1::TruncateSequenceResponse* response) const;
  absl::Status DeleteSequence(const Identity& client, const v1::DeleteSequenceRequest& request,
                              v1::DeleteSequenceResponse* response) const;
  absl::Status GetSequence(const Identity& client, const v1::GetSequenceRequest& request,
                           v1::GetSequenceResponse* response) const;
  absl::Status ListSequences(const Identity& client, const v1::ListSequencesRequest& request,
                             v1::ListSequencesResponse* response) const;
  absl::Status ManageSequences(const Identity& client, const v1::ManageSequencesRequest& request,
                               v1::ManageSequencesResponse* response) const;

  // The operations of a ManageSequences, one by one, for a transport that runs other calls in
  // between. Begin comes first. `methods` and the messages outlive it. Not thread-safe.
  class Operations {
   public:
    Operations(const AttentionMethods* methods, const v1::ManageSequencesRequest* request,
               v1::ManageSequencesResponse* response)
        : methods_(*methods), request_(*request), response_(*response) {}

    absl::Status Begin() const;  // or why none takes effect
    bool done() const { return next_ == request_.operations_size(); }
    void RunNext(const Identity& client);  // unless done

   private:
    const AttentionMethods& methods_;
    const v1::ManageSequencesRequest& request_;
    v1::ManageSequencesResponse& response_;
    int next_ = 0;                        // operation
    size_t bytes_ = 0;                    // of the results so far
    std::set<absl::string_view> failed_;  // ids
  };

  const Options& options() const { return options_; }
  Fleet* fleet() const { return fleet_; }
  RpcContext* context() const { return context_; }
  SharedMemory* memory() { return &memory_; }
  DeviceMemory* device_memory() { return &device_memory_; }
  // The metrics of a method over "grpc" or "local".
  RpcMetrics* Rpc(const char* method, const char* transport) const;

 private:
  void SetLimits(const Engine& engine, v1::Limits* limits) const;
  // One operation of ManageSequences. On OK, sets result->sequence if it has one.
  absl::Status RunOperation(const Identity& client, const v1::SequenceOperation& operation,
                            v1::SequenceResult* result) const;

  const Options options_;
  Fleet* const fleet_;
  RpcContext* const context_;
  SharedMemory memory_;
  DeviceMemory device_memory_;
  const PageTokens page_tokens_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_ATTENTION_METHODS_H_

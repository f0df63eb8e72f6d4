// flashcore.v1.AttentionService over gRPC's callback API.
#ifndef FLASHCORE_SERVER_TRANSPORT_ATTENTION_SERVICE_H_
#define FLASHCORE_SERVER_TRANSPORT_ATTENTION_SERVICE_H_

#include <vector>

#include "absl/status/status.h"
#include "flashcore/v1/attention.grpc.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "server/engine/fleet.h"
#include "server/telemetry/metrics.h"
#include "server/transport/attend_stream.h"
#include "server/transport/attention_methods.h"
#include "server/transport/rpc_scope.h"

namespace flashcore::server {

// RPCs that carry tensors take raw messages, so that a tensor is copied once, from the network to
// staging memory. All others use generated code.
using AttentionServiceBase = v1::AttentionService::WithRawCallbackMethod_Attend<
    v1::AttentionService::WithRawCallbackMethod_AttendStream<
        v1::AttentionService::WithCallbackMethod_GetServerInfo<
            v1::AttentionService::WithCallbackMethod_CreateSequence<
                v1::AttentionService::WithRawCallbackMethod_LoadSequence<
                    v1::AttentionService::WithCallbackMethod_ForkSequence<
                        v1::AttentionService::WithCallbackMethod_TruncateSequence<
                            v1::AttentionService::WithCallbackMethod_DeleteSequence<
                                v1::AttentionService::WithCallbackMethod_GetSequence<
                                    v1::AttentionService::WithCallbackMethod_ListSequences<
                                        v1::AttentionService::Service>>>>>>>>>>;

// Thread-safe. Outlives every RPC that it serves. Does not own the methods.
class AttentionService final : public AttentionServiceBase {
 public:
  // The methods of this service, for Metrics::Options.
  static std::vector<RpcMethod> Methods();

  explicit AttentionService(AttentionMethods* methods);

  // Refuses new requests with UNAVAILABLE. Requests in flight are answered.
  void Drain();
  // Ends the streams whose identity is not valid any more.
  void EndRevoked() { streams_.EndRevoked(context_->authenticator); }

  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* AttendStream(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;

  grpc::ServerUnaryReactor* CreateSequence(grpc::CallbackServerContext* context,
                                           const v1::CreateSequenceRequest* request,
                                           v1::CreateSequenceResponse* response) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* LoadSequence(grpc::CallbackServerContext* context,
                                                          grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* ForkSequence(grpc::CallbackServerContext* context,
                                         const v1::ForkSequenceRequest* request,
                                         v1::ForkSequenceResponse* response) override;
  grpc::ServerUnaryReactor* TruncateSequence(grpc::CallbackServerContext* context,
                                             const v1::TruncateSequenceRequest* request,
                                             v1::TruncateSequenceResponse* response) override;
  grpc::ServerUnaryReactor* DeleteSequence(grpc::CallbackServerContext* context,
                                           const v1::DeleteSequenceRequest* request,
                                           v1::DeleteSequenceResponse* response) override;
  grpc::ServerUnaryReactor* GetSequence(grpc::CallbackServerContext* context,
                                        const v1::GetSequenceRequest* request,
                                        v1::GetSequenceResponse* response) override;
  grpc::ServerUnaryReactor* ListSequences(grpc::CallbackServerContext* context,
                                          const v1::ListSequencesRequest* request,
                                          v1::ListSequencesResponse* response) override;

 private:
  RpcMetrics* Rpc(const char* method) const;
  template <typename Request, typename Response>
  using Method = absl::Status (AttentionMethods::*)(const Identity& caller, const Request& request,
                                                    Response* response) const;
  // Runs `method` for a caller that is admitted.
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Answer(RpcMetrics* rpc, grpc::CallbackServerContext* call,
                                   const Request& request, Response* response,
                                   Method<Request, Response> method);

  AttentionMethods* const methods_;
  Fleet* const fleet_;
  RpcContext* const context_;
  StreamSet streams_;

  // The metrics of each method.
  RpcMetrics* const attend_ = Rpc("Attend");
  RpcMetrics* const attend_stream_ = Rpc("AttendStream");
  RpcMetrics* const get_server_info_ = Rpc("GetServerInfo");
  RpcMetrics* const create_sequence_ = Rpc("CreateSequence");
  RpcMetrics* const load_sequence_ = Rpc("LoadSequence");
  RpcMetrics* const fork_sequence_ = Rpc("ForkSequence");
  RpcMetrics* const truncate_sequence_ = Rpc("TruncateSequence");
  RpcMetrics* const delete_sequence_ = Rpc("DeleteSequence");
  RpcMetrics* const get_sequence_ = Rpc("GetSequence");
  RpcMetrics* const list_sequences_ = Rpc("ListSequences");
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_ATTENTION_SERVICE_H_

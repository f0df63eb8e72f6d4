#include "server/transport/attention_service.h"

#include <algorithm>
#include <set>

#include "server/transport/convert.h"
#include "server/transport/message.h"
#include "server/transport/register_memory.h"
#include "server/transport/tensor_receiver.h"

namespace flashcore::server {
namespace {

class AttendReactor final : public UnaryReactor {
 public:
  AttendReactor(Fleet* fleet, RpcContext* context, RpcMetrics* rpc,
                grpc::CallbackServerContext* call, grpc::ByteBuffer* request,
                grpc::ByteBuffer* response)
      : UnaryReactor(context, rpc, call),
        fleet_(fleet),
        context_(context),
        request_(request),
        response_(response),
        receiver_(fleet, context->metrics, request, &operation_) {}

  void Start(const SharedMemory* memory, const grpc::CallbackServerContext& context) {
    operation_.deadline = ToDeadline(context.deadline(), fleet_->clock());
    operation_.done = [this](const absl::Status& status) { Done(status); };
    bool well_formed = false;
    absl::StatusOr<Identity> caller = AdmitCaller(context_, context);
    absl::Status status = caller.status();
    if (caller.ok()) {
      operation_.identity = *std::move(caller);
      status = ParseAttend(*request_, memory, &operation_, &receiver_.tensors, &well_formed);
    }
    receiver_.Receive(status, [this](const absl::Status& received) { Enqueue(received); });
  }

 private:
  void Enqueue(absl::Status status) {
    if (status.ok()) status = fleet_->Enqueue(&operation_);
    // Else `this` may be gone already: do not touch it.
    if (!status.ok()) End(status, operation_.identity.name, 0);
  }

  void Done(const absl::Status& status) {
    if (status.ok()) *response_ = EncodeReply(&operation_);
    const size_t bytes = status.ok() ? response_->Length() - StagedReplyBytes(operation_) : 0;
    End(status, operation_.identity.name, bytes);
  }

  void Cancelled() override { operation_.Cancel(); }
  absl::string_view request_id() const override { return operation_.request.request_id; }

  Fleet* const fleet_;
  RpcContext* const context_;
  grpc::ByteBuffer* const request_;
  grpc::ByteBuffer* const response_;
  AttendOperation operation_;
  TensorReceiver receiver_;
};

}  // namespace

std::vector<RpcMethod> AttentionService::Methods() {
  return MethodsOf(*v1::AttendRequest::descriptor()->file()->FindServiceByName("AttentionService"));
}

AttentionService::AttentionService(const Options& options, Fleet* fleet, RpcContext* context)
    : options_(options),
      fleet_(fleet),
      context_(context),
      memory_(options.shared_memory, &fleet->engines().front()->device(),
              &context->metrics->shared_memory_bytes, &context->metrics->shared_memory_regions) {}

void AttentionService::Drain() {
  context_->draining = true;
  streams_.Drain();
}

grpc::ServerUnaryReactor* AttentionService::Attend(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request,
                                                   grpc::ByteBuffer* response) {
  // gRPC owns the message until the RPC ends, but allows it to be cleared earlier, which frees the
  // network's memory early.
  auto* reactor = new AttendReactor(fleet_, context_, attend_, context,
                                    const_cast<grpc::ByteBuffer*>(request), response);
  reactor->Start(MemoryFor(*context), *context);
  return reactor;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* AttentionService::AttendStream(
    grpc::CallbackServerContext* context) {
  return new AttendStreamReactor(fleet_, MemoryFor(*context), context_, attend_stream_, &streams_,
                                 options_.max_stream_inflight, context,
                                 ToDeadline(context->deadline(), fleet_->clock()));
}

grpc::ServerBidiReactor<v1::RegisterMemoryRequest, v1::RegisterMemoryResponse>*
AttentionService::RegisterMemory(grpc::CallbackServerContext* context) {
  return new RegisterMemoryReactor(MemoryFor(*context), context_, register_memory_, &streams_,
                                   context);
}

RpcMetrics* AttentionService::Rpc(const char* method) const {
  return context_->metrics->Rpc(v1::AttentionService::service_full_name(), method);
}

SharedMemory* AttentionService::MemoryFor(const grpc::ServerContextBase& context) {
  return memory_.options().allowed && IsLocal(context) ? &memory_ : nullptr;
}

grpc::ServerUnaryReactor* AttentionService::GetServerInfo(
    grpc::CallbackServerContext* context, const v1::GetServerInfoRequest* /*request*/,
    v1::GetServerInfoResponse* response) {
  return Answer(get_server_info_, context, response, [&](const Identity& /*caller*/) {
    response->set_version(options_.version);
    std::set<const kernels::Kernel*> kernels;  // by address, which is the registry's order
    for (const auto& engine : fleet_->engines()) {
      *response->add_devices() = ToDeviceInfo(engine->device().info(), engine->sequences().stats());
      kernels.insert(engine->device().kernels().begin(), engine->device().kernels().end());
    }
    for (const kernels::Kernel* kernel : kernels) {
      *response->add_kernels() = ToKernelInfo(kernel->spec);
    }
    SetLimits(*fleet_->engines().front(), response->mutable_limits());
    for (const auto& engine : fleet_->engines()) {  // it may be a share of the device's memory
      v1::Limits& limits = *response->mutable_limits();
      const size_t client_kv_bytes = engine->options().sequences.client_kv_bytes;
      limits.set_client_kv_bytes(std::min(limits.client_kv_bytes(), uint64_t{client_kv_bytes}));
    }
    return absl::OkStatus();
  });
}

// All devices have the same limits, except client_kv_bytes.
void AttentionService::SetLimits(const Engine& engine, v1::Limits* limits) const {
  const Engine::Options& options = engine.options();
  limits->set_max_message_bytes(options_.max_message_bytes);
  limits->set_max_spans(options.max_spans);
  limits->set_max_heads(options.max_heads);
  for (const uint32_t head_dim : engine.limits().head_dims) limits->add_head_dims(head_dim);
  limits->set_max_queue_requests(options.batcher.max_queue_requests);
  limits->set_max_batch_requests(options.batcher.max_batch_requests);
  limits->set_max_batch_tokens(options.batcher.max_batch_tokens);
  limits->set_max_stream_inflight(options_.max_stream_inflight);
  limits->set_staging_memory_bytes(options.staging_memory_bytes);
  limits->set_client_staging_bytes(options.client_staging_bytes);
  const UnsentReplies::Options& unsent = context_->unsent.options();
  limits->set_unsent_reply_bytes(unsent.total_bytes);
  limits->set_client_unsent_reply_bytes(unsent.client_bytes);
  limits->set_reply_timeout_seconds(Seconds(unsent.timeout));
  limits->set_max_request_id_bytes(kMaxRequestIdBytes);
  limits->set_max_request_flop(options.max_request_flop);
  const SequenceStore::Options& sequences = options.sequences;
  limits->set_max_layers(sequences.max_layers);
  limits->set_max_page_bytes(sequences.superblock_bytes);
  limits->set_client_kv_bytes(sequences.client_kv_bytes);
  limits->set_client_sequences(sequences.client_sequences);
  limits->set_client_metadata_bytes(sequences.client_metadata_bytes);
  limits->set_sequence_idle_timeout_seconds(Seconds(sequences.idle_timeout));
  const SharedMemory::Options& memory = memory_.options();
  limits->set_shares_memory(memory.allowed);
  limits->set_shared_memory_bytes(memory.total_bytes);
  limits->set_client_shared_memory_bytes(memory.client_bytes);
  limits->set_client_shared_regions(memory.client_regions);
  limits->set_evicts(sequences.evict_lru);
  limits->set_max_connections(options_.max_connections);
  limits->set_max_connections_per_host(options_.max_connections_per_host);
  limits->set_max_connections_per_client(options_.max_connections_per_client);
  limits->set_max_connection_streams(options_.max_connection_streams);
}

grpc::ServerUnaryReactor* AttentionService::Answer(
    RpcMetrics* rpc, grpc::CallbackServerContext* call, const google::protobuf::Message* response,
    absl::FunctionRef<absl::Status(const Identity& caller)> body) {
  auto* reactor = new UnaryReactor(context_, rpc, call);
  const absl::StatusOr<Identity> caller = AdmitCaller(context_, *call);
  const absl::Status status = caller.ok() ? body(*caller) : caller.status();
  // gRPC keeps the message and its serialized form.
  const size_t bytes = status.ok() ? response->ByteSizeLong() + response->SpaceUsedLong() : 0;
  reactor->End(status, caller.ok() ? caller->name : "", bytes);
  return reactor;
}

}  // namespace flashcore::server

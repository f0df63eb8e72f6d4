#include "server/transport/rpc/attention_methods.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "server/transport/rpc/convert.h"

namespace flashcore::server {
namespace {

constexpr uint32_t kDefaultPageSize = 100;
constexpr uint32_t kMaxPageSize = 1000;

std::optional<uint64_t> Optional(bool has, uint64_t value) {
  return has ? std::optional<uint64_t>(value) : std::nullopt;
}

// Answers an RPC on one sequence: `body` takes its id, and returns its new state.
template <typename Response, typename Body>
absl::Status AnswerWithInfo(const Fleet& fleet, const std::string& sequence_id, Response* response,
                            const Body& body) {
  const absl::StatusOr<SequenceId> id = ToSequenceId(sequence_id);
  if (!id.ok()) return id.status();
  const absl::StatusOr<SequenceInfo> info = body(*id);
  if (info.ok()) {
    *response->mutable_sequence() = ToSequenceInfo(*info, fleet.DeviceIdOf(info->id));
  }
  return info.status();
}

}  // namespace

AttentionMethods::AttentionMethods(const Options& options, Fleet* fleet, RpcContext* context)
    : options_(options),
      fleet_(fleet),
      context_(context),
      memory_(options.shared_memory, &fleet->engines().front()->device(),
              &context->metrics->shared_memory_bytes, &context->metrics->shared_memory_regions),
      device_memory_(options.device_memory, fleet, &context->metrics->device_tensor_bytes,
                     &context->metrics->device_tensor_regions) {}

const google::protobuf::ServiceDescriptor& AttentionMethods::Service() {
  return *v1::AttendRequest::descriptor()->file()->FindServiceByName("AttentionService");
}

RpcMetrics* AttentionMethods::Rpc(const char* method, const char* transport) const {
  return context_->metrics->Rpc(Service().full_name(), method, transport);
}

absl::Status AttentionMethods::GetServerInfo(const Identity& /*client*/,
                                             const v1::GetServerInfoRequest& /*request*/,
                                             v1::GetServerInfoResponse* response) const {
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
}

// All devices have the same limits, except client_kv_bytes.
void AttentionMethods::SetLimits(const Engine& engine, v1::Limits* limits) const {
  const Engine::Options& options = engine.options();
  limits->set_max_message_bytes(options_.max_message_bytes);
  limits->set_max_spans(options.max_spans);
  for (const uint32_t head_dim : engine.limits().head_dims) limits->add_head_dims(head_dim);
  limits->set_max_queue_requests(options.batcher.max_queue_requests);
  limits->set_max_batch_requests(options.batcher.max_batch_requests);
  limits->set_max_batch_tokens(options.batcher.max_batch_tokens);
  limits->set_max_stream_inflight(options_.max_stream_inflight);
  limits->set_staging_memory_bytes(options.staging_memory_bytes);
  limits->set_client_staging_bytes(options.client_staging_bytes);
  const UnsentReplies::Options& unsent = context_->unsent.options();
  limits->set_unsent_reply_bytes(unsent.bytes.all);
  limits->set_client_unsent_reply_bytes(unsent.bytes.one);
  limits->set_reply_timeout_seconds(Seconds(unsent.timeout));
  limits->set_max_request_id_bytes(kMaxRequestIdBytes);
  limits->set_max_request_flop(options.max_request_flop);
  const SequenceStore::Options& sequences = options.sequences;
  limits->set_max_heads(sequences.max_heads);
  limits->set_max_layers(sequences.max_layers);
  limits->set_max_page_bytes(sequences.superblock_bytes);
  limits->set_client_kv_bytes(sequences.client_kv_bytes);
  limits->set_client_sequences(sequences.client_sequences);
  limits->set_client_metadata_bytes(sequences.client_metadata_bytes);
  limits->set_sequence_idle_timeout_seconds(Seconds(sequences.idle_timeout));
  const SharedMemory::Options& memory = memory_.options();
  limits->set_shared_memory_bytes(memory.total_bytes);
  limits->set_client_shared_memory_bytes(memory.client_bytes);
  limits->set_client_shared_regions(memory.client_regions);
  const DeviceMemory::Options& tensors = device_memory_.options();
  limits->set_device_tensor_bytes(tensors.total_bytes);
  limits->set_client_device_tensor_bytes(tensors.client_bytes);
  limits->set_client_device_tensor_regions(tensors.client_regions);
  limits->set_evicts(sequences.evict_lru);
  limits->set_max_connections(options_.max_connections);
  limits->set_max_connections_per_host(options_.max_connections_per_host);
  limits->set_max_connections_per_client(options_.max_connections_per_client);
  limits->set_max_connection_streams(options_.max_connection_streams);
  limits->set_max_connection_rings(options_.max_connection_rings);
  limits->set_max_sequence_operations(kMaxSequenceOperations);
}

absl::Status AttentionMethods::CreateSequence(const Identity& client,
                                              const v1::CreateSequenceRequest& request,
                                              v1::CreateSequenceResponse* response) const {
  SequenceShape shape;
  shape.num_layers = request.num_layers();
  shape.num_kv_heads = request.num_kv_heads();
  shape.head_dim = request.head_dim();
  absl::Status status = ToDType(request.dtype(), &shape.dtype);
  status.Update(ToKvDType(request.kv_dtype(), &shape.kv_dtype));
  if (!status.ok()) return status;
  const absl::StatusOr<SequenceSettings> settings = ToSettings(request);
  if (!settings.ok()) return settings.status();
  const auto info = fleet_->Create(shape, *settings, client, request.device_id());
  if (!info.ok()) return info.status();
  response->set_sequence_id(info->id.ToBytes());
  *response->mutable_sequence() = ToSequenceInfo(*info, fleet_->DeviceIdOf(info->id));
  return absl::OkStatus();
}

absl::Status AttentionMethods::ForkSequence(const Identity& client,
                                            const v1::ForkSequenceRequest& request,
                                            v1::ForkSequenceResponse* response) const {
  return AnswerWithInfo(
      *fleet_, request.sequence_id(), response, [&](SequenceId id) -> absl::StatusOr<SequenceInfo> {
        const absl::StatusOr<SequenceSettings> settings = ToSettings(request);
        if (!settings.ok()) return settings.status();
        auto info = fleet_->EngineOf(id).sequences().Fork(
            id, Optional(request.has_length(), request.length()), *settings, client);
        if (info.ok()) response->set_sequence_id(info->id.ToBytes());
        return info;
      });
}

absl::Status AttentionMethods::TruncateSequence(const Identity& client,
                                                const v1::TruncateSequenceRequest& request,
                                                v1::TruncateSequenceResponse* response) const {
  return AnswerWithInfo(*fleet_, request.sequence_id(), response, [&](SequenceId id) {
    return fleet_->EngineOf(id).sequences().Truncate(
        id, request.length(), Optional(request.has_expected_length(), request.expected_length()),
        client);
  });
}

absl::Status AttentionMethods::DeleteSequence(const Identity& client,
                                              const v1::DeleteSequenceRequest& request,
                                              v1::DeleteSequenceResponse* /*response*/) const {
  const absl::StatusOr<SequenceId> id = ToSequenceId(request.sequence_id());
  return id.ok() ? fleet_->EngineOf(*id).sequences().Delete(*id, client) : id.status();
}

absl::Status AttentionMethods::GetSequence(const Identity& client,
                                           const v1::GetSequenceRequest& request,
                                           v1::GetSequenceResponse* response) const {
  return AnswerWithInfo(*fleet_, request.sequence_id(), response, [&](SequenceId id) {
    return fleet_->EngineOf(id).sequences().Get(id, client);
  });
}

absl::Status AttentionMethods::ListSequences(const Identity& client,
                                             const v1::ListSequencesRequest& request,
                                             v1::ListSequencesResponse* response) const {
  if (request.page_size() > kMaxPageSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_size: ", request.page_size(), " is more than ", kMaxPageSize));
  }
  std::optional<uint64_t> after = 0;
  if (!request.page_token().empty()) after = page_tokens_.Parse(client.name, request.page_token());
  if (!after.has_value()) {
    return absl::InvalidArgumentError(
        "page_token: not a token that this server process gave to this client");
  }
  const uint32_t page_size = request.page_size() == 0 ? kDefaultPageSize : request.page_size();
  const Fleet::Listing listing = fleet_->List(client, *after, {page_size, kMaxInfoBytes});
  for (const SequenceInfo& info : listing.sequences) {
    *response->add_sequences() = ToSequenceInfo(info, fleet_->DeviceIdOf(info.id));
  }
  if (listing.next != 0) {
    response->set_next_page_token(page_tokens_.Make(client.name, listing.next));
  }
  return absl::OkStatus();
}

}  // namespace flashcore::server

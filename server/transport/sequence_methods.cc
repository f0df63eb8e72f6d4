// AttentionService: the RPCs on resident sequences.
#include <cstddef>
#include <optional>

#include "absl/strings/str_cat.h"
#include "server/transport/attention_service.h"
#include "server/transport/convert.h"
#include "server/transport/load_sequence.h"

namespace flashcore::server {
namespace {

constexpr uint32_t kDefaultPageSize = 100;
constexpr uint32_t kMaxPageSize = 1000;
constexpr size_t kMaxPageBytes = size_t{256} << 10;

std::optional<uint64_t> Optional(bool has, uint64_t value) {
  return has ? std::optional<uint64_t>(value) : std::nullopt;
}

}  // namespace

// As Answer, for an RPC on one sequence: `body` also takes its id, and returns its new state. The
// store's lock is never held while K/V bytes move.
template <typename Response, typename Body>
grpc::ServerUnaryReactor* AttentionService::AnswerWithInfo(RpcMetrics* rpc,
                                                           grpc::CallbackServerContext* call,
                                                           const std::string& sequence_id,
                                                           Response* response, const Body& body) {
  return Answer(rpc, call, response, [&](const Identity& identity) {
    const absl::StatusOr<SequenceId> id = ToSequenceId(sequence_id);
    if (!id.ok()) return id.status();
    const absl::StatusOr<SequenceInfo> info = body(*id, identity);
    if (info.ok()) {
      *response->mutable_sequence() = ToSequenceInfo(*info, fleet_->DeviceIdOf(info->id));
    }
    return info.status();
  });
}

grpc::ServerUnaryReactor* AttentionService::CreateSequence(grpc::CallbackServerContext* context,
                                                           const v1::CreateSequenceRequest* request,
                                                           v1::CreateSequenceResponse* response) {
  return Answer(create_sequence_, context, response, [&](const Identity& identity) -> absl::Status {
    SequenceShape shape;
    shape.num_layers = request->num_layers();
    shape.num_kv_heads = request->num_kv_heads();
    shape.head_dim = request->head_dim();
    if (absl::Status status = ToDType(request->dtype(), &shape.dtype); !status.ok()) return status;
    const absl::StatusOr<SequenceSettings> settings = ToSettings(*request);
    if (!settings.ok()) return settings.status();
    const auto info = fleet_->Create(shape, *settings, identity, request->device_id());
    if (!info.ok()) return info.status();
    response->set_sequence_id(info->id.ToBytes());
    *response->mutable_sequence() = ToSequenceInfo(*info, fleet_->DeviceIdOf(info->id));
    return absl::OkStatus();
  });
}

grpc::ServerReadReactor<grpc::ByteBuffer>* AttentionService::LoadSequence(
    grpc::CallbackServerContext* context, grpc::ByteBuffer* response) {
  return new LoadSequenceReactor(fleet_, context_, load_sequence_, &streams_, context,
                                 ToDeadline(context->deadline(), fleet_->clock()), response);
}

grpc::ServerUnaryReactor* AttentionService::ForkSequence(grpc::CallbackServerContext* context,
                                                         const v1::ForkSequenceRequest* request,
                                                         v1::ForkSequenceResponse* response) {
  return AnswerWithInfo(
      fork_sequence_, context, request->sequence_id(), response,
      [&](SequenceId id, const Identity& identity) -> absl::StatusOr<SequenceInfo> {
        const absl::StatusOr<SequenceSettings> settings = ToSettings(*request);
        if (!settings.ok()) return settings.status();
        auto info = fleet_->EngineOf(id).sequences().Fork(
            id, Optional(request->has_length(), request->length()), *settings, identity);
        if (info.ok()) response->set_sequence_id(info->id.ToBytes());
        return info;
      });
}

grpc::ServerUnaryReactor* AttentionService::TruncateSequence(
    grpc::CallbackServerContext* context, const v1::TruncateSequenceRequest* request,
    v1::TruncateSequenceResponse* response) {
  return AnswerWithInfo(truncate_sequence_, context, request->sequence_id(), response,
                        [&](SequenceId id, const Identity& identity) {
                          return fleet_->EngineOf(id).sequences().Truncate(
                              id, request->length(),
                              Optional(request->has_expected_length(), request->expected_length()),
                              identity);
                        });
}

grpc::ServerUnaryReactor* AttentionService::DeleteSequence(grpc::CallbackServerContext* context,
                                                           const v1::DeleteSequenceRequest* request,
                                                           v1::DeleteSequenceResponse* response) {
  return Answer(delete_sequence_, context, response, [&](const Identity& identity) {
    const absl::StatusOr<SequenceId> id = ToSequenceId(request->sequence_id());
    return id.ok() ? fleet_->EngineOf(*id).sequences().Delete(*id, identity) : id.status();
  });
}

grpc::ServerUnaryReactor* AttentionService::GetSequence(grpc::CallbackServerContext* context,
                                                        const v1::GetSequenceRequest* request,
                                                        v1::GetSequenceResponse* response) {
  return AnswerWithInfo(get_sequence_, context, request->sequence_id(), response,
                        [&](SequenceId id, const Identity& identity) {
                          return fleet_->EngineOf(id).sequences().Get(id, identity);
                        });
}

grpc::ServerUnaryReactor* AttentionService::ListSequences(grpc::CallbackServerContext* context,
                                                          const v1::ListSequencesRequest* request,
                                                          v1::ListSequencesResponse* response) {
  return Answer(list_sequences_, context, response, [&](const Identity& identity) -> absl::Status {
    if (request->page_size() > kMaxPageSize) {
      return absl::InvalidArgumentError(
          absl::StrCat("page_size: ", request->page_size(), " is more than ", kMaxPageSize));
    }
    std::optional<uint64_t> after = 0;
    if (!request->page_token().empty()) {
      after = page_tokens_.Parse(identity.name, request->page_token());
    }
    if (!after.has_value()) {
      return absl::InvalidArgumentError(
          "page_token: not a token that this server process gave to this client");
    }
    const uint32_t page_size = request->page_size() == 0 ? kDefaultPageSize : request->page_size();
    const Fleet::Listing listing = fleet_->List(identity, *after, {page_size, kMaxPageBytes});
    for (const SequenceInfo& info : listing.sequences) {
      *response->add_sequences() = ToSequenceInfo(info, fleet_->DeviceIdOf(info.id));
    }
    if (listing.next != 0) {
      response->set_next_page_token(page_tokens_.Make(identity.name, listing.next));
    }
    return absl::OkStatus();
  });
}

}  // namespace flashcore::server

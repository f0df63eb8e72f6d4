#include "server/transport/debug_service.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/wire.h"

namespace flashcore::server {
namespace {

constexpr size_t kMaxSmallFieldBytes = 1024;

// calloc's pages are committed on first use: an idle server pays nothing for a large maximum.
grpc::Slice ZeroSlice(size_t bytes) {
  void* memory = std::calloc(std::max<size_t>(bytes, 1), 1);
  return grpc::Slice(memory, bytes, std::free);
}

// A per-thread buffer of at least `bytes`, reused from request to request.
std::byte* WarmBuffer(size_t bytes) {
  thread_local std::vector<std::byte> buffer;
  if (buffer.size() < bytes) buffer.resize(bytes);
  return buffer.data();
}

}  // namespace

DebugService::DebugService(size_t max_reply_bytes, RpcContext* context)
    : context_(context),
      echo_(context->metrics->Rpc(v1::DebugService::service_full_name(), "Echo")),
      reply_(ZeroSlice(max_reply_bytes)) {}

std::vector<RpcMethod> DebugService::Methods() {
  return MethodsOf(*v1::EchoRequest::descriptor()->file()->FindServiceByName("DebugService"));
}

grpc::ServerUnaryReactor* DebugService::Echo(grpc::CallbackServerContext* /*context*/,
                                             const grpc::ByteBuffer* request,
                                             grpc::ByteBuffer* response) {
  auto* reactor = new UnaryReactor(context_, echo_);
  reactor->End(EchoOnce(*request, response));
  return reactor;
}

absl::Status DebugService::EchoOnce(const grpc::ByteBuffer& request, grpc::ByteBuffer* response) {
  wire::LargeField payload{v1::EchoRequest::kPayloadFieldNumber};
  std::string small;
  if (absl::Status status =
          wire::SplitMessage(request, kMaxSmallFieldBytes, absl::MakeSpan(&payload, 1), &small);
      !status.ok()) {
    return status;
  }
  v1::EchoRequest parsed;
  if (!parsed.ParseFromString(small)) return absl::InvalidArgumentError("message: malformed");
  if (parsed.reply_bytes() > reply_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("reply_bytes: ", parsed.reply_bytes(),
                                                   " is more than the limit of ", reply_.size()));
  }
  wire::CopyField(request, payload, WarmBuffer(payload.size));
  const grpc::Slice slices[2] = {
      grpc::Slice(wire::FieldHeader(v1::EchoResponse::kPayloadFieldNumber, parsed.reply_bytes())),
      reply_.sub(0, parsed.reply_bytes())};
  *response = grpc::ByteBuffer(slices, 2);
  return absl::OkStatus();
}

}  // namespace flashcore::server

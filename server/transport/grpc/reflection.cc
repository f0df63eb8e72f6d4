#include "server/transport/grpc/reflection.h"

#include <set>
#include <utility>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"
#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "grpcpp/support/server_callback.h"
#include "proto/grpc/grpc_compat.h"
#include "server/transport/grpc/unary_reactor.h"
#include "server/transport/rpc/convert.h"

namespace flashcore::server {
namespace {

using google::protobuf::DescriptorPool;
using grpc::reflection::v1::ServerReflectionRequest;
using grpc::reflection::v1::ServerReflectionResponse;

void SetError(const std::string& message, ServerReflectionResponse* response) {
  response->mutable_error_response()->set_error_code(grpc::StatusCode::NOT_FOUND);
  response->mutable_error_response()->set_error_message(message);
}

// `file`, unless it is in `seen`, then the files that it imports.
void AddFiles(const google::protobuf::FileDescriptor& file,
              std::set<const google::protobuf::FileDescriptor*>* seen,
              grpc::reflection::v1::FileDescriptorResponse* response) {
  if (!seen->insert(&file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file.CopyTo(&proto);
  response->add_file_descriptor_proto(proto.SerializeAsString());
  for (int i = 0; i < file.dependency_count(); ++i) AddFiles(*file.dependency(i), seen, response);
}

void SetFile(const google::protobuf::FileDescriptor* file, ServerReflectionResponse* response) {
  if (file == nullptr) return SetError("not found", response);
  std::set<const google::protobuf::FileDescriptor*> seen;
  AddFiles(*file, &seen, response->mutable_file_descriptor_response());
}

void Answer(const ServerReflectionRequest& request, const std::vector<std::string>& services,
            ServerReflectionResponse* response) {
  response->Clear();
  response->set_valid_host(request.host());
  *response->mutable_original_request() = request;
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  switch (request.message_request_case()) {
    case ServerReflectionRequest::kListServices:
      for (const std::string& name : services) {
        response->mutable_list_services_response()->add_service()->set_name(name);
      }
      return;
    case ServerReflectionRequest::kFileByFilename:
      return SetFile(pool.FindFileByName(request.file_by_filename()), response);
    case ServerReflectionRequest::kFileContainingSymbol:
      return SetFile(pool.FindFileContainingSymbol(request.file_containing_symbol()), response);
    case ServerReflectionRequest::kAllExtensionNumbersOfType:
      // No message of ours has extensions.
      if (pool.FindMessageTypeByName(request.all_extension_numbers_of_type()) == nullptr) {
        return SetError("not found", response);
      }
      response->mutable_all_extension_numbers_response()->set_base_type_name(
          request.all_extension_numbers_of_type());
      return;
    default:
      return SetError("not found", response);
  }
}

// Reads a request, writes its answer, reads the next. Deletes itself when the RPC has ended.
class ReflectionReactor final
    : public grpc::ServerBidiReactor<ServerReflectionRequest, ServerReflectionResponse> {
 public:
  ReflectionReactor(const std::vector<std::string>* services, const RpcContext* context,
                    const grpc::ServerContextBase& call)
      : services_(services),
        authenticator_(&context->authenticator),
        call_(context->client_connections->Find(call.peer()), context->clock) {
    if (call_.connection() == nullptr) {
      Finish(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the connection has ended"));
      return;
    }
    absl::StatusOr<Identity> identity =
        authenticator_->Identify(GrpcClaims(&call), call_.connection()->peer());
    if (!identity.ok()) {
      Finish(ToGrpcStatus(identity.status()));
      return;
    }
    identity_ = *std::move(identity);
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    // Not ok: the client has half-closed, or is gone.
    const absl::Status status = ok ? authenticator_->CheckStillValid(identity_) : absl::OkStatus();
    if (!ok || !status.ok()) {
      Finish(ToGrpcStatus(status));
      return;
    }
    Answer(request_, *services_, &response_);
    StartWrite(&response_);
  }
  void OnWriteDone(bool ok) override {
    if (ok) {
      StartRead(&request_);
    } else {
      Finish(grpc::Status::CANCELLED);
    }
  }
  void OnDone() override { delete this; }

 private:
  const std::vector<std::string>* const services_;
  const Authenticator* const authenticator_;
  const ConnectionCall call_;
  Identity identity_;
  ServerReflectionRequest request_;
  ServerReflectionResponse response_;
};

// `Service` of either package. It reads and writes the messages of v1: those of v1alpha are the
// same bytes.
template <typename Service>
class Reflects final : public Service {
 public:
  Reflects(const std::vector<std::string>* services, const RpcContext* context) {
    const auto open = [=](grpc::CallbackServerContext* call) {
      return new ReflectionReactor(services, context, *call);
    };
    this->MarkMethodCallback(
        0, new grpc_compat::BidiStreamHandler<ServerReflectionRequest, ServerReflectionResponse>(
               open));
  }
};

}  // namespace

Reflection::Reflection(std::vector<std::string> services, const RpcContext* context)
    : names_(std::move(services)),
      v1_(std::make_unique<Reflects<grpc::reflection::v1::ServerReflection::Service>>(&names_,
                                                                                      context)),
      v1alpha_(std::make_unique<Reflects<grpc::reflection::v1alpha::ServerReflection::Service>>(
          &names_, context)) {}

}  // namespace flashcore::server

// grpc.reflection.v1alpha: tells clients such as grpcurl which services and messages there are.
//
// gRPC's own implementation blocks a thread for each stream and asks nobody who calls.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_REFLECTION_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_REFLECTION_H_

#include <string>
#include <utility>
#include <vector>

#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/transport/access/authenticator.h"

namespace flashcore::server {

using ReflectionBase =
    grpc::reflection::v1alpha::ServerReflection::WithCallbackMethod_ServerReflectionInfo<
        grpc::reflection::v1alpha::ServerReflection::Service>;

// Thread-safe. Outlives its RPCs.
class ReflectionService final : public ReflectionBase {
 public:
  // Lists `services`, by their full names. The authenticator outlives this.
  ReflectionService(std::vector<std::string> services, const Authenticator* authenticator)
      : services_(std::move(services)), authenticator_(authenticator) {}

  grpc::ServerBidiReactor<grpc::reflection::v1alpha::ServerReflectionRequest,
                          grpc::reflection::v1alpha::ServerReflectionResponse>*
  ServerReflectionInfo(grpc::CallbackServerContext* context) override;

 private:
  const std::vector<std::string> services_;
  const Authenticator* const authenticator_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_REFLECTION_H_

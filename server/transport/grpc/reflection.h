// gRPC reflection: tells clients such as grpcurl which services and messages there are.
//
// gRPC's own implementation blocks a thread for each stream and asks nobody who calls.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_REFLECTION_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_REFLECTION_H_

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "grpcpp/impl/service_type.h"
#include "server/transport/rpc/rpc_scope.h"

namespace flashcore::server {

// The services ServerReflection of grpc.reflection.v1 and v1alpha. Thread-safe. Outlives its RPCs.
class Reflection {
 public:
  // Lists `services`, by their full names. The context outlives this.
  Reflection(std::vector<std::string> services, const RpcContext* context);

  // To be registered.
  std::array<grpc::Service*, 2> services() const { return {v1_.get(), v1alpha_.get()}; }

 private:
  const std::vector<std::string> names_;
  const std::unique_ptr<grpc::Service> v1_;
  const std::unique_ptr<grpc::Service> v1alpha_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_REFLECTION_H_

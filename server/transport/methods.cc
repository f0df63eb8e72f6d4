#include "server/transport/methods.h"

namespace flashcore::server {
namespace {

const char* TypeOf(const google::protobuf::MethodDescriptor& method) {
  if (method.client_streaming()) return method.server_streaming() ? "bidi_stream" : "client_stream";
  return method.server_streaming() ? "server_stream" : "unary";
}

}  // namespace

std::vector<RpcMethod> MethodsOf(const google::protobuf::ServiceDescriptor& service) {
  std::vector<RpcMethod> methods;
  for (int i = 0; i < service.method_count(); ++i) {
    const google::protobuf::MethodDescriptor& method = *service.method(i);
    methods.push_back({service.full_name(), method.name(), TypeOf(method)});
  }
  return methods;
}

}  // namespace flashcore::server

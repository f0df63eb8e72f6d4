#ifndef FLASHCORE_SERVER_TRANSPORT_METHODS_H_
#define FLASHCORE_SERVER_TRANSPORT_METHODS_H_

#include <vector>

#include "google/protobuf/descriptor.h"
#include "server/telemetry/metrics.h"

namespace flashcore::server {

// The methods of a service as the metrics name them.
std::vector<RpcMethod> MethodsOf(const google::protobuf::ServiceDescriptor& service);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_METHODS_H_

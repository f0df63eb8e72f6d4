// Statuses with an ErrorInfo, as the server sends them, for the client's tests.
#ifndef FLASHCORE_TESTS_CLIENT_ERROR_STATUS_H_
#define FLASHCORE_TESTS_CLIENT_ERROR_STATUS_H_

#include <string>

#include "absl/status/status.h"
#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/status.h"

namespace flashcore {

inline v1::Status StatusWithInfo(absl::StatusCode code, const std::string& reason,
                                 const std::string& key, const std::string& value) {
  v1::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("flashcore");
  (*info.mutable_metadata())[key] = value;
  v1::Status status;
  status.set_code(static_cast<int>(code));
  status.set_message("text");
  v1::StatusDetail* const detail = status.add_details();
  detail->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  detail->set_value(info.SerializeAsString());
  return status;
}

// As the status of an RPC.
inline grpc::Status ToGrpc(const v1::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), status.message(),
                      status.SerializeAsString());
}

}  // namespace flashcore

#endif  // FLASHCORE_TESTS_CLIENT_ERROR_STATUS_H_

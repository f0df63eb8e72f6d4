#include "flashcore/error_info.h"

#include "absl/strings/cord.h"
#include "client/cpp/status.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore {

ErrorInfo GetErrorInfo(const absl::Status& status) {
  const auto payload = status.GetPayload(client::kErrorInfoType);
  v1::ErrorInfo info;
  if (!payload.has_value() || !info.ParseFromString(std::string(*payload))) return {};
  return {info.reason(), {info.metadata().begin(), info.metadata().end()}};
}

}  // namespace flashcore

#include "flashcore/error_info.h"

#include "absl/strings/cord.h"
#include "absl/types/optional.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore {

ErrorInfo GetErrorInfo(const absl::Status& status) {
  ErrorInfo info;
  const absl::optional<absl::Cord> detail =
      status.GetPayload("type.googleapis.com/google.rpc.ErrorInfo");
  v1::ErrorInfo message;
  if (!detail.has_value() || !message.ParseFromString(std::string(*detail))) return info;
  if (message.domain() != "flashcore") return info;  // a proxy's
  info.reason = message.reason();
  info.metadata.insert(message.metadata().begin(), message.metadata().end());
  return info;
}

}  // namespace flashcore

#include "client/cpp/grpc_status.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cpp/status.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore::client {
namespace {

// Whether gRPC says that a server took the connection and closed it before HTTP/2 began, as it does
// when it expects TLS and gets plaintext, or the reverse.
bool ClosedWhileConnecting(absl::string_view message) {
  if (!absl::StartsWith(message, "failed to connect to all addresses")) return false;
  for (const char* sign : {"Socket closed", "Connection reset by peer", "Handshake read failed",
                           "wrong version number", "packet length too long"}) {
    if (absl::StrContains(message, sign)) return true;
  }
  return false;
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  v1::Status message;
  if (!message.ParseFromString(status.error_details())) message.Clear();  // a proxy's
  message.set_code(static_cast<int>(status.error_code()));
  message.set_message(status.error_message());
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE &&
      ClosedWhileConnecting(message.message())) {
    absl::StrAppend(message.mutable_message(), "; does one side use TLS and the other not?");
  }
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED &&
      message.message() == "Deadline Exceeded") {  // of this client's gRPC
    message.set_message(kNoAnswer);
  }
  // The message is from this client's gRPC, from a proxy, or from a server that does not say it
  // itself.
  if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
      absl::StrContains(message.message(), "message larger than max")) {
    absl::StrAppend(message.mutable_message(),
                    "; limits are max_message_bytes of the client, --max_message_bytes of the ",
                    "server, and those of proxies; load long K/V with Sequence::Append");
  }
  return FromMessage(message);
}

}  // namespace flashcore::client

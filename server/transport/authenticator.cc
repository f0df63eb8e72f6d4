#include "server/transport/authenticator.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace flashcore::server {
namespace {

constexpr char kMetadataKey[] = "flashcore-client";
constexpr size_t kMaxNameBytes = 64;

}  // namespace

absl::StatusOr<Identity> Authenticator::Identify(const grpc::ServerContextBase& context) const {
  // "ipv4:10.0.0.1:4711" without its port; every Unix socket is "unix".
  const std::string peer = context.peer();
  Identity identity;
  identity.name = IsLocal(context) ? "unix" : peer.substr(0, peer.rfind(':'));
  const auto metadata = context.client_metadata().find(kMetadataKey);
  if (metadata == context.client_metadata().end()) return identity;
  const absl::string_view name(metadata->second.data(), metadata->second.size());
  if (name.size() > kMaxNameBytes || !std::all_of(name.begin(), name.end(), [](unsigned char c) {
        return absl::ascii_isprint(c);
      })) {
    return absl::InvalidArgumentError(absl::StrCat("metadata ", kMetadataKey, ": want at most ",
                                                   kMaxNameBytes, " bytes of printable ASCII"));
  }
  absl::StrAppend(&identity.name, "/", name);
  return identity;
}

bool IsLocal(const grpc::ServerContextBase& context) {
  return absl::StartsWith(context.peer(), "unix");
}

}  // namespace flashcore::server

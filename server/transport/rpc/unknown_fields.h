// Refuses requests with fields that this server does not know. A client that sets a newer field
// means something by it: to ignore it would give another result than was asked for.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_UNKNOWN_FIELDS_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_UNKNOWN_FIELDS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"

namespace flashcore::server {

// UNIMPLEMENTED if `message`, or a message in it, has a field that its type does not, also one that
// the type reserves. Allocates nothing if there is none.
absl::Status CheckKnownFields(const google::protobuf::Message& message);

// That error, for the field `number` of a message of `type`.
absl::Status UnknownField(absl::string_view type, int number);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_UNKNOWN_FIELDS_H_

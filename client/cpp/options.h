// What a Client and its calls are told. Plain data.
#ifndef FLASHCORE_CLIENT_CPP_OPTIONS_H_
#define FLASHCORE_CLIENT_CPP_OPTIONS_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "client/cpp/retry.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

namespace flashcore {

struct ClientOptions {
  // Who this is, to the server: quotas, fairness and ListSequences go by address and name. At most
  // 64 bytes of printable ASCII; empty: the address alone.
  std::string name;
  // Deadline of every call that is given none, from its start, retries included.
  absl::Duration timeout = absl::Seconds(30);
  // Of one message, either way, in bytes; protobuf allows no more than 2^31 - 1.
  size_t max_message_bytes = size_t{1} << 30;
  RetryPolicy retry;
  std::shared_ptr<grpc::ChannelCredentials> credentials;  // null: plaintext
  grpc::ChannelArguments channel_arguments;  // what is set here wins over our own defaults
};

struct CallOptions {
  // Unset: ClientOptions::timeout from now. absl::InfiniteFuture(): none.
  std::optional<absl::Time> deadline;
  // For a proxy before several servers: calls of equal affinity reach the same one. Sent as the
  // metadata `x-flashcore-sequence`, what is not printable ASCII escaped as in C (\xc3, \n);
  // empty: not sent, and any server may answer. Operations of a Sequence send the sequence's
  // instead.
  std::string affinity;
};

}  // namespace flashcore

#endif  // FLASHCORE_CLIENT_CPP_OPTIONS_H_

// Options of a Client and of its calls. Plain data.
#ifndef FLASHCORE_OPTIONS_H_
#define FLASHCORE_OPTIONS_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

namespace flashcore {

// UNAVAILABLE is retried until the call's deadline: any call that reached no server, and calls that
// are safe to repeat:
//   Attend           if AttendRequest::SafeToRepeat. With inline K/V nothing changes on the server.
//                    With expected_length, if an append took effect but its reply was lost, the
//                    retry is FAILED_PRECONDITION
//   sequences        Truncate (with expected_length, as Attend), Delete, Info, ListSequences;
//                    CreateSequence, Fork and Append are sent once; so is ManageSequences with a
//                    Create or Fork
//   GetServerInfo    always
// AttendStream and CheckHealth are never retried. Without retries, too, a call finds a server that
// is back within 1.5 s.
struct RetryPolicy {
  int max_attempts = 0;  // 1: no retries; 0: as many as the deadline allows
  // Wait before attempt n + 1: uniform in [1/2, 1] of min(initial * 2^(n-1), max). Over gRPC it
  // ends early when a connection is there again.
  absl::Duration initial_backoff = absl::Milliseconds(50);
  absl::Duration max_backoff = absl::Milliseconds(500);
};

// TLS 1.2 or 1.3. The files are PEM and are read again every few seconds, for new connections.
struct TlsOptions {
  std::string ca_file = {};      // that the server's certificate must be of; empty: the system's
  std::string cert_file = {};    // of this client, then those that lead to its CA; empty: none
  std::string key_file = {};     // of cert_file, without a password
  std::string server_name = {};  // that the server's certificate is for; empty: the target's host
};

struct ClientOptions {
  // Name of this client, for servers with --insecure_client_names: it identifies a client without a
  // token and a certificate. At most 64 bytes of printable ASCII; empty: none.
  std::string name;
  // Deadline of every call without its own, from its start, retries included.
  absl::Duration timeout = absl::Seconds(30);
  // Most bytes of one message, sent or received; protobuf allows at most 2^31 - 1.
  size_t max_message_bytes = size_t{1} << 30;
  RetryPolicy retry;
  // TLS to TCP addresses; Unix sockets are plaintext, and local targets refuse it. None: plaintext.
  std::optional<TlsOptions> tls;
  // File whose first line is the bearer token of every call. Read again at most once a second.
  // Without TLS, only for Unix sockets and loopback addresses; not for local targets. Empty: none.
  std::string token_file;
  // Connects through the proxy of $grpc_proxy, $https_proxy or $http_proxy, except to what
  // $no_grpc_proxy or $no_proxy name. Needs tls. Unix sockets and loopback addresses never take a
  // proxy. False: no proxy, whatever the environment says.
  bool http_proxy = false;
  // In place of tls, token_file and http_proxy.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  // The server deletes the sequences that this client creates or forks when it is gone: when the
  // Client and all that it made (Sequence, SharedMemory, streams) are destroyed, when the process
  // dies, and when the connection ends. A host that vanished from the network is gone after 80 s.
  // Without it, sequences stay until Delete or their idle_timeout. Takes one of
  // limits.max_connection_streams. UNIMPLEMENTED if the server has no leases.
  bool lease = false;
  // For a local target: how long a thread that waits for an answer polls before it sleeps. Polling
  // saves the time of a wake-up, and takes a core for that long.
  absl::Duration local_spin = absl::Microseconds(50);
  grpc::ChannelArguments channel_arguments;  // override the client's defaults
};

// Sets what is unset of tls and token_file from the environment: FLASHCORE_CLIENT_TLS_CA_FILE,
// _TLS_CERT_FILE, _TLS_KEY_FILE, _TLS_SERVER_NAME and _TOKEN_FILE. Says once on stderr which other
// FLASHCORE_CLIENT_ variables are set.
void ReadEnvironment(ClientOptions* options);

struct CallOptions {
  // Unset: ClientOptions::timeout from now. absl::InfiniteFuture(): none.
  std::optional<absl::Time> deadline;
  // For a proxy in front of several servers: calls of equal affinity reach the same one. Sent as
  // the metadata `x-flashcore-sequence`, with C escapes (\xc3, \n) for what is not printable
  // ASCII. Empty: not sent, and any server may reply. Operations of a Sequence send the affinity of
  // the sequence instead.
  std::string affinity;
};

}  // namespace flashcore

#endif  // FLASHCORE_OPTIONS_H_

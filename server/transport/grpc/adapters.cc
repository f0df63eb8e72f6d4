#include "server/transport/grpc/adapters.h"

#include <grpc/grpc_security.h>
#include <grpc/grpc_security_constants.h>
#include <malloc.h>

#include <chrono>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "grpcpp/alarm.h"
#include "grpcpp/security/auth_context.h"
#include "grpcpp/support/slice.h"
#include "proto/grpc/grpc_compat.h"
#include "proto/grpc/message_view.h"
#include "server/base/mutex.h"
#include "server/transport/rpc/convert.h"

namespace flashcore::server {
namespace {

// The heap retains freed memory. From this message size on, returning it to the system costs little
// compared to receiving the message, and a few large messages do not grow the process for good.
constexpr size_t kTrimBytes = 8 << 20;

class GrpcAlarm final : public Alarm {
 public:
  void Set(Nanoseconds delay, std::function<void()> callback) override {
    alarm_.Set(std::chrono::system_clock::now() + delay,
               [callback = std::move(callback)](bool /*expired*/) { callback(); });
  }
  void Cancel() override { alarm_.Cancel(); }

 private:
  grpc::Alarm alarm_;
};

// Handshakes begin on several threads. Right after each call of Fetch, gRPC 1.51 replaces what it
// has made of the certificates, or begins to use it, without a lock around both. So a replacement
// waits this long for the handshakes before it, and those after it wait this long for it.
constexpr std::chrono::milliseconds kReplaceTime(100);

// State for gRPC's callback for one address.
struct Fetcher {
  std::shared_ptr<const TlsCertificates> certificates;
  Mutex mutex;
  uint64_t version ABSL_GUARDED_BY(mutex) = 0;  // that gRPC has
  // When a replacement that was handed to gRPC is over.
  std::chrono::steady_clock::time_point replaced ABSL_GUARDED_BY(mutex);
};

grpc_ssl_certificate_config_reload_status Fetch(void* data,
                                                grpc_ssl_server_certificate_config** config) {
  auto* fetcher = static_cast<Fetcher*>(data);
  TlsMaterial material;
  MutexLock lock(&fetcher->mutex);
  std::this_thread::sleep_until(fetcher->replaced);  // with the lock: others wait, too
  const bool first = fetcher->version == 0;
  if (!fetcher->certificates->Get(&fetcher->version, &material)) {
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
  }
  if (!first) {
    std::this_thread::sleep_for(kReplaceTime);
    fetcher->replaced = std::chrono::steady_clock::now() + kReplaceTime;
  }
  const grpc_ssl_pem_key_cert_pair pair = {material.private_key.c_str(),
                                           material.cert_chain.c_str()};
  // gRPC wants some CA even if clients are not asked for a certificate. It is then not used.
  const std::string& ca = material.client_ca.empty() ? material.cert_chain : material.client_ca;
  *config = grpc_ssl_server_certificate_config_create(ca.c_str(), &pair, 1);
  return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
}

const char* PropertyOf(CallerClaims::CertificateName kind) {
  switch (kind) {
    case CallerClaims::CertificateName::kUri:
      return GRPC_PEER_URI_PROPERTY_NAME;
    case CallerClaims::CertificateName::kDns:
      return GRPC_PEER_DNS_PROPERTY_NAME;
    case CallerClaims::CertificateName::kCommon:
      return GRPC_X509_CN_PROPERTY_NAME;
  }
  return "";
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  const v1::Status message = ToStatus(status);
  // The two enumerations have the same values. gRPC sends details, unless they are empty, as
  // grpc-status-details-bin.
  return grpc::Status(static_cast<grpc::StatusCode>(message.code()), message.message(),
                      message.details().empty() ? "" : message.SerializeAsString());
}

RequestMessage ToRequestMessage(const grpc::ByteBuffer* message) {
  return {wire::ViewOf(*message), [message] { ReleaseMessage(message); }};
}

void ReleaseMessage(const grpc::ByteBuffer* message) {
  const bool trim = message->Length() >= kTrimBytes;
  const_cast<grpc::ByteBuffer*>(message)->Clear();
  if (trim) malloc_trim(0);
}

grpc::ByteBuffer ToByteBuffer(const std::string& message) {
  const grpc::Slice slice(message);
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer ToByteBuffer(EncodedReply reply) {
  grpc::Slice slices[4];
  size_t count = 0;
  auto* memory = new StagingBuffer(std::move(reply.staging));
  const grpc::Slice staging(
      memory->data(), memory->capacity(),
      [](void* buffer) { delete static_cast<StagingBuffer*>(buffer); }, memory);
  for (const EncodedReply::Piece& piece : reply.pieces) {
    if (!piece.bytes.empty()) slices[count++] = grpc::Slice(piece.bytes);
    if (piece.staged > 0) slices[count++] = staging.sub(piece.offset, piece.offset + piece.staged);
  }
  return grpc::ByteBuffer(slices, count);
}

std::unique_ptr<Alarm> MakeGrpcAlarm() { return std::make_unique<GrpcAlarm>(); }

UnsentReply::OnCutOff CancelRpc(grpc::ServerContextBase* call, ClientConnection* connection) {
  return [call, connection](CutOff why, bool again) {
    // In a drain its client sees UNAVAILABLE. TryCancel would say CANCELLED, which no client
    // repeats.
    if (connection != nullptr && (again || why == CutOff::kDrain)) {
      connection->Break();
    } else if (!again) {
      call->TryCancel();
    }
  };
}

CallerClaims::Values GrpcClaims::Metadata(const char* key) const {
  Values values;
  const auto [begin, end] = call_.client_metadata().equal_range(key);
  for (auto it = begin; it != end; ++it) {
    values.emplace_back(it->second.data(), it->second.size());
  }
  return values;
}

std::string GrpcClaims::NameInCertificate(CertificateName kind) const {
  const std::shared_ptr<const grpc::AuthContext> auth = call_.auth_context();
  if (auth == nullptr || !auth->IsPeerAuthenticated()) return "";
  const std::vector<grpc::string_ref> values = auth->FindPropertyValues(PropertyOf(kind));
  return values.empty() ? "" : std::string(values.front().data(), values.front().size());
}

absl::StatusOr<Identity> AdmitClient(RpcContext* context, const grpc::ServerContextBase& call,
                                     const ClientConnection* connection) {
  if (absl::Status status = CheckNotDraining(*context); !status.ok()) return status;
  if (connection == nullptr) return absl::UnavailableError("the connection has ended");
  absl::StatusOr<Identity> client =
      context->authenticator.Identify(GrpcClaims(&call), connection->peer());
  if (!client.ok()) return client;
  absl::Status status = context->client_connections->Use(*connection, client->name);
  if (!status.ok()) {
    context->metrics->CountRefusedConnection(RefusedConnection::kMaxConnectionsPerClient);
    return status;
  }
  status = context->unsent.Check(client->name);
  if (!status.ok()) return status;
  return client;
}

std::shared_ptr<grpc::ServerCredentials> MakeTlsCredentials(
    std::shared_ptr<const TlsCertificates> certificates) {
  uint64_t version = 0;
  TlsMaterial material;
  certificates->Get(&version, &material);
  auto fetcher = std::make_shared<Fetcher>();
  fetcher->certificates = std::move(certificates);
  grpc_server_credentials* credentials = grpc_ssl_server_credentials_create_with_options(
      grpc_ssl_server_credentials_create_options_using_config_fetcher(
          material.client_ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                     : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY,
          Fetch, fetcher.get()));
  return grpc_compat::WrapServerCredentials(credentials, std::move(fetcher));
}

}  // namespace flashcore::server

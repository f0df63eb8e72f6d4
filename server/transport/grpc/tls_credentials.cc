#include "server/transport/grpc/tls_credentials.h"

#include <grpc/grpc_security.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "proto/wire/grpc_compat.h"
#include "server/base/mutex.h"

namespace flashcore::server {
namespace {

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

}  // namespace

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

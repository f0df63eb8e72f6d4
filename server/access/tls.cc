#include "server/access/tls.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <ctime>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/telemetry/credential_file.h"

namespace flashcore::server {
namespace {

template <typename T, void (*Free)(T*)>
struct Deleter {
  void operator()(T* object) const { Free(object); }
};
struct BioDeleter {
  void operator()(BIO* bio) const { BIO_free(bio); }
};
using Bio = std::unique_ptr<BIO, BioDeleter>;
using Certificate = std::unique_ptr<X509, Deleter<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Deleter<EVP_PKEY, EVP_PKEY_free>>;
using Context = std::unique_ptr<SSL_CTX, Deleter<SSL_CTX, SSL_CTX_free>>;

// The reason of OpenSSL's last error, such as "ee key too small".
std::string LastReason() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return reason == nullptr ? "unknown" : reason;
}

Bio Open(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// Whether the text ends in the middle of a BEGIN or END line, which OpenSSL may take for a comment.
bool EndsInAMarker(absl::string_view pem) {
  const absl::string_view text = absl::StripAsciiWhitespace(pem);
  const absl::string_view line = text.substr(text.rfind('\n') + 1);
  return absl::StartsWith(line, "-") &&
         !(absl::StartsWith(line, "-----END ") && absl::EndsWith(line, "-----"));
}

// The first certificate of a file in which all are well-formed; null if there is none.
Certificate ReadCertificates(const std::string& pem) {
  if (EndsInAMarker(pem)) return nullptr;
  const Bio bio = Open(pem);
  Certificate first(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
  if (first == nullptr) return nullptr;
  while (Certificate next{PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)}) {
  }
  // Reading ends with "no start line" at the end of the file, with others in a broken one.
  const bool ended = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  return ended ? std::move(first) : nullptr;
}

constexpr char kNoCertificate[] = "no certificate in PEM, or one that is cut off";

// An encrypted key is not read: nobody could be asked for the password.
Key ReadKey(const std::string& pem) {
  const auto no_password = [](char*, int, int, void*) { return -1; };
  Key key(PEM_read_bio_PrivateKey(Open(pem).get(), nullptr, no_password, nullptr));
  ERR_clear_error();
  return key;
}

absl::Time Expiry(const X509& certificate) {
  std::tm tm = {};
  if (ASN1_TIME_to_tm(X509_get0_notAfter(&certificate), &tm) != 1) return absl::InfiniteFuture();
  return absl::FromTM(tm, absl::UTCTimeZone());
}

}  // namespace

absl::StatusOr<TlsMaterial> TlsMaterial::Load(const TlsOptions& options) {
  const CredentialFile cert_file{"--tls_cert_file", options.cert_file};
  const CredentialFile key_file{"--tls_key_file", options.key_file};
  const CredentialFile client_ca_file{"--tls_client_ca_file", options.client_ca_file};
  TlsMaterial material;
  for (const auto& [file, content] :
       {std::pair(&cert_file, &material.cert_chain), std::pair(&key_file, &material.private_key),
        std::pair(&client_ca_file, &material.client_ca)}) {
    if (file == &client_ca_file && file->path.empty()) continue;
    absl::StatusOr<std::string> read = file->Read();
    if (!read.ok()) return read.status();
    *content = *std::move(read);
  }
  const Certificate certificate = ReadCertificates(material.cert_chain);
  if (certificate == nullptr) return cert_file.Error(kNoCertificate);
  const Key key = ReadKey(material.private_key);
  if (key == nullptr) return key_file.Error("no private key in PEM without a password");
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    ERR_clear_error();
    return key_file.Error(
        absl::StrCat("not the key of the first certificate in ", options.cert_file));
  }
  // gRPC does the same at the first handshake, too late: all of them would fail.
  const Context context(SSL_CTX_new(TLS_server_method()));
  if (SSL_CTX_use_certificate(context.get(), certificate.get()) != 1) {
    return cert_file.Error(absl::StrCat("OpenSSL does not serve with it: ", LastReason()));
  }
  if (SSL_CTX_use_PrivateKey(context.get(), key.get()) != 1) {
    return key_file.Error(absl::StrCat("OpenSSL does not serve with it: ", LastReason()));
  }
  if (!options.client_ca_file.empty() && ReadCertificates(material.client_ca) == nullptr) {
    return client_ca_file.Error(kNoCertificate);
  }
  material.expiry = Expiry(*certificate);
  return material;
}

void TlsCertificates::Replace(TlsMaterial material) {
  MutexLock lock(&mutex_);
  material_ = std::move(material);
  ++version_;
}

bool TlsCertificates::Get(uint64_t* version, TlsMaterial* material) const {
  MutexLock lock(&mutex_);
  if (*version == version_) return false;
  *version = version_;
  *material = material_;
  return true;
}

}  // namespace flashcore::server

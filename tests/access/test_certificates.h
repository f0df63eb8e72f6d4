// Certificates for tests, made with OpenSSL.
#ifndef FLASHCORE_TESTS_ACCESS_TEST_CERTIFICATES_H_
#define FLASHCORE_TESTS_ACCESS_TEST_CERTIFICATES_H_

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <openssl/x509.h>

#include <memory>
#include <string>

namespace flashcore::server::testing {

// In PEM.
struct CertificateAndKey {
  std::string certificate, key;
};

// The text that `write` writes.
template <typename Write>
std::string ToPem(const Write& write) {
  const std::unique_ptr<BIO, int (*)(BIO*)> bio(BIO_new(BIO_s_mem()), BIO_free);
  write(bio.get());
  char* text = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &text);
  return {text, static_cast<size_t>(size)};
}

// A certificate for "localhost", signed by its own key, that lasts for a day.
inline CertificateAndKey SelfSigned(EVP_PKEY* made) {
  const std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> key(made, EVP_PKEY_free);
  const std::unique_ptr<X509, void (*)(X509*)> certificate(X509_new(), X509_free);
  X509_set_version(certificate.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), -60);
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), 24 * 60 * 60);
  X509_NAME* const name = X509_get_subject_name(certificate.get());
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>("localhost"), -1, -1, 0);
  X509_set_issuer_name(certificate.get(), name);
  X509_set_pubkey(certificate.get(), key.get());
  X509_sign(certificate.get(), key.get(), EVP_sha256());
  return {ToPem([&](BIO* bio) { PEM_write_bio_X509(bio, certificate.get()); }),
          ToPem([&](BIO* bio) {
            PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
          })};
}

inline CertificateAndKey NewCertificate() { return SelfSigned(EVP_EC_gen("P-256")); }

// With a key that OpenSSL thinks too short for TLS.
inline CertificateAndKey NewWeakCertificate() { return SelfSigned(EVP_RSA_gen(512)); }

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_ACCESS_TEST_CERTIFICATES_H_

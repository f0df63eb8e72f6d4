#include "server/access/credential_files.h"

#include <chrono>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/time/clock.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

constexpr std::chrono::seconds kInterval(1);

// A certificate that lasts no longer than this is worth a warning.
constexpr absl::Duration kExpiresSoon = absl::Hours(24);

void LogCertificate(const TlsMaterial& material) {
  const std::string expiry =
      absl::FormatTime(absl::RFC3339_sec, material.expiry, absl::UTCTimeZone());
  if (material.expiry > absl::Now() + kExpiresSoon) {
    LogInfo("TLS certificate", {{"expires", expiry}});
  } else {
    LogWarning("the TLS certificate expires soon, or has expired", {{"expires", expiry}});
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<CredentialFiles>> CredentialFiles::Start(
    Options options, Metrics* metrics, const Clock* clock,
    std::function<void(TokenTable)> on_tokens) {
  auto files =
      absl::WrapUnique(new CredentialFiles(std::move(options), metrics, std::move(on_tokens)));
  if (absl::Status status = files->ReadTls(); !status.ok()) return status;
  if (absl::Status status = files->ReadTokens(); !status.ok()) return status;
  if (files->options_.tls.enabled() || !files->options_.token_file.empty()) {
    files->thread_.emplace(clock, kInterval, [self = files.get()] { self->Reload(); });
  }
  return files;
}

void CredentialFiles::Reload() {
  tls_report_.Looked(ReadTls());
  token_report_.Looked(ReadTokens());
}

absl::Status CredentialFiles::ReadTls() {
  if (!options_.tls.enabled()) return absl::OkStatus();
  absl::StatusOr<TlsMaterial> read = TlsMaterial::Load(options_.tls);
  if (!read.ok()) return read.status();
  if (read->cert_chain == material_.cert_chain && read->private_key == material_.private_key &&
      read->client_ca == material_.client_ca) {
    return absl::OkStatus();
  }
  material_ = *std::move(read);
  metrics_->tls_certificate_expiry_timestamp_seconds.Set(
      absl::ToDoubleSeconds(material_.expiry - absl::UnixEpoch()));
  LogCertificate(material_);
  if (certificates_ == nullptr) {
    certificates_ = std::make_shared<TlsCertificates>(material_);
  } else {
    certificates_->Replace(material_);
  }
  return absl::OkStatus();
}

absl::Status CredentialFiles::ReadTokens() {
  if (options_.token_file.empty()) return absl::OkStatus();
  const CredentialFile file{"--token_file", options_.token_file};
  absl::StatusOr<std::string> read = file.Read();
  if (!read.ok()) return read.status();
  if (*read == tokens_) return absl::OkStatus();
  absl::StatusOr<TokenTable> table = TokenTable::Parse(*read);
  if (!table.ok()) return file.Error(table.status().message());
  tokens_ = *std::move(read);
  LogInfo("tokens", {{"file", options_.token_file}, {"tokens", table->entries().size()}});
  on_tokens_(*std::move(table));
  return absl::OkStatus();
}

}  // namespace flashcore::server

#include "server/transport/access/credential_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

constexpr std::chrono::seconds kInterval(1);
constexpr size_t kMaxFileBytes = 1 << 20;

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

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  const auto error = [&path](absl::string_view problem) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", problem));
  };
  // Not to be held up by a pipe without a writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return error(strerror(errno));
  std::string content;
  char buffer[16384];
  ssize_t got = 0;
  do {
    got = read(fd, buffer, sizeof(buffer));
    if (got > 0) content.append(buffer, static_cast<size_t>(got));
  } while (content.size() <= kMaxFileBytes && (got > 0 || (got < 0 && errno == EINTR)));
  const int read_errno = errno;
  close(fd);
  if (got < 0) return error(strerror(read_errno));
  if (content.size() > kMaxFileBytes) {
    return error(absl::StrCat("more than ", kMaxFileBytes, " bytes"));
  }
  return content;
}

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

std::shared_ptr<grpc::ServerCredentials> CredentialFiles::CredentialsFor(
    const std::string& address) {
  if (certificates_ == nullptr || absl::StartsWith(address, "unix:")) {
    return nullptr;
  }
  return given_.emplace_back(MakeTlsCredentials(certificates_));
}

void CredentialFiles::Reload() {
  Report("certificates", ReadTls(), &tls_error_, &metrics_->tls_reload_failures);
  Report("tokens", ReadTokens(), &token_error_, &metrics_->token_reload_failures);
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
  absl::StatusOr<std::string> read = ReadSmallFile(options_.token_file);
  if (!read.ok()) return read.status();
  if (*read == tokens_) return absl::OkStatus();
  absl::StatusOr<TokenTable> table = TokenTable::Parse(*read);
  if (!table.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(options_.token_file, ": ", table.status().message()));
  }
  tokens_ = *std::move(read);
  LogInfo("tokens", {{"file", options_.token_file}, {"tokens", table->entries().size()}});
  on_tokens_(*std::move(table));
  return absl::OkStatus();
}

void CredentialFiles::Report(const char* what, const absl::Status& status, std::string* last,
                             Counter* failures) {
  if (status.message() == *last) return;
  *last = std::string(status.message());
  if (status.ok()) return;
  failures->Increment();
  LogWarning("new credentials cannot be used; the ones before stay in use",
             {{"what", what}, {"error", status.message()}});
}

}  // namespace flashcore::server

#include "client/cpp/security.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "proto/wire/host_port.h"

namespace flashcore {
namespace client {
namespace {

constexpr unsigned kRefreshSeconds = 5;
constexpr size_t kMaxTokenBytes = 4096;

absl::Status Error(absl::string_view file, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(file, ": ", problem));
}

absl::Status CheckPem(const std::string& path, absl::string_view marker) {
  std::ifstream file(path);
  std::ostringstream content;
  content << file.rdbuf();
  if (!file) return Error(path, "cannot be read");
  if (!absl::StrContains(content.str(), marker)) return Error(path, absl::StrCat("no ", marker));
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return Error(path, "has no token in its first line");
  const absl::string_view token = absl::StripAsciiWhitespace(line);
  const bool printable = std::all_of(token.begin(), token.end(),
                                     [](unsigned char c) { return absl::ascii_isgraph(c); });
  if (token.empty() || token.size() > kMaxTokenBytes || !printable) {
    return Error(path, absl::StrCat("want a token in its first line: at most ", kMaxTokenBytes,
                                    " bytes of printable ASCII without spaces"));
  }
  const std::vector<absl::string_view> fields = absl::StrSplit(token, ':');
  if (fields.size() == 3 && fields[1].size() == 64) {
    return Error(path, "is a list of digests, which the server's --token_file takes, and no token");
  }
  return std::string(token);
}

}  // namespace

bool StaysOnHost(absl::string_view target) {
  if (absl::StartsWith(target, "unix:") || absl::StartsWith(target, "unix-abstract:")) return true;
  if (!absl::ConsumePrefix(&target, "ipv4:")) absl::ConsumePrefix(&target, "ipv6:");
  for (const absl::string_view address : absl::StrSplit(target, ',')) {
    const std::optional<HostPort> parsed = ParseHostPort(address);
    if (!parsed.has_value() || !IsLoopback(parsed->host)) return false;
  }
  return true;
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeTlsCredentials(
    const TlsOptions& tls) {
  if (tls.cert_file.empty() != tls.key_file.empty()) {
    return absl::InvalidArgumentError("tls: cert_file and key_file: want both or neither");
  }
  const bool has_ca = !tls.ca_file.empty();
  const bool has_cert = !tls.cert_file.empty();
  absl::Status status;
  if (has_ca) status.Update(CheckPem(tls.ca_file, "BEGIN CERTIFICATE"));
  if (has_cert) {
    status.Update(CheckPem(tls.cert_file, "BEGIN CERTIFICATE"));
    status.Update(CheckPem(tls.key_file, "PRIVATE KEY"));
  }
  if (!status.ok()) return status;
  grpc::experimental::TlsChannelCredentialsOptions options;
  using Provider = grpc::experimental::FileWatcherCertificateProvider;
  if (has_cert || has_ca) {
    options.set_certificate_provider(
        std::make_shared<Provider>(tls.key_file, tls.cert_file, tls.ca_file, kRefreshSeconds));
  }
  if (has_ca) options.watch_root_certs();
  if (has_cert) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(std::string path, Clock now) {
  absl::StatusOr<std::string> token = ReadToken(path);
  if (!token.ok()) return token.status();
  return absl::WrapUnique(new TokenFile(std::move(path), *std::move(token), std::move(now)));
}

std::string TokenFile::Token() {
  absl::MutexLock lock(&mutex_);
  const absl::Time now = now_();
  if (now >= read_ + absl::Seconds(1)) {
    read_ = now;
    absl::StatusOr<std::string> token = ReadToken(path_);
    if (token.ok()) token_ = *std::move(token);
  }
  return token_;
}

}  // namespace client

void ReadEnvironment(ClientOptions* options) {
  const auto read = [](const char* name, std::string* option) {
    const char* value = std::getenv(name);
    if (option->empty() && value != nullptr) *option = value;
  };
  TlsOptions tls = options->tls.value_or(TlsOptions());
  read("FLASHCORE_CLIENT_TLS_CA_FILE", &tls.ca_file);
  read("FLASHCORE_CLIENT_TLS_CERT_FILE", &tls.cert_file);
  read("FLASHCORE_CLIENT_TLS_KEY_FILE", &tls.key_file);
  read("FLASHCORE_CLIENT_TLS_SERVER_NAME", &tls.server_name);
  const bool any = !tls.ca_file.empty() || !tls.cert_file.empty() || !tls.key_file.empty() ||
                   !tls.server_name.empty();
  if (any) options->tls = std::move(tls);
  read("FLASHCORE_CLIENT_TOKEN_FILE", &options->token_file);
}

}  // namespace flashcore

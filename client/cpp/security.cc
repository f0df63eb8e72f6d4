#include "client/cpp/security.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
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
constexpr size_t kMaxFileBytes = 1 << 20;
constexpr size_t kMaxTokenBytes = 4096;
constexpr int kPipeMs = 1000;  // for a pipe's writer to begin

absl::Status Error(absl::string_view file, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat(file, ": ", problem));
}

// One read that is not interrupted; -1 with errno. A pipe without a writer is at its end.
ssize_t ReadSome(int fd, char* buffer, size_t size) {
  while (true) {
    const ssize_t got = read(fd, buffer, size);
    if (got >= 0 || (errno != EINTR && errno != EAGAIN)) return got;
    pollfd readable = {fd, POLLIN, 0};
    if (errno == EAGAIN && poll(&readable, 1, kPipeMs) == 0) return -1;
  }
}

// The text in a file of this user, which is small.
absl::StatusOr<std::string> ReadText(const std::string& path) {
  const auto cannot = [&path](int code) {
    return Error(path, absl::StrCat("cannot be read: ", strerror(code)));
  };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return cannot(errno);
  std::string text;
  std::string buffer(16 << 10, '\0');
  ssize_t got = 0;
  while (text.size() <= kMaxFileBytes && (got = ReadSome(fd, buffer.data(), buffer.size())) > 0) {
    text.append(buffer, 0, static_cast<size_t>(got));
  }
  const int code = errno;
  close(fd);
  if (got < 0) return cannot(code);
  if (text.size() > kMaxFileBytes) {
    return Error(path, absl::StrCat("is larger than ", kMaxFileBytes, " bytes"));
  }
  if (absl::StartsWith(text, "\xEF\xBB\xBF")) {
    return Error(path, "begins with a byte order mark; want ASCII without one");
  }
  if (absl::StrContains(text, '\0') || absl::StartsWith(text, "\xFF\xFE") ||
      absl::StartsWith(text, "\xFE\xFF")) {
    return Error(path, "has bytes of UTF-16, or zeros; want ASCII");
  }
  return text;
}

// `what`: CERTIFICATE or PRIVATE KEY, the end of its label.
absl::Status CheckPem(const std::string& path, absl::string_view what) {
  const absl::StatusOr<std::string> text = ReadText(path);
  if (!text.ok()) return text.status();
  std::string open_label;  // of the block that is not at its end
  bool found = false;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    line = absl::StripTrailingAsciiWhitespace(line);
    if (!absl::ConsumeSuffix(&line, "-----")) continue;
    if (absl::ConsumePrefix(&line, "-----BEGIN ")) {
      open_label = std::string(line);
    } else if (absl::ConsumePrefix(&line, "-----END ") && line == open_label) {
      found = found || absl::EndsWith(line, what);
      open_label.clear();
    }
  }
  if (!open_label.empty()) return Error(path, absl::StrCat("ends before END ", open_label));
  return found ? absl::OkStatus() : Error(path, absl::StrCat("no BEGIN ", what, " in PEM"));
}

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadText(path);
  if (!text.ok()) return text.status();
  const absl::string_view line = absl::string_view(*text).substr(0, text->find('\n'));
  const absl::string_view token = absl::StripAsciiWhitespace(line);
  const bool printable = std::all_of(token.begin(), token.end(),
                                     [](unsigned char c) { return absl::ascii_isgraph(c); });
  if (token.empty() || token.size() > kMaxTokenBytes || !printable) {
    return Error(path, absl::StrCat("want a token in its first line: 1 to ", kMaxTokenBytes,
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

bool UsesHttpProxy(absl::string_view target, const ClientOptions& options) {
  if (absl::ConsumePrefix(&target, "dns:")) absl::ConsumePrefix(&target, "///");
  return options.http_proxy && options.tls.has_value() && !StaysOnHost(target);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeTlsCredentials(
    const TlsOptions& tls) {
  if (tls.cert_file.empty() != tls.key_file.empty()) {
    return absl::InvalidArgumentError("tls: cert_file and key_file: want both or neither");
  }
  const bool has_ca = !tls.ca_file.empty();
  const bool has_cert = !tls.cert_file.empty();
  absl::Status status;
  if (has_ca) status.Update(CheckPem(tls.ca_file, "CERTIFICATE"));
  if (has_cert) {
    status.Update(CheckPem(tls.cert_file, "CERTIFICATE"));
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

namespace {

constexpr char kEnvironmentPrefix[] = "FLASHCORE_CLIENT_";
// Names of the server's flags, --client_kv_bytes and so on.
constexpr absl::string_view kOfServer[] = {"KV_BYTES", "SEQUENCES", "STAGING_BYTES"};

// Warns of a misspelt variable, which would leave a client without a token or TLS.
void WarnOnce(absl::string_view name) {
  if (std::find(std::begin(kOfServer), std::end(kOfServer), name) != std::end(kOfServer)) return;
  static absl::Mutex mutex(absl::kConstInit);
  static auto* const warned = new std::set<std::string>;
  const std::string variable = absl::StrCat(kEnvironmentPrefix, name);
  absl::MutexLock lock(&mutex);
  if (!warned->insert(variable).second) return;
  std::fprintf(stderr,
               "flashcore: unknown environment variable %s; known: TLS_CA_FILE, TLS_CERT_FILE, "
               "TLS_KEY_FILE, TLS_SERVER_NAME and TOKEN_FILE after %s\n",
               variable.c_str(), kEnvironmentPrefix);
}

}  // namespace

void ReadEnvironment(ClientOptions* options) {
  TlsOptions tls = options->tls.value_or(TlsOptions());
  const std::map<absl::string_view, std::string*> known = {{"TLS_CA_FILE", &tls.ca_file},
                                                           {"TLS_CERT_FILE", &tls.cert_file},
                                                           {"TLS_KEY_FILE", &tls.key_file},
                                                           {"TLS_SERVER_NAME", &tls.server_name},
                                                           {"TOKEN_FILE", &options->token_file}};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    absl::string_view name = *entry;
    if (!absl::ConsumePrefix(&name, kEnvironmentPrefix)) continue;
    const size_t end = std::min(name.find('='), name.size());
    const absl::string_view value = absl::ClippedSubstr(name, end + 1);
    name = name.substr(0, end);
    const auto found = known.find(name);
    if (found == known.end()) {
      WarnOnce(name);
    } else if (found->second->empty()) {
      *found->second = std::string(value);
    }
  }
  const bool any = !tls.ca_file.empty() || !tls.cert_file.empty() || !tls.key_file.empty() ||
                   !tls.server_name.empty();
  if (any) options->tls = std::move(tls);
}

}  // namespace flashcore

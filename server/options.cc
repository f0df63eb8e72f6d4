#include "server/options.h"

#include <grp.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "proto/wire/host_port.h"
#include "server/command_line.h"
#include "server/flag_checker.h"
#include "server/resource_options.h"

namespace flashcore::server {
namespace {

// The path of a file that protects something. Given but empty, as by --token_file=$UNSET, is an
// error: it must not mean what leaving the flag out means.
struct CredentialPath {
  std::string path;
  bool given = false;
};

bool AbslParseFlag(absl::string_view text, CredentialPath* path, std::string* /*error*/) {
  *path = {std::string(text), true};
  return true;
}

std::string AbslUnparseFlag(const CredentialPath& path) { return path.path; }

}  // namespace
}  // namespace flashcore::server

using flashcore::server::CredentialPath;

ABSL_FLAG(std::vector<std::string>, listen, {"127.0.0.1:7070"},
          "Addresses to serve gRPC on, each host:port or unix:path. Repeat the flag or separate "
          "addresses with commas.");
ABSL_FLAG(std::string, local_listen, "",
          "Path of a Unix socket for clients on this host, whose requests then come through "
          "shared memory instead of gRPC. The user id of a client's process is its identity. "
          "Empty: no such socket.");
ABSL_FLAG(std::string, unix_socket_mode, "0660",
          "Permissions of the Unix sockets of --listen and --local_listen, whatever the umask is. "
          "Users who may write the file may connect: 0600 is the server's user alone, 0660 its "
          "group too, 0666 every user who can reach the folder.");
ABSL_FLAG(
    std::string, unix_socket_group, "",
    "Group of these sockets, a name or a number. The server must be in it, or be root. Empty: "
    "the group that new files have, in most folders that of the server's process.");
ABSL_FLAG(bool, local_device_tensors, false,
          "Let clients of the local socket have memory of the GPUs, in which the server reads and "
          "writes their tensors in place: see --device_tensor_bytes. For models on the same GPU; "
          "start MPS (deploy/README.md), or the GPU switches between the processes, which costs a "
          "request about 0.3 ms.");
ABSL_FLAG(bool, local_allow_overflow_uid, false,
          "Serve clients on --local_listen whose user the server's user namespace does not know, "
          "such as those in another rootless container. They are all one identity.");
ABSL_FLAG(bool, insecure_listen, false,
          "Let --listen have addresses without TLS that other hosts can reach. Whoever is on the "
          "network between can then read and change everything, tokens included.");
ABSL_FLAG(CredentialPath, tls_cert_file, {},
          "PEM file with the server's certificate, then those that lead to its CA. With it, every "
          "TCP address of --listen takes TLS 1.2 or 1.3 only; unix: stays plaintext. Read again "
          "when it changes. Left out: no TLS.");
ABSL_FLAG(CredentialPath, tls_key_file, {},
          "PEM file with the private key of --tls_cert_file, without a password. Read again when "
          "it changes.");
ABSL_FLAG(CredentialPath, tls_client_ca_file, {},
          "PEM file with the CA certificates that client certificates must be of. With it, each "
          "TLS client needs one, and is identified by it. Read again when it changes. Left out: "
          "clients are not asked for a certificate.");
ABSL_FLAG(CredentialPath, token_file, {},
          "File with lines NAME:SHA256:GROUPS, one for each bearer token: its owner, the SHA-256 "
          "of the token in hexadecimal, and the owner's groups, with commas between them. With "
          "it, an RPC needs a token or a client certificate; health checks need none. Read again "
          "when it changes: a token that is gone ends its open streams. Left out: no token is "
          "needed.");
ABSL_FLAG(
    bool, insecure_client_names, false,
    "Know callers without a token and a certificate by the name that they give in the metadata "
    "flashcore-client. Anybody can claim any name.");
ABSL_FLAG(
    std::vector<std::string>, trusted_proxies, {},
    "Identities of proxies that call for their own clients, such as cert:envoy.example or "
    "uid:NUMBER. A proxy names its client in the header x-forwarded-client-cert; from other "
    "callers the header is ignored. Listed host: and uid: callers are never banned for floods.");
ABSL_FLAG(int32_t, max_connections, 1024,
          "Limit of open connections. TCP addresses, unix: addresses and the local socket, those "
          "that are served, each have an equal part. For one more, the host or user with the most "
          "connections there gives one up: one that has sent nothing, else one without calls, else "
          "any. Lowered if the process may open too few files.");
ABSL_FLAG(int32_t, max_connections_per_host, 256,
          "Limit of open connections, on each of TCP, unix: and the local socket, of one IPv4 "
          "address, one IPv6 /64 network, or one user of this host, over loopback too. One more "
          "closes one of theirs without calls, the longest idle first; if there is none, it is "
          "closed itself.");
ABSL_FLAG(int32_t, max_connections_per_client, 256,
          "Limit of open gRPC connections on which one client calls. Its calls on one more are "
          "refused.");
ABSL_FLAG(int32_t, max_connection_streams, 256,
          "Limit of the RPCs at the same time on one connection. A client waits before it starts "
          "one more.");
ABSL_FLAG(double, handshake_timeout_s, 10,
          "Seconds in which a new connection must send its first bytes, and then complete the TLS "
          "and HTTP/2 handshakes.");
ABSL_FLAG(double, max_connection_age_s, 0,
          "Seconds after which a connection takes no more RPCs; 30 s later it is closed, and "
          "streams and leases on it end. 0: never.");
ABSL_FLAG(std::string, metrics_listen, "127.0.0.1:9464",
          "host:port of the HTTP endpoint with /metrics (Prometheus), /healthz and /readyz. Empty: "
          "no endpoint.");
ABSL_FLAG(
    std::string, probe_listen, "",
    "host:port of another HTTP endpoint, with /healthz and /readyz only: for probes from other "
    "hosts than may reach --metrics_listen. Empty: no such endpoint.");
ABSL_FLAG(CredentialPath, metrics_token_file, {},
          "File whose first line is the bearer token that a scrape of /metrics must send. Read "
          "again at every scrape. Left out: anyone may scrape.");
ABSL_FLAG(double, drain_timeout_s, 30,
          "Seconds that requests in flight have to finish after SIGTERM or SIGINT.");
ABSL_FLAG(bool, enable_reflection, false,
          "Serve gRPC reflection, which tells tools such as grpcurl the services and messages.");
ABSL_FLAG(double, reply_timeout_s, 20,
          "Seconds that a client may take to read a reply. Then the RPC is cancelled, or the "
          "connection on --local_listen closed, and the reply's memory is released.");
ABSL_FLAG(std::string, log_level, "info",
          "Lowest level to log: debug (one record per request), info, warning or error.");
ABSL_FLAG(std::string, log_format, "auto", "json, text, or auto: text on a terminal, else json.");

namespace flashcore::server {
namespace {

// `plaintext`: addresses of other hosts may be served without TLS.
void CheckAddresses(const std::vector<std::string>& addresses, bool plaintext, FlagChecker* check) {
  check->Require(!addresses.empty(), FLAGS_listen, "", "an address");
  for (const std::string& address : addresses) {
    const bool is_unix = absl::StartsWith(address, "unix:") && address.size() > 5;
    const std::optional<HostPort> tcp = ParseHostPort(address);
    const bool is_tcp = tcp.has_value() && !tcp->host.empty();
    check->Require(is_unix || is_tcp, FLAGS_listen, address, "host:port or unix:path");
    check->Require(plaintext || is_unix || (is_tcp && IsLoopback(tcp->host)), FLAGS_listen, address,
                   "an address of this host alone, such as 127.0.0.1:7070; to serve other hosts, "
                   "set --tls_cert_file and --tls_key_file, or --insecure_listen to do without "
                   "TLS");
  }
}

std::string ReadPath(const absl::Flag<CredentialPath>& flag, FlagChecker* check) {
  CredentialPath value = absl::GetFlag(flag);
  check->Require(!value.given || !value.path.empty(), flag, "",
                 "the path of a file; to do without, leave the flag and its variable out");
  return std::move(value.path);
}

void ReadCredentialOptions(Server::Options* options, FlagChecker* check) {
  TlsOptions& tls = options->credentials.tls;
  tls.cert_file = ReadPath(FLAGS_tls_cert_file, check);
  tls.key_file = ReadPath(FLAGS_tls_key_file, check);
  tls.client_ca_file = ReadPath(FLAGS_tls_client_ca_file, check);
  check->Require(tls.cert_file.empty() == tls.key_file.empty(), FLAGS_tls_key_file, tls.key_file,
                 "set together with --tls_cert_file");
  check->Require(tls.client_ca_file.empty() || tls.enabled(), FLAGS_tls_client_ca_file,
                 tls.client_ca_file, "usable without --tls_cert_file");
  options->credentials.token_file = ReadPath(FLAGS_token_file, check);
  options->authenticator.allow_overflow_uid = absl::GetFlag(FLAGS_local_allow_overflow_uid);
  options->authenticator.insecure_client_names = absl::GetFlag(FLAGS_insecure_client_names);
  options->authenticator.trusted_proxies = absl::GetFlag(FLAGS_trusted_proxies);
  for (const std::string& proxy : options->authenticator.trusted_proxies) {
    const bool has_source = absl::StartsWith(proxy, "cert:") || absl::StartsWith(proxy, "token:") ||
                            absl::StartsWith(proxy, "uid:") || absl::StartsWith(proxy, "host:");
    check->Require(has_source, FLAGS_trusted_proxies, proxy,
                   "cert:NAME, token:NAME, uid:NUMBER or host:NAME");
  }
}

void ReadConnectionOptions(const Budgets& budgets, Server::Connections* options,
                           FlagChecker* check) {
  options->max = check->Range(FLAGS_max_connections, 1, 1 << 20);
  options->max_per_host = check->Range(FLAGS_max_connections_per_host, 1, 1 << 20);
  options->max_per_client = check->Range(FLAGS_max_connections_per_client, 1, 1 << 20);
  options->max_streams = check->Range(FLAGS_max_connection_streams, 1, 65536);
  options->handshake_timeout = absl::Seconds(check->Range(FLAGS_handshake_timeout_s, 0.1, 3600.0));
  options->accept.first_bytes_within = absl::ToChronoMilliseconds(options->handshake_timeout);
  const auto transport_bytes = static_cast<uint64_t>(budgets.transport);
  options->accept.inflow.streams = static_cast<uint64_t>(options->max_streams);
  options->accept.inflow.calls = 4 * options->accept.inflow.streams;
  options->accept.resets = 4 * options->accept.inflow.streams;
  options->accept.inflow.excess_of_all = transport_bytes / 8 / kRpcBytes;
  const double max_age_s = check->Range(FLAGS_max_connection_age_s, 0.0, 1e6);
  options->max_age = max_age_s == 0 ? absl::InfiniteDuration() : absl::Seconds(max_age_s);
}

void ReadUnsentReplyOptions(const Budgets& budgets, UnsentReplies::Options* options,
                            FlagChecker* check) {
  options->bytes.all = budgets.unsent_replies;
  options->bytes.one = budgets.unsent_replies / 4;
  const double timeout_s = check->Range(FLAGS_reply_timeout_s, 0.01, 86400.0);
  options->timeout =
      std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(timeout_s));
}

// Nullopt: neither a number nor the name of a group.
std::optional<gid_t> FindGroup(const std::string& name) {
  gid_t id = 0;
  if (absl::SimpleAtoi(name, &id)) {
    if (id == UnixSocketAccess::kProcessGroup) return std::nullopt;
    return id;
  }
  const group* const found = getgrnam(name.c_str());  // there are no other threads yet
  if (found == nullptr) return std::nullopt;
  return found->gr_gid;
}

void ReadUnixSocketOptions(UnixSocketAccess* options, FlagChecker* check) {
  const std::string mode = absl::GetFlag(FLAGS_unix_socket_mode);
  const bool is_octal =
      !mode.empty() && mode.size() <= 4 && mode.find_first_not_of("01234567") == std::string::npos;
  options->mode = is_octal ? static_cast<mode_t>(std::stoul(mode, nullptr, 8)) : 0;
  check->Require(options->mode <= 0777 && (options->mode & 0600) == 0600, FLAGS_unix_socket_mode,
                 mode, "an octal mode up to 0777 that lets the owner read and write, such as 0660");
  const std::string group = absl::GetFlag(FLAGS_unix_socket_group);
  if (group.empty()) return;
  const std::optional<gid_t> id = FindGroup(group);
  check->Require(id.has_value(), FLAGS_unix_socket_group, group, "a group of this system");
  options->group = id.value_or(UnixSocketAccess::kProcessGroup);
}

void ReadServerOptions(const Budgets& budgets, Server::Options* options, FlagChecker* check) {
  options->version = FLASHCORE_VERSION;
  options->listen = absl::GetFlag(FLAGS_listen);
  ReadCredentialOptions(options, check);
  const bool has_tls = options->credentials.tls.enabled();
  CheckAddresses(options->listen, has_tls || absl::GetFlag(FLAGS_insecure_listen), check);
  options->max_message_bytes = budgets.message;
  options->transport_memory_bytes = budgets.transport;
  ReadUnsentReplyOptions(budgets, &options->unsent_replies, check);
  ReadSharedMemoryOptions(budgets, &options->shared_memory);
  const bool has_device_tensors = absl::GetFlag(FLAGS_local_device_tensors);
  ReadDeviceMemoryOptions(has_device_tensors, &options->device_memory, check);
  ReadConnectionOptions(budgets, &options->connections, check);
  options->local_listen = absl::GetFlag(FLAGS_local_listen);
  // sockaddr_un has room for no more.
  check->Require(options->local_listen.size() <= 107, FLAGS_local_listen, options->local_listen,
                 "a path of at most 107 bytes");
  ReadUnixSocketOptions(&options->unix_sockets, check);
  check->Require(!options->local_listen.empty() || !absl::GetFlag(FLAGS_local_allow_overflow_uid),
                 FLAGS_local_allow_overflow_uid, "true", "usable without --local_listen");
  check->Require(!options->local_listen.empty() || !has_device_tensors, FLAGS_local_device_tensors,
                 "true", "usable without --local_listen");
  options->enable_reflection = absl::GetFlag(FLAGS_enable_reflection);
}

void ReadLogOptions(Logger::Options* options, FlagChecker* check) {
  const std::string format = absl::GetFlag(FLAGS_log_format);
  check->Require(ParseLogFormat(format, &options->format), FLAGS_log_format, format,
                 "auto, json or text");
  const std::string level = absl::GetFlag(FLAGS_log_level);
  check->Require(ParseLogLevel(level, &options->min_level), FLAGS_log_level, level,
                 "debug, info, warning or error");
}

}  // namespace

absl::StatusOr<Options> ParseOptions(int argc, char** argv) {
  Options options;
  absl::Status read = ReadFlags(argc, argv, &options.unknown_variables);
  if (!read.ok()) return read;
  FlagChecker check;
  ReadDevices(&options.device, &check);
  options.memory = HostMemory::Read();
  options.memory_use = {static_cast<int>(options.device.cuda.size()),
                        options.device.kind == DeviceOptions::Kind::kCuda,
                        !absl::GetFlag(FLAGS_local_listen).empty()};
  const Budgets budgets = ReadBudgets(options.memory, options.memory_use, &check);
  options.budgets = budgets;
  ReadServerOptions(budgets, &options.server, &check);
  ReadEngineOptions(budgets, &options.engine, &check);
  ReadDeviceOptions(budgets, options.server.device_memory.total_bytes, &options.device, &check);
  options.cores = ReadCores(&check);
  options.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  options.probe_listen = absl::GetFlag(FLAGS_probe_listen);
  options.metrics_token_file = ReadPath(FLAGS_metrics_token_file, &check);
  check.Require(options.metrics_token_file.empty() || !options.metrics_listen.empty(),
                FLAGS_metrics_token_file, options.metrics_token_file,
                "usable without --metrics_listen");
  options.drain_timeout = absl::Seconds(check.Range(FLAGS_drain_timeout_s, 0.0, 86400.0));
  ReadLogOptions(&options.log, &check);
  if (!check.status().ok()) return check.status();
  return options;
}

}  // namespace flashcore::server

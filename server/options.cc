#include "server/options.h"

#include <grp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/wire/host_port.h"
#include "server/base/cores.h"
#include "server/command_line.h"
#include "server/kv/arena.h"

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
ABSL_FLAG(int64_t, max_queue_delay_us, 0,
          "Microseconds that a request may wait for others to share its batch while a lane is "
          "idle. 0: it does not wait.");

ABSL_FLAG(
    std::string, device, "auto",
    "Devices to compute on: cpu; cuda:N, or several with commas between them; or auto: cuda:0 "
    "if it can be used, else the CPU.");
ABSL_FLAG(std::string, accumulate, "float32",
          "Type in which kernels sum: float32, or float16 (GPUs only, FP16 only). float16 is less "
          "exact and can overflow.");
ABSL_FLAG(
    int32_t, cpu_threads, 0,
    "Threads of the CPU device. 0: one per core, or as many as a container has CPU time for.");
ABSL_FLAG(int32_t, lanes, 2,
          "Lanes of each GPU. A lane is one thread that launches batches, with a stream and device "
          "memory of its own, so that the copies of one launch overlap the kernels of another. The "
          "CPU device has one lane.");
ABSL_FLAG(int64_t, idle_spin_us, 1000,
          "Microseconds that an idle lane of a GPU polls for work before its thread sleeps. It "
          "keeps a core busy meanwhile; only one lane polls at a time.");
ABSL_FLAG(int64_t, direct_io_bytes, int64_t{1} << 20,
          "If Q, K, V and O of a launch have at most this many bytes together, a GPU reads and "
          "writes them in pinned host memory instead of copying them. Inline K/V that would be "
          "read more than once is still copied. 0: copy always.");
ABSL_FLAG(std::string, l2_window, "auto",
          "Whether a GPU keeps the hot segment (see --l2_budget_bytes) in its L2 cache: on, off, "
          "or auto: only if a measurement at start finds it faster.");
ABSL_FLAG(int64_t, l2_budget_bytes, 0,
          "Upper limit of the hot segment: the first bytes of a device's K/V memory, which the L2 "
          "window of a GPU covers and pinned sequences compete for. 0: as much as a GPU allows. "
          "The CPU device has one of just this size, to try out placement: it pins nothing in its "
          "cache.");
ABSL_FLAG(std::string, pin_threads, "",
          "Cores that the server runs on, such as 2-5,8. Each lane's thread has one of the first "
          "cores to itself; all other threads share the rest. Empty: any core.");

ABSL_FLAG(
    int64_t, kv_memory_bytes, 0,
    "Memory for resident K/V on each device. 0: on a GPU 85% of what is free once the lanes "
    "have their memory; on the CPU device what the other budgets leave of a container's memory, or "
    "a quarter of a machine's. There the system provides it as it is used, and takes it back.");
ABSL_FLAG(std::string, evict, "none",
          "When K/V memory or the memory for sequence records is full: none (refuse more) or lru "
          "(delete the least recently used sequence of the client that holds the most). At a limit "
          "of one client, lru deletes the least recently used sequence of that client.");
ABSL_FLAG(double, sequence_idle_timeout_s, 3600,
          "Seconds after which a sequence that nobody uses is deleted. 0: never.");
ABSL_FLAG(
    int64_t, sequence_metadata_bytes, 0,
    "Limit of the host memory for sequence records and page tables, for each device. 0: 256 "
    "MiB, or for all devices 1/32 of the memory of the container or machine if that is less.");
ABSL_FLAG(
    int64_t, staging_memory_bytes, 0,
    "Limit of the host memory for tensors of requests in flight, for each device. With a "
    "GPU, all of it is allocated and pinned at start. 0: 1 GiB, or for all devices 1/8 of the "
    "memory of the container or machine if that is less, but for each at least twice "
    "--max_message_bytes.");
ABSL_FLAG(int64_t, client_staging_bytes, 0,
          "Limit of the staging memory of one client, for each device. Results that it has not "
          "read count. A request beyond it waits for --staging_wait_ms and then gets "
          "RESOURCE_EXHAUSTED. If unread results leave no room for another client, the client with "
          "the most loses its oldest: their RPCs are cancelled. 0: a quarter of "
          "--staging_memory_bytes, or twice --max_message_bytes if that is more.");
ABSL_FLAG(
    int64_t, unsent_reply_bytes, 0,
    "Limit of the memory for replies that clients have not read, without the staging memory "
    "of their tensors; one client gets a quarter of it. A client with three quarters of that "
    "gets RESOURCE_EXHAUSTED; beyond it, its oldest replies are dropped: the RPC is cancelled, "
    "or its connection on --local_listen closed. 0: 64 MiB, or 1/32 of the memory of the container "
    "or machine if that is less.");
ABSL_FLAG(double, reply_timeout_s, 20,
          "Seconds that a client may take to read a reply. Then the RPC is cancelled, or the "
          "connection on --local_listen closed, and the reply's memory is released.");
ABSL_FLAG(
    int32_t, staging_wait_ms, 500,
    "Milliseconds that a request waits for staging memory while it is full, in arrival "
    "order, before it gets RESOURCE_EXHAUSTED. Waiting requests hold at most half of "
    "--transport_memory_bytes; beyond it, the newest of the client with the most is refused. 0: "
    "do not wait.");
ABSL_FLAG(
    int64_t, transport_memory_bytes, 0,
    "Limit of the memory for messages being received, over all gRPC connections. Beyond it, "
    "RPCs are cancelled. At least twice --max_message_bytes. On --local_listen, frames that "
    "have not completely arrived may take as much again, and so may unanswered calls; one "
    "client gets a quarter of each, of frames at least 4 MiB. Beyond it, its connection with "
    "the most of such frames is closed, and its calls are not read. 0: 256 MiB, or 1/8 of the "
    "memory of the container or machine if that is less, but twice --max_message_bytes.");
ABSL_FLAG(
    int64_t, shared_memory_bytes, 0,
    "Limit of the memory that all clients of the local socket share with the server; one client "
    "gets half of it, see --client_kv_bytes. Beyond it, the client that shares the most loses the "
    "connection of its newest region, unless the client that asks would then share as much. As "
    "much again may be mapped until the requests of such connections end. With a GPU, it is "
    "pinned. 0: 1 GiB, or 1/8 of the memory of the container or machine if that is less.");

ABSL_FLAG(int64_t, max_message_bytes, 0,
          "Size limit of one gRPC message. 0: 64 MiB, or 1/16 of the memory of the container or "
          "machine if that is less.");
ABSL_FLAG(double, max_request_gflop, 0,
          "Limit of the work in one request, in 10^9 floating-point operations, masks not counted. "
          "0: about a second of the device's time, by an estimate: 120 for each CPU thread with "
          "AVX2, 60,000 for an L4. GetServerInfo tells it.");
ABSL_FLAG(int32_t, max_launch_ms, 10,
          "Milliseconds that one launch should take at most, by an estimate. Requests that need "
          "more run in several launches, and those of other clients run in between. The results "
          "have the same bits.");
ABSL_FLAG(int32_t, max_queue_requests, 1024,
          "Limit of the requests that wait for a lane, for each device. One more gets "
          "RESOURCE_EXHAUSTED.");
ABSL_FLAG(int64_t, client_kv_bytes, -1,
          "Limit of the K/V memory of one client's sequences, on each device. -1: half of the "
          "device's K/V memory. 0: no limit, for a server with a single client, which then also "
          "gets all of --sequence_metadata_bytes (else a quarter) and of --shared_memory_bytes "
          "(else half).");
ABSL_FLAG(int64_t, client_sequences, 16384,
          "Limit of the sequences of one client, on each device. 0: no limit.");

ABSL_FLAG(std::string, log_level, "info",
          "Lowest level to log: debug (one record per request), info, warning or error.");
ABSL_FLAG(std::string, log_format, "auto", "json, text, or auto: text on a terminal, else json.");

namespace flashcore::server {
namespace {

// gRPC counts message bytes in an int.
constexpr int64_t kMaxMessageBytes = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxBudgetBytes = int64_t{1} << 46;

// Checks values and keeps the first error.
class Checker {
 public:
  // Returns the flag's value. An error unless it lies in [low, high]; then returns `low`, which
  // callers can convert and scale without an overflow.
  template <typename T>
  T Range(const absl::Flag<T>& flag, std::decay_t<T> low, std::decay_t<T> high) {
    const T value = absl::GetFlag(flag);
    if (value >= low && value <= high) return value;
    if (status_.ok()) {
      status_ = FlagError(NameOf(flag), absl::StrCat(value), absl::StrCat("in ", low, "..", high));
    }
    return low;
  }
  // Returns the choice that the flag names. An error, and the first one, if it names none.
  template <typename T>
  T Choice(const absl::Flag<std::string>& flag,
           const std::vector<std::pair<absl::string_view, T>>& choices) {
    const std::string value = absl::GetFlag(flag);
    std::vector<absl::string_view> names;
    for (const auto& [name, choice] : choices) {
      if (value == name) return choice;
      names.push_back(name);
    }
    const absl::string_view last = names.back();
    names.pop_back();
    Require(false, flag, value, absl::StrCat(absl::StrJoin(names, ", "), " or ", last));
    return choices.front().second;
  }
  template <typename T>
  void Require(bool ok, const absl::Flag<T>& flag, absl::string_view value,
               absl::string_view want) {
    if (status_.ok() && !ok) {
      status_ = FlagError(NameOf(flag), value, want);
    }
  }
  const absl::Status& status() const { return status_; }

 private:
  template <typename T>
  static absl::string_view NameOf(const absl::Flag<T>& flag) {
    return absl::GetFlagReflectionHandle(flag).Name();
  }

  absl::Status status_;
};

// `plaintext`: addresses of other hosts may be served without TLS.
void CheckAddresses(const std::vector<std::string>& addresses, bool plaintext, Checker* check) {
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

// 0, for a default by the host's memory, or in [low, high].
int64_t ReadBudget(const absl::Flag<int64_t>& flag, int64_t low, int64_t high, Checker* check) {
  return absl::GetFlag(flag) == 0 ? 0 : check->Range(flag, low, high);
}

// Which budgets there are, and that those that are given go together.
Budgets ReadBudgets(const HostMemory& memory, const MemoryUse& use, Checker* check) {
  constexpr int64_t kMaxSharedBytes = (int64_t{1} << 40) - 4096;  // the limit of FaultGuard
  Budgets given;
  given.message = ReadBudget(FLAGS_max_message_bytes, 1024, kMaxMessageBytes, check);
  given.staging = ReadBudget(FLAGS_staging_memory_bytes, 1 << 20, kMaxBudgetBytes, check);
  given.transport = ReadBudget(FLAGS_transport_memory_bytes, 2048, kMaxBudgetBytes, check);
  given.unsent_replies = ReadBudget(FLAGS_unsent_reply_bytes, 1 << 20, kMaxBudgetBytes, check);
  given.sequence_metadata =
      ReadBudget(FLAGS_sequence_metadata_bytes, 1 << 20, kMaxBudgetBytes, check);
  given.shared = ReadBudget(FLAGS_shared_memory_bytes, 4096, kMaxSharedBytes, check);
  given.kv =
      ReadBudget(FLAGS_kv_memory_bytes, kMinKvBytes, static_cast<int64_t>(Arena::kMaxBytes), check);
  Budgets budgets = DivideMemory(memory, use, given);
  budgets.kv = std::min(budgets.kv, static_cast<int64_t>(Arena::kMaxBytes));
  if (given.transport > 0) {
    check->Range(FLAGS_transport_memory_bytes, 2 * budgets.message, kMaxBudgetBytes);
  }
  // With a GPU all of it is taken at start.
  const int64_t most_staging = use.pinned_staging ? memory.bytes / use.devices : kMaxBudgetBytes;
  check->Require(
      budgets.staging <= most_staging, FLAGS_staging_memory_bytes, absl::StrCat(budgets.staging),
      absl::StrCat("at most ", most_staging, ": each GPU takes as much at start, of the ",
                   memory.bytes, " bytes that there are"));
  check->Require(budgets.message <= budgets.staging, FLAGS_staging_memory_bytes,
                 absl::StrCat(budgets.staging),
                 absl::StrCat("at least --max_message_bytes, ", budgets.message));
  return budgets;
}

void ReadSequenceOptions(const Budgets& budgets, SequenceStore::Options* options, Checker* check) {
  options->evict_lru = check->Choice<bool>(FLAGS_evict, {{"none", false}, {"lru", true}});
  const double timeout_s = check->Range(FLAGS_sequence_idle_timeout_s, 0.0, 1e8);
  options->idle_timeout =
      std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(timeout_s));
  const int64_t client_kv_bytes = check->Range(FLAGS_client_kv_bytes, -1, kMaxBudgetBytes);
  options->client_kv_bytes =
      client_kv_bytes < 0 ? SequenceOptions::kHalfOfTheMemory : client_kv_bytes;
  options->client_sequences = check->Range(FLAGS_client_sequences, 0, int64_t{1} << 31);
  options->metadata_bytes = budgets.sequence_metadata;
  options->client_metadata_bytes = client_kv_bytes == 0 ? 0 : options->metadata_bytes / 4;
}

void ReadSharedMemoryOptions(const Budgets& budgets, SharedMemory::Options* options) {
  options->total_bytes = budgets.shared;
  options->client_bytes = absl::GetFlag(FLAGS_client_kv_bytes) == 0 ? 0 : options->total_bytes / 2;
}

std::string ReadPath(const absl::Flag<CredentialPath>& flag, Checker* check) {
  CredentialPath value = absl::GetFlag(flag);
  check->Require(!value.given || !value.path.empty(), flag, "",
                 "the path of a file; to do without, leave the flag and its variable out");
  return std::move(value.path);
}

void ReadCredentialOptions(Server::Options* options, Checker* check) {
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

size_t ReadL2BudgetBytes(Checker* check) {
  return check->Range(FLAGS_l2_budget_bytes, 0, int64_t{1} << 40);
}

void ReadCpuOptions(const Budgets& budgets, CpuDevice::Options* options, Checker* check) {
  options->threads = check->Range(FLAGS_cpu_threads, 0, 4096);
  options->kv_memory_bytes = budgets.kv;
  options->kv_hot_bytes = std::min(ReadL2BudgetBytes(check), options->kv_memory_bytes);
}

void ReadCudaOptions(const Budgets& budgets, CudaDevice::Options* options, Checker* check) {
  options->lanes = check->Range(FLAGS_lanes, 1, 64);
  options->idle_spin =
      std::chrono::microseconds(check->Range(FLAGS_idle_spin_us, 0, 1'000'000'000));
  options->direct_io_bytes = check->Range(FLAGS_direct_io_bytes, 0, int64_t{1} << 32);
  options->kv_memory_bytes = absl::GetFlag(FLAGS_kv_memory_bytes);
  options->staging_memory_bytes = budgets.staging;
  options->max_request_bytes = budgets.message;
  using L2Window = CudaDevice::L2Window;
  options->l2_window = check->Choice<L2Window>(
      FLAGS_l2_window, {{"auto", L2Window::kAuto}, {"on", L2Window::kOn}, {"off", L2Window::kOff}});
  options->l2_budget_bytes = ReadL2BudgetBytes(check);
}

// The N of each cuda:N.
std::vector<int> ReadOrdinals(const std::string& device, Checker* check) {
  std::vector<int> ordinals;
  for (absl::string_view gpu : absl::StrSplit(device, ',')) {
    int ordinal = -1;
    check->Require(absl::ConsumePrefix(&gpu, "cuda:") && absl::SimpleAtoi(gpu, &ordinal) &&
                       ordinal >= 0 && std::count(ordinals.begin(), ordinals.end(), ordinal) == 0,
                   FLAGS_device, device, "auto, cpu or cuda:N[,cuda:M...], each GPU once");
    ordinals.push_back(ordinal);
  }
  return ordinals;
}

// Which devices: their kind and ordinals.
void ReadDevices(DeviceOptions* options, Checker* check) {
  const std::string device = absl::GetFlag(FLAGS_device);
  if (device == "cpu") {
    options->kind = DeviceOptions::Kind::kCpu;
  } else if (device != "auto") {
    options->kind = DeviceOptions::Kind::kCuda;
    const std::vector<int> ordinals = ReadOrdinals(device, check);
    options->cuda.resize(ordinals.size());
    for (size_t i = 0; i < ordinals.size(); ++i) options->cuda[i].ordinal = ordinals[i];
  }
}

// How they compute.
void ReadDeviceOptions(const Budgets& budgets, DeviceOptions* options, Checker* check) {
  ReadCpuOptions(budgets, &options->cpu, check);
  CudaDevice::Options cuda;
  ReadCudaOptions(budgets, &cuda, check);
  using kernels::Accumulate;
  options->cpu.accumulate = cuda.accumulate = check->Choice<Accumulate>(
      FLAGS_accumulate, {{"float32", Accumulate::kFloat32}, {"float16", Accumulate::kFloat16}});
  for (CudaDevice::Options& gpu : options->cuda) {
    cuda.ordinal = gpu.ordinal;
    gpu = cuda;
  }
}

std::vector<int> ReadCores(Checker* check) {
  const std::string list = absl::GetFlag(FLAGS_pin_threads);
  if (list.empty()) return {};
  const std::vector<int> allowed = AllowedCores();
  const std::vector<int> cores = ParseCores(list).value_or(std::vector<int>{-1});
  const bool all_allowed = std::all_of(cores.begin(), cores.end(), [&](int core) {
    return std::count(allowed.begin(), allowed.end(), core) > 0;
  });
  check->Require(all_allowed, FLAGS_pin_threads, list,
                 absl::StrCat("a list such as 2-5,8, without repeats, of the cores to be had: ",
                              absl::StrJoin(allowed, ",")));
  return cores;
}

void ReadConnectionOptions(const Budgets& budgets, Server::Connections* options, Checker* check) {
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
                            Checker* check) {
  options->bytes.all = budgets.unsent_replies;
  options->bytes.one = budgets.unsent_replies / 4;
  const double timeout_s = check->Range(FLAGS_reply_timeout_s, 0.01, 86400.0);
  options->timeout =
      std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(timeout_s));
}

// A client gets a quarter of the staging memory by default, but any message that is not too large,
// together with its results, finds room.
size_t ClientStagingBytes(const Budgets& budgets, Checker* check) {
  const int64_t total = budgets.staging;
  const int64_t message = budgets.message;
  const int64_t client = absl::GetFlag(FLAGS_client_staging_bytes);
  if (client == 0) return std::min(total, std::max(total / 4, 2 * message));
  check->Require(client >= message && client <= total, FLAGS_client_staging_bytes,
                 absl::StrCat(client),
                 absl::StrCat("0, or from --max_message_bytes, ", message,
                              ", to --staging_memory_bytes, ", total));
  return client;
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

void ReadUnixSocketOptions(UnixSocketAccess* options, Checker* check) {
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

void ReadServerOptions(const Budgets& budgets, Server::Options* options, Checker* check) {
  options->version = FLASHCORE_VERSION;
  options->listen = absl::GetFlag(FLAGS_listen);
  ReadCredentialOptions(options, check);
  const bool has_tls = options->credentials.tls.enabled();
  CheckAddresses(options->listen, has_tls || absl::GetFlag(FLAGS_insecure_listen), check);
  options->max_message_bytes = budgets.message;
  options->transport_memory_bytes = budgets.transport;
  ReadUnsentReplyOptions(budgets, &options->unsent_replies, check);
  ReadSharedMemoryOptions(budgets, &options->shared_memory);
  ReadConnectionOptions(budgets, &options->connections, check);
  options->local_listen = absl::GetFlag(FLAGS_local_listen);
  // sockaddr_un has room for no more.
  check->Require(options->local_listen.size() <= 107, FLAGS_local_listen, options->local_listen,
                 "a path of at most 107 bytes");
  ReadUnixSocketOptions(&options->unix_sockets, check);
  check->Require(!options->local_listen.empty() || !absl::GetFlag(FLAGS_local_allow_overflow_uid),
                 FLAGS_local_allow_overflow_uid, "true", "usable without --local_listen");
  options->enable_reflection = absl::GetFlag(FLAGS_enable_reflection);
}

void ReadEngineOptions(const Budgets& budgets, Engine::Options* options, Checker* check) {
  options->staging_memory_bytes = budgets.staging;
  options->client_staging_bytes = ClientStagingBytes(budgets, check);
  options->staging_wait =
      std::chrono::milliseconds(check->Range(FLAGS_staging_wait_ms, 0, 3'600'000));
  options->max_waiting_bytes = budgets.transport / 2;
  options->max_request_flop = 1e9 * check->Range(FLAGS_max_request_gflop, 0, 1e12);
  options->batcher.max_launch =
      std::chrono::milliseconds(check->Range(FLAGS_max_launch_ms, 1, 60'000));
  options->batcher.max_queue_requests = check->Range(FLAGS_max_queue_requests, 1, 1 << 20);
  options->batcher.max_queue_delay =
      std::chrono::microseconds(check->Range(FLAGS_max_queue_delay_us, 0, 1'000'000));
  ReadSequenceOptions(budgets, &options->sequences, check);
}

void ReadLogOptions(Logger::Options* options, Checker* check) {
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
  Checker check;
  ReadDevices(&options.device, &check);
  options.memory = HostMemory::Read();
  options.memory_use = {static_cast<int>(options.device.cuda.size()),
                        options.device.kind == DeviceOptions::Kind::kCuda,
                        !absl::GetFlag(FLAGS_local_listen).empty()};
  const Budgets budgets = ReadBudgets(options.memory, options.memory_use, &check);
  options.budgets = budgets;
  ReadServerOptions(budgets, &options.server, &check);
  ReadEngineOptions(budgets, &options.engine, &check);
  ReadDeviceOptions(budgets, &options.device, &check);
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

#include "server/telemetry/metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "prometheus/metric_family.h"
#include "server/base/error_info.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

// The names of gRPC's status codes, 0 to 16, as in the metrics of other gRPC servers.
constexpr const char* kCodeNames[RpcMetrics::kCodes] = {
    "OK",       "Canceled",       "Unknown",          "InvalidArgument",   "DeadlineExceeded",
    "NotFound", "AlreadyExists",  "PermissionDenied", "ResourceExhausted", "FailedPrecondition",
    "Aborted",  "OutOfRange",     "Unimplemented",    "Internal",          "Unavailable",
    "DataLoss", "Unauthenticated"};

// By Outcome.
constexpr const char* kOutcomes[] = {"ok", "refused", "client_error", "expired", "error"};

// Why requests are answered with an error, and whose cause that is: the reasons of ErrorInfo, then
// the codes of errors without one. Other values count as kOther.
struct Rejection {
  absl::string_view reason;
  Outcome outcome;
};
constexpr Rejection kRejections[] = {
    {reason::kQueueFull, Outcome::kRefused},
    {reason::kStagingFull, Outcome::kRefused},
    {reason::kKvFull, Outcome::kRefused},
    {reason::kServerFull, Outcome::kRefused},
    {reason::kQuotaExceeded, Outcome::kClientError},
    {reason::kRepliesFull, Outcome::kClientError},
    {reason::kTooLarge, Outcome::kClientError},
    {reason::kSequenceLost, Outcome::kClientError},
    {reason::kRegionLost, Outcome::kClientError},
    {reason::kLeaseLost, Outcome::kClientError},
    {reason::kLengthMismatch, Outcome::kClientError},
    {reason::kUnknownField, Outcome::kClientError},
    {"UNAVAILABLE", Outcome::kRefused},
    {"RESOURCE_EXHAUSTED", Outcome::kRefused},
    {"INVALID_ARGUMENT", Outcome::kClientError},
    {"NOT_FOUND", Outcome::kClientError},
    {"PERMISSION_DENIED", Outcome::kClientError},
    {"UNAUTHENTICATED", Outcome::kClientError},
    {"FAILED_PRECONDITION", Outcome::kClientError},
    {"UNIMPLEMENTED", Outcome::kClientError},
    {"CANCELLED", Outcome::kClientError},
    {"DEADLINE_EXCEEDED", Outcome::kExpired},
    {"INTERNAL", Outcome::kError},
};
constexpr Rejection kOther = {"INTERNAL", Outcome::kError};
constexpr char kUnread[] = "UNREAD";  // its client did not read the answer

// `status` is not OK.
const Rejection& RejectionOf(const absl::Status& status) {
  const std::optional<ErrorInfo> info = GetErrorInfo(status);
  const std::string reason = info ? info->reason : absl::StatusCodeToString(status.code());
  for (const Rejection& rejection : kRejections) {
    if (rejection.reason == reason) return rejection;
  }
  return kOther;
}

// By Unauthenticated.
constexpr const char* kUnauthenticatedReasons[] = {
    "no_token", "bad_token", "bad_certificate", "bad_forwarded_cert", "revoked", "overflow_uid"};

constexpr char kReloadFailures[] = "flashcore_credential_reload_failures_total";
constexpr char kReloadFailuresHelp[] =
    "Changed certificate or token files that could not be used; the ones before stay in use.";

Labels RpcLabels(const RpcMethod& method) {
  return {{"rpc", method.method}, {"transport", method.transport}};
}

Labels GrpcLabels(const RpcMethod& method) {
  return {
      {"grpc_type", method.type}, {"grpc_service", method.service}, {"grpc_method", method.method}};
}

Counter& AddRejected(MetricRegistry* registry, absl::string_view reason) {
  return AddCounter(registry, "flashcore_rejected_requests_total",
                    "Requests answered with an error, or whose answer was not read.",
                    {{"reason", std::string(reason)}});
}

// The process_* metrics that every Prometheus client library exports, without those that cannot be
// read. prometheus-cpp has none.

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

using Families = std::vector<prometheus::MetricFamily>;
using prometheus::MetricType;

void Append(Families* families, MetricType type, const char* name, const char* help, double value) {
  prometheus::ClientMetric metric;
  (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  families->push_back({name, help, type, {metric}});
}

// When the machine started, in seconds since the epoch; 0 if unknown.
double BootTime() {
  const std::string stat = ReadFile("/proc/stat");
  for (absl::string_view line : absl::StrSplit(stat, '\n')) {
    double seconds = 0;
    if (absl::ConsumePrefix(&line, "btime ") && absl::SimpleAtod(line, &seconds)) return seconds;
  }
  return 0;
}

// Reads /proc/self/stat; see proc(5).
void AppendStat(Families* families) {
  const std::string stat = ReadFile("/proc/self/stat");
  // The second field is the program's name in parentheses, which may contain any character. Search
  // for its end from the right; the third field follows.
  const size_t name_end = stat.rfind(") ");
  if (name_end == std::string::npos) return;
  const std::vector<absl::string_view> fields =
      absl::StrSplit(absl::string_view(stat).substr(name_end + 2), ' ');
  const auto field = [&](size_t number) {
    double value = 0;
    if (number - 3 < fields.size() && !absl::SimpleAtod(fields[number - 3], &value)) value = 0;
    return value;
  };
  const double ticks_per_second = static_cast<double>(sysconf(_SC_CLK_TCK));
  Append(families, MetricType::Counter, "process_cpu_seconds_total",
         "User and system CPU time spent, in seconds.", (field(14) + field(15)) / ticks_per_second);
  Append(families, MetricType::Gauge, "process_threads", "Threads of the process.", field(20));
  Append(families, MetricType::Gauge, "process_start_time_seconds",
         "Start of the process, in seconds since the epoch.",
         BootTime() + field(22) / ticks_per_second);
  Append(families, MetricType::Gauge, "process_virtual_memory_bytes", "Virtual memory, in bytes.",
         field(23));
  Append(families, MetricType::Gauge, "process_resident_memory_bytes", "Resident memory, in bytes.",
         field(24) * static_cast<double>(sysconf(_SC_PAGESIZE)));
}

void AppendFileDescriptors(Families* families) {
  if (DIR* directory = opendir("/proc/self/fd")) {
    int entries = 0;
    while (readdir(directory) != nullptr) ++entries;
    closedir(directory);
    // Without ".", "..", and the descriptor that reads the directory.
    Append(families, MetricType::Gauge, "process_open_fds", "Open file descriptors.", entries - 3);
  }
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    Append(families, MetricType::Gauge, "process_max_fds",
           "Most file descriptors that may be open.", static_cast<double>(limit.rlim_cur));
  }
}

}  // namespace

Outcome OutcomeOf(const absl::Status& status) {
  return status.ok() ? Outcome::kOk : RejectionOf(status).outcome;
}

RpcMetrics::RpcMetrics(const RpcMethod& method, int number, MetricRegistry* registry)
    : method_(method), number_(number) {
  for (size_t i = 0; i < request_duration_seconds_.size(); ++i) {
    Labels labels = RpcLabels(method);
    labels["outcome"] = kOutcomes[i];
    request_duration_seconds_[i] = &AddHistogram(
        registry, "flashcore_request_duration_seconds",
        "Time from receiving a request to answering it, by how it ended.", LatencyBounds(), labels);
  }
  const auto add_phase = [&](const char* phase) {
    Labels labels = RpcLabels(method);
    labels["phase"] = phase;
    return &AddHistogram(registry, kPhaseMetric, kPhaseHelp, LatencyBounds(), labels);
  };
  if (method.attends) {
    receive_seconds_ = add_phase("receive");
    staging_wait_seconds_ = add_phase("staging_wait");
    reply_seconds_ = add_phase("reply");
  }
  if (method.transport != "grpc") return;
  started_ =
      &AddCounter(registry, "grpc_server_started_total", "RPCs started.", GrpcLabels(method));
  for (int code = 0; code < kCodes; ++code) {
    Labels labels = GrpcLabels(method);
    labels["grpc_code"] = kCodeNames[code];
    handled_[code] =
        &AddCounter(registry, "grpc_server_handled_total", "RPCs ended, by status code.", labels);
  }
}

Metrics::Metrics(const Options& options)
    : serving(AddGauge(&registry_, "flashcore_serving",
                       "1 while gRPC health reports SERVING, else 0.")),
      connections(AddGauge(&registry_, "flashcore_connections", "Open gRPC connections.")),
      local_connections(AddGauge(&registry_, "flashcore_local_connections",
                                 "Open connections of the local socket.")),
      local_rings(AddGauge(&registry_, "flashcore_local_rings",
                           "Open rings of the connections of the local socket.")),
      inflight_requests(AddGauge(&registry_, "flashcore_inflight_requests",
                                 "Requests received and not yet answered.")),
      rejected_unread(AddRejected(&registry_, kUnread)),
      shared_memory_bytes(AddGauge(&registry_, "flashcore_shared_memory_bytes",
                                   "Client memory shared with the server.")),
      shared_memory_regions(AddGauge(&registry_, "flashcore_shared_memory_regions",
                                     "Regions of client memory shared with the server.")),
      device_tensor_bytes(AddGauge(&registry_, "flashcore_device_tensor_bytes",
                                   "Device memory for tensors of clients.")),
      device_tensor_regions(AddGauge(&registry_, "flashcore_device_tensor_regions",
                                     "Regions of device memory for tensors of clients.")),
      tls_certificate_expiry_timestamp_seconds(
          AddGauge(&registry_, "flashcore_tls_certificate_expiry_timestamp_seconds",
                   "When the first certificate of the server's chain expires, in seconds since the "
                   "epoch; 0 without TLS.")),
      tls_reload_failures(
          AddCounter(&registry_, kReloadFailures, kReloadFailuresHelp, {{"credential", "tls"}})),
      token_reload_failures(
          AddCounter(&registry_, kReloadFailures, kReloadFailuresHelp, {{"credential", "tokens"}})),
      metrics_token_reload_failures(AddCounter(&registry_, kReloadFailures, kReloadFailuresHelp,
                                               {{"credential", "metrics_token"}})) {
  for (const Rejection& rejection : kRejections) {
    rejected_by_reason_[rejection.reason] = &AddRejected(&registry_, rejection.reason);
  }
  for (size_t i = 0; i < unauthenticated_.size(); ++i) {
    unauthenticated_[i] = &AddCounter(&registry_, "flashcore_unauthenticated_total",
                                      "Calls and open streams refused because of who calls.",
                                      {{"reason", kUnauthenticatedReasons[i]}});
  }
  constexpr const char* kRefusals[] = {"max_connections",
                                       "max_connections_per_host",
                                       "max_connections_per_client",
                                       "no_files",
                                       "flood",
                                       "banned",
                                       "silent",
                                       "made_room"};
  for (size_t i = 0; i < refused_connections_.size(); ++i) {
    refused_connections_[i] = &AddCounter(&registry_, "flashcore_connections_refused_total",
                                          "gRPC connections that were not served or were cut off.",
                                          {{"reason", kRefusals[i]}});
  }
  constexpr const char* kLocalRefusals[] = {"max_connections", "max_connections_per_host",
                                            "no_files",        "silent",
                                            "protocol",        "unread",
                                            "made_room",       "memory",
                                            "banned",          "shared_memory"};
  for (size_t i = 0; i < refused_local_connections_.size(); ++i) {
    refused_local_connections_[i] = &AddCounter(
        &registry_, "flashcore_local_connections_refused_total",
        "Connections of the local socket that were not served, or late, or were cut off.",
        {{"reason", kLocalRefusals[i]}});
  }
  std::vector<Labels> attending;
  for (const RpcMethod& method : options.methods) {
    rpcs_.emplace_back(method, static_cast<int>(attending.size()), &registry_);
    if (method.attends) attending.push_back(RpcLabels(method));
  }
  if (attending.empty()) attending.emplace_back();  // operations that no RPC submits
  for (const Device& device : options.devices) {
    devices_.emplace_back(device.device, &registry_, attending);
    AddConstants(device);
  }
  AddGauge(&registry_, "flashcore_build_info", "Version of this server; always 1.",
           {{"version", options.version}})
      .Set(1);
}

void Metrics::AddConstants(const Device& device) {
  const Labels labels = {{"device", device.device}};
  AddGauge(&registry_, "flashcore_device_info", "A device that runs requests; always 1.",
           {{"device", device.device}, {"name", device.name}, {"arch", device.arch}})
      .Set(1);
  AddGauge(&registry_, "flashcore_l2_window_bytes",
           "K/V that the access-policy window of each lane covers; 0 if there is none.", labels)
      .Set(static_cast<double>(device.l2_window_bytes));
  AddGauge(&registry_, "flashcore_l2_persisting_bytes",
           "L2 cache that the driver reserves for persisting lines.", labels)
      .Set(static_cast<double>(device.l2_persisting_bytes));
  AddGauge(&registry_, "flashcore_queue_capacity", "Most requests that can wait for a lane.",
           labels)
      .Set(static_cast<double>(device.queue_capacity));
}

RpcMetrics* Metrics::Rpc(absl::string_view service, absl::string_view method,
                         absl::string_view transport) {
  for (RpcMetrics& rpc : rpcs_) {
    if (rpc.service() == service && rpc.method() == method && rpc.transport() == transport) {
      return &rpc;
    }
  }
  return nullptr;
}

void Metrics::CountRejected(const absl::Status& status) {
  rejected_by_reason_.at(RejectionOf(status).reason)->Increment();
}

std::vector<prometheus::MetricFamily> Metrics::Collect() const {
  for (const std::function<void()>& update : on_scrape_) update();
  Families families = registry_.Collect();
  AppendStat(&families);
  AppendFileDescriptors(&families);
  Append(&families, MetricType::Counter, "flashcore_log_records_dropped_total",
         "Log records dropped because standard error did not take them.",
         static_cast<double>(DefaultLogger().dropped()));
  return families;
}

}  // namespace flashcore::server

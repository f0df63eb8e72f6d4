#include "server/telemetry/metrics.h"

#include <iterator>
#include <utility>

#include "server/telemetry/process_metrics.h"

namespace flashcore::server {
namespace {

// Of gRPC's status codes, 0 to 16, as other gRPC servers' metrics spell them.
constexpr const char* kCodeNames[RpcMetrics::kCodes] = {
    "OK",       "Canceled",       "Unknown",          "InvalidArgument",   "DeadlineExceeded",
    "NotFound", "AlreadyExists",  "PermissionDenied", "ResourceExhausted", "FailedPrecondition",
    "Aborted",  "OutOfRange",     "Unimplemented",    "Internal",          "Unavailable",
    "DataLoss", "Unauthenticated"};

struct RejectReason {
  absl::StatusCode code;
  const char* name;
};
constexpr RejectReason kReasons[] = {
    {absl::StatusCode::kInternal, "internal"},  // first: what any other code counts as
    {absl::StatusCode::kInvalidArgument, "invalid_argument"},
    {absl::StatusCode::kNotFound, "not_found"},
    {absl::StatusCode::kFailedPrecondition, "failed_precondition"},
    {absl::StatusCode::kResourceExhausted, "resource_exhausted"},
    {absl::StatusCode::kDeadlineExceeded, "deadline_exceeded"},
    {absl::StatusCode::kCancelled, "cancelled"},
    {absl::StatusCode::kUnimplemented, "unimplemented"},
    {absl::StatusCode::kUnavailable, "unavailable"},
};

MetricRegistry::Labels GrpcLabels(const RpcMethod& method) {
  return {
      {"grpc_type", method.type}, {"grpc_service", method.service}, {"grpc_method", method.method}};
}

}  // namespace

RpcMetrics::RpcMetrics(const RpcMethod& method, MetricRegistry* registry)
    : method_(method.method),
      started_(registry->AddCounter("grpc_server_started_total", "RPCs that the server took.",
                                    GrpcLabels(method))),
      handling_seconds_(registry->AddHistogram(
          "grpc_server_handling_seconds",
          "Time from taking an RPC to its end, whatever its status; of a stream, its whole life.",
          LatencyBounds(), GrpcLabels(method))),
      request_duration_seconds_(
          registry->AddHistogram("flashcore_request_duration_seconds",
                                 "Time from taking a request to its answer, whatever its status.",
                                 LatencyBounds(), {{"rpc", method.method}})) {
  for (int code = 0; code < kCodes; ++code) {
    MetricRegistry::Labels labels = GrpcLabels(method);
    labels.emplace_back("grpc_code", kCodeNames[code]);
    handled_[code] = &registry->AddCounter("grpc_server_handled_total",
                                           "RPCs that have ended, by their status.", labels);
  }
}

Metrics::Metrics(const Options& options)
    : serving(registry_.AddGauge("flashcore_serving", "1 while gRPC health says SERVING, else 0.")),
      inflight_requests(registry_.AddGauge("flashcore_inflight_requests",
                                           "Requests taken and not yet answered.")),
      shared_memory_bytes(registry_.AddGauge("flashcore_shared_memory_bytes",
                                             "Memory of clients that they share with the server.")),
      shared_memory_regions(
          registry_.AddGauge("flashcore_shared_memory_regions", "Regions that this memory is in.")),
      receive_seconds(registry_.AddHistogram(kPhaseMetric, kPhaseHelp, LatencyBounds(),
                                             {{"phase", "receive"}})),
      reply_seconds(
          registry_.AddHistogram(kPhaseMetric, kPhaseHelp, LatencyBounds(), {{"phase", "reply"}})),
      staging_wait_seconds(registry_.AddHistogram(kPhaseMetric, kPhaseHelp, LatencyBounds(),
                                                  {{"phase", "staging_wait"}})),
      methods_(options.methods) {
  static_assert(std::size(kReasons) == kRejectReasons);
  for (size_t reason = 0; reason < kRejectReasons; ++reason) {
    rejected_by_code_[reason] = &registry_.AddCounter("flashcore_rejected_requests_total",
                                                      "Requests answered with an error.",
                                                      {{"reason", kReasons[reason].name}});
  }
  for (const RpcMethod& method : methods_) rpcs_.emplace_back(method, &registry_);
  for (const Device& device : options.devices) {
    devices_.emplace_back(device.device, &registry_);
    registry_
        .AddGauge("flashcore_device_info", "A device that requests run on; always 1.",
                  {{"device", device.device}, {"name", device.name}, {"arch", device.arch}})
        .Set(1);
    registry_
        .AddGauge("flashcore_l2_window_bytes",
                  "K/V that the access-policy window of each lane covers; 0: there is none.",
                  {{"device", device.device}})
        .Set(static_cast<int64_t>(device.l2_window_bytes));
    registry_
        .AddGauge("flashcore_l2_persisting_bytes",
                  "Of the L2 cache, what the driver has set aside for persisting lines.",
                  {{"device", device.device}})
        .Set(static_cast<int64_t>(device.l2_persisting_bytes));
    registry_
        .AddGauge("flashcore_queue_capacity", "Requests that may wait for a lane.",
                  {{"device", device.device}})
        .Set(device.queue_capacity);
  }
  registry_
      .AddGauge("flashcore_build_info", "The version of this server; always 1.",
                {{"version", options.version}})
      .Set(1);
}

size_t Metrics::RejectIndex(absl::StatusCode code) {
  for (size_t reason = 0; reason < kRejectReasons; ++reason) {
    if (kReasons[reason].code == code) return reason;
  }
  return 0;
}

RpcMetrics* Metrics::Rpc(absl::string_view service, absl::string_view method) {
  for (size_t i = 0; i < methods_.size(); ++i) {
    if (methods_[i].service == service && methods_[i].method == method) return &rpcs_[i];
  }
  return nullptr;
}

std::vector<prometheus::MetricFamily> Metrics::Collect() const {
  for (const std::function<void()>& update : on_scrape_) update();
  std::vector<prometheus::MetricFamily> families = registry_.Collect();
  std::vector<prometheus::MetricFamily> process = CollectProcessMetrics();
  families.insert(families.end(), std::make_move_iterator(process.begin()),
                  std::make_move_iterator(process.end()));
  return families;
}

}  // namespace flashcore::server

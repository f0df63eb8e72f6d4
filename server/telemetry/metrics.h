// Every metric of the server, by name; those of each device are in device_metrics.h. To add one: a
// member here, its registration in metrics.cc, a call site, its row in deploy/METRICS.md, and a
// panel in deploy/grafana/dashboards.py.
#ifndef FLASHCORE_SERVER_TELEMETRY_METRICS_H_
#define FLASHCORE_SERVER_TELEMETRY_METRICS_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "prometheus/collectable.h"
#include "server/telemetry/device_metrics.h"
#include "server/telemetry/metric.h"
#include "server/telemetry/registry.h"

namespace flashcore::server {

// A gRPC method, as the grpc_server_* labels name it.
struct RpcMethod {
  std::string service;  // "flashcore.v1.AttentionService"
  std::string method;   // "Attend"
  std::string type;     // "unary", "client_stream", "server_stream", "bidi_stream"
};

// What is recorded about one gRPC method. Thread-safe.
class RpcMetrics {
 public:
  // gRPC's status codes, 0 to 16.
  static constexpr int kCodes = 17;

  RpcMetrics(const RpcMethod& method, MetricRegistry* registry);

  // For every RPC: one of the first when the server takes it, one of the second when it has ended,
  // whatever its status. `code` is a gRPC status code; one that does not exist counts as Unknown.
  void RecordStart() { started_.Increment(); }
  void RecordEnd(int code, double seconds) {
    handled_[code >= 0 && code < kCodes ? code : kUnknown]->Increment();
    handling_seconds_.Observe(seconds);
  }
  // For every request, whatever its status. A unary RPC is one request; a stream carries many.
  void RecordRequest(double seconds) { request_duration_seconds_.Observe(seconds); }

  const std::string& method() const { return method_; }  // "Attend"

 private:
  static constexpr int kUnknown = 2;

  const std::string method_;
  Counter& started_;
  std::array<Counter*, kCodes> handled_;
  Histogram& handling_seconds_;
  Histogram& request_duration_seconds_;
};

// The metrics and their values. Recording and Collect are thread-safe.
class Metrics : public prometheus::Collectable {
 public:
  struct Device {
    std::string device;  // "cpu", "cuda:0"
    std::string name;    // "NVIDIA L4"
    std::string arch;    // "sm_89"
    uint64_t l2_window_bytes = 0;
    uint64_t l2_persisting_bytes = 0;
    int64_t queue_capacity = 0;  // requests
  };
  struct Options {
    std::string version;
    std::vector<Device> devices;
    std::vector<RpcMethod> methods;
  };
  explicit Metrics(const Options& options);

  std::vector<prometheus::MetricFamily> Collect() const override;

  // `update` runs at the start of every scrape, on the scraping thread, to Set gauges that would
  // cost too much to keep current. Call before the MetricsServer starts; what `update` uses must
  // outlive that server.
  void OnScrape(std::function<void()> update) { on_scrape_.push_back(std::move(update)); }

  // The handle of a method of Options::methods, null if it is not there. Lives as long as this.
  // For setting up: it searches.
  RpcMetrics* Rpc(absl::string_view service, absl::string_view method);

  // For a request that is answered with an error. A code that DESIGN.md's error table lacks counts
  // as internal.
  void CountRejected(absl::StatusCode code) { rejected_by_code_[RejectIndex(code)]->Increment(); }

  // Of Options::devices[number].
  DeviceMetrics& device(size_t number) { return devices_[number]; }

 private:
  MetricRegistry registry_;  // before the members that live in it

 public:
  Gauge& serving;              // 1 while health says SERVING, else 0
  Gauge& inflight_requests;    // requests taken and not yet answered
  Gauge& shared_memory_bytes;  // of clients, that is mapped
  Gauge& shared_memory_regions;
  Histogram& receive_seconds;  // phases of a request outside any device
  Histogram& reply_seconds;
  Histogram& staging_wait_seconds;  // likewise, of those requests that waited

 private:
  static constexpr size_t kRejectReasons = 9;
  static size_t RejectIndex(absl::StatusCode code);

  std::array<Counter*, kRejectReasons> rejected_by_code_;
  std::deque<DeviceMetrics> devices_;  // elements never move
  std::deque<RpcMetrics> rpcs_;        // likewise; as many as methods_, in its order
  std::vector<RpcMethod> methods_;
  std::vector<std::function<void()>> on_scrape_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_METRICS_H_

// The metrics of the server; those of each device are in device_metrics.h. To add one: a member
// here, its registration in metrics.cc, a call site, a row in deploy/METRICS.md, and a panel in
// deploy/grafana/dashboards.py.
#ifndef FLASHCORE_SERVER_TELEMETRY_METRICS_H_
#define FLASHCORE_SERVER_TELEMETRY_METRICS_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "prometheus/collectable.h"
#include "server/telemetry/device_metrics.h"
#include "server/telemetry/metric.h"

namespace flashcore::server {

// A method of a service, with the names that the grpc_server_* labels use.
struct RpcMethod {
  std::string service;             // "flashcore.v1.AttentionService"
  std::string method;              // "Attend"
  std::string type;                // "unary", "client_stream", "server_stream", "bidi_stream"
  std::string transport = "grpc";  // or "local"
  bool attends = false;            // its requests are AttendOperations, and have phases
};

// How a request ended: the label `outcome` of its duration.
enum class Outcome {
  kOk,
  kRefused,      // before any work, because the server is full or drains
  kClientError,  // of the client's causes: arguments, quotas, a cancel, a reply that it did not
                 // read
  kExpired,      // its deadline passed
  kError,        // of the server's causes
};
Outcome OutcomeOf(const absl::Status& status);

// The metrics of one method over one transport. Thread-safe.
class RpcMetrics {
 public:
  // gRPC's status codes, 0 to 16.
  static constexpr int kCodes = 17;

  // `number`: see number().
  RpcMetrics(const RpcMethod& method, int number, MetricRegistry* registry);

  // Call both once for each RPC of gRPC: when the server accepts it, and when it has ended with any
  // status. `code` is a gRPC status code; an invalid one counts as Unknown.
  void RecordStart() { started_->Increment(); }
  void RecordEnd(int code) { handled_[code >= 0 && code < kCodes ? code : kUnknown]->Increment(); }
  // Call once for each request, with any outcome. A unary RPC is one request; a stream has many. In
  // seconds: from receiving it to answering it, and the part of that in which it was answered.
  void RecordRequest(Outcome outcome, double duration, double reply) {
    request_duration_seconds_[static_cast<size_t>(outcome)]->Observe(duration);
    if (reply_seconds_ != nullptr) reply_seconds_->Observe(reply);
  }
  // Call once for each request of a method that attends. `staging_wait` is 0 if it did not wait.
  void RecordReceive(double receive, double staging_wait) {
    receive_seconds_->Observe(receive);
    if (staging_wait > 0) staging_wait_seconds_->Observe(staging_wait);
  }

  const std::string& service() const { return method_.service; }  // "flashcore.v1.AttentionService"
  const std::string& method() const { return method_.method; }    // "Attend"
  const std::string& transport() const { return method_.transport; }
  bool is_grpc() const { return started_ != nullptr; }
  // Among the methods that attend: for DeviceMetrics::PhaseSeconds.
  int number() const { return number_; }
  // The wait of a method that attends.
  const Histogram& staging_wait_seconds() const { return *staging_wait_seconds_; }

 private:
  static constexpr int kUnknown = 2;

  const RpcMethod method_;
  const int number_;
  // Null for other transports than gRPC.
  Counter* started_ = nullptr;
  std::array<Counter*, kCodes> handled_ = {};
  std::array<Histogram*, 5> request_duration_seconds_;  // by Outcome
  // The phases outside any device; null if the method does not attend.
  Histogram* receive_seconds_ = nullptr;
  Histogram* staging_wait_seconds_ = nullptr;  // only of requests that waited
  Histogram* reply_seconds_ = nullptr;
};

// Why a call got UNAUTHENTICATED.
enum class Unauthenticated {
  kNoToken,
  kBadToken,          // unknown, or not sent as "Bearer TOKEN"
  kBadCertificate,    // verified, but without a name that can be an identity
  kBadForwardedCert,  // a trusted proxy forwards no name of a client
  kRevoked,           // its token became invalid while its stream was open
  kOverflowUid,       // a user of another user namespace, over the local socket
};

// Why a connection was not served, or was cut off.
enum class RefusedConnection {
  kMaxConnections,
  kMaxConnectionsPerHost,
  kMaxConnectionsPerClient,  // counts each refused call
  kNoFiles,                  // no more files can be opened
  kFlood,                    // it sent too many calls, resets, headers or frames
  kBanned,                   // another one of its client was cut off as a flood shortly before
  kSilent,                   // it sent nothing in time, or before it was closed for a new one
  kMadeRoom,                 // it was closed for a new one
};

// Why a connection of the local socket was not served, or was cut off.
enum class RefusedLocalConnection {
  kMaxConnections,
  kMaxConnectionsPerUser,
  kNoFiles,
  kSilent,        // no Hello in time, or before it was closed for a new one
  kProtocol,      // it broke the protocol
  kUnread,        // it did not read its replies in time, or left too many unread
  kMadeRoom,      // it was closed for a new one
  kMemory,        // what it had not completely sent took too much memory
  kBanned,        // not read for a while: another one of its client was cut off for memory before
  kSharedMemory,  // its client shared the most memory when all shared too much
};

// Recording and Collect are thread-safe.
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

  // `update` runs at the start of each scrape, on the scraping thread, and sets gauges that would
  // cost too much to keep current. Call before the MetricsServer starts; whatever `update` uses
  // must outlive that server.
  void OnScrape(std::function<void()> update) { on_scrape_.push_back(std::move(update)); }

  // The metrics of a method in Options::methods, else null. They live as long as this. For
  // start-up: searches linearly.
  RpcMetrics* Rpc(absl::string_view service, absl::string_view method,
                  absl::string_view transport = "grpc");

  // Call once for each request answered with an error. The reason is that of its ErrorInfo, or its
  // code's name if it has none.
  void CountRejected(const absl::Status& status);

  void CountUnauthenticated(Unauthenticated reason) {
    unauthenticated_[static_cast<size_t>(reason)]->Increment();
  }

  void CountRefusedConnection(RefusedConnection reason) {
    refused_connections_[static_cast<size_t>(reason)]->Increment();
  }

  void CountRefusedLocalConnection(RefusedLocalConnection reason) {
    refused_local_connections_[static_cast<size_t>(reason)]->Increment();
  }

  // The metrics of Options::devices[number].
  DeviceMetrics& device(size_t number) { return devices_[number]; }

 private:
  MetricRegistry registry_;  // before the members that refer to its series

 public:
  Gauge& serving;              // 1 while health says SERVING, else 0
  Gauge& connections;          // open, TLS handshakes and silent ones included
  Gauge& local_connections;    // open ones of the local socket
  Gauge& local_rings;          // open rings of those
  Gauge& inflight_requests;    // received and not yet answered
  Counter& rejected_unread;    // requests whose replies the clients did not read in time
  Gauge& shared_memory_bytes;  // client memory that is mapped
  Gauge& shared_memory_regions;
  Gauge& device_tensor_bytes;  // device memory that clients share
  Gauge& device_tensor_regions;
  Gauge& tls_certificate_expiry_timestamp_seconds;  // since the epoch; 0: no TLS
  Counter& tls_reload_failures;                     // changed files that could not be used
  Counter& token_reload_failures;
  Counter& metrics_token_reload_failures;

 private:
  void AddConstants(const Device& device);

  std::map<absl::string_view, Counter*> rejected_by_reason_;
  std::array<Counter*, 6> unauthenticated_;
  std::array<Counter*, 8> refused_connections_;
  std::array<Counter*, 10> refused_local_connections_;
  std::deque<DeviceMetrics> devices_;  // deques, because elements must not move
  std::deque<RpcMetrics> rpcs_;
  std::vector<std::function<void()>> on_scrape_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_METRICS_H_

// The setup of tests of the RPCs: server and requests, FP16, one layer, one KV head.
#ifndef FLASHCORE_TESTS_TRANSPORT_RPC_SETUP_H_
#define FLASHCORE_TESTS_TRANSPORT_RPC_SETUP_H_

#include <grpc/grpc.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/status.h"
#include "server/access/peer_user.h"
#include "server/transport/server.h"
#include "tests/base/loopback_connection.h"

namespace flashcore::server::testing {

inline constexpr uint32_t kHeadDim = 32;
inline constexpr size_t kRowBytes = kHeadDim * 2;  // of K, of V or of Q

// Keeps gRPC. It shuts down with its last object, and may then wait for 10 s for a thread that
// polls.
inline const bool kGrpcStays = [] {
  grpc_init();
  return true;
}();

// Longer than anything that a test waits for takes, also on a busy machine.
inline constexpr std::chrono::seconds kLong(60);

// Waits until `condition()` holds. False if it still does not after kLong.
template <typename Condition>
[[nodiscard]] bool WaitUntil(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kLong;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// The tests' identity to the server, over TCP.
inline const Identity kLoopback = [] {
  const LoopbackConnection connection("127.0.0.1");
  const std::optional<uid_t> user = PeerUsers().UserOf(connection.server.get(), connection.peer);
  return Identity{user.has_value() ? "uid:" + std::to_string(*user) : "host:127.0.0.1", {}};
}();

// The sum of a counter's series with this value of some label.
inline double CounterOf(const Metrics& metrics, const std::string& counter,
                        const std::string& value) {
  double sum = 0;
  for (const auto& family : metrics.Collect()) {
    if (family.name != counter) continue;
    for (const auto& metric : family.metric) {
      for (const auto& label : metric.label) {
        if (label.value == value) sum += metric.counter.value;
      }
    }
  }
  return sum;
}

inline Server::Options ServerOptions() {
  Server::Options options;
  options.listen = {"127.0.0.1:0"};
  options.max_message_bytes = 1 << 20;
  options.transport_memory_bytes = 64 << 20;
  options.max_stream_inflight = 4;
  options.version = "test";
  options.authenticator.insecure_client_names = true;
  return options;
}

inline v1::CreateSequenceRequest CreateRequest() {
  v1::CreateSequenceRequest request;
  request.set_num_layers(1);
  request.set_num_kv_heads(1);
  request.set_head_dim(kHeadDim);
  request.set_dtype(v1::DTYPE_FLOAT16);
  return request;
}

// The ErrorInfo of a status; empty if it has none.
inline v1::ErrorInfo InfoOf(const v1::Status& status) {
  v1::ErrorInfo info;
  if (status.details_size() > 0) info.ParseFromString(status.details(0).value());
  return info;
}
// Empty also if the details are not the same status.
inline v1::ErrorInfo InfoOf(const grpc::Status& status) {
  v1::Status details;
  const bool same = details.ParseFromString(status.error_details()) &&
                    details.code() == status.error_code() &&
                    details.message() == status.error_message();
  return same ? InfoOf(details) : v1::ErrorInfo();
}

// One query row for each sequence, and one row appended to it.
inline v1::AttendRequest StepRequest(const std::vector<std::string>& ids) {
  v1::AttendRequest request;
  for (const std::string& id : ids) {
    v1::Span* span = request.add_spans();
    span->set_query_rows(1);
    span->set_kv_rows(1);
    span->set_sequence_id(id);
  }
  request.set_dtype(v1::DTYPE_FLOAT16);
  request.set_num_heads(1);
  request.set_num_kv_heads(1);
  request.set_head_dim(kHeadDim);
  request.set_layout(v1::LAYOUT_NHD);
  for (std::string* tensor :
       {request.mutable_query(), request.mutable_key(), request.mutable_value()}) {
    tensor->assign(ids.size() * kRowBytes, '\0');
  }
  return request;
}

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_TRANSPORT_RPC_SETUP_H_

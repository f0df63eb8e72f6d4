// The way to one server: over gRPC, or over the server's local socket. Only Connection::Create asks
// which. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_TRANSPORT_H_
#define FLASHCORE_CLIENT_CPP_TRANSPORT_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/load_rows.h"
#include "client/cpp/stream_core.h"
#include "client/local/device_memory.h"
#include "client/local/memory.h"
#include "flashcore/attend.h"
#include "flashcore/attend_stream.h"
#include "flashcore/client.h"
#include "flashcore/options.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore::client {

// How the attempts of one asynchronous request travel. Start is called for one attempt after the
// other, Cancel from any thread.
class Attempts {
 public:
  using Done = std::function<void(absl::Status, AttendResult)>;

  virtual ~Attempts() = default;
  // `done` runs once, on a thread of the transport, or on this one if nothing could be sent.
  virtual void Start(Done done) = 0;
  // The attempt that runs, and any later one, ends with CANCELLED unless it has ended.
  virtual void Cancel() = 0;
  virtual size_t request_bytes() const = 0;  // of the message
};

// A lease that the server keeps until this is destroyed. Not thread-safe.
class HeldLease {
 public:
  explicit HeldLease(std::string id) : id_(std::move(id)) {}
  virtual ~HeldLease() = default;
  const std::string& id() const { return id_; }
  virtual bool ended() = 0;  // so far as is known

 private:
  const std::string id_;
};

// Makes one attempt of everything; Connection repeats it. A `call` has its deadline. Connects with
// the first call, and again with the first one after the connection has ended. Thread-safe.
class Transport {
 public:
  virtual ~Transport() = default;

  // A unary RPC of AttentionService: the request of the RPC Name is a NameRequest.
  virtual absl::Status Call(const google::protobuf::Message& request, const CallOptions& call,
                            google::protobuf::Message* response) = 0;
  // `request` has passed CheckRequest, as that of MakeAttempts and of a stream. Sets the result's
  // bytes, also if it fails.
  virtual absl::Status Attend(const AttendRequest& request, const CallOptions& call,
                              AttendResult* result) = 0;
  // Takes a copy of `request`, except for tensors in shared memory, its output and its LSE.
  virtual absl::StatusOr<std::unique_ptr<Attempts>> MakeAttempts(const AttendRequest& request,
                                                                 const CallOptions& call) = 0;
  // One attempt, in the order of a CUDA stream: Start, which is called once, enqueues on it. All
  // tensors are in memory that the server has. Connects if need be.
  virtual absl::StatusOr<std::unique_ptr<Attempts>> MakeCudaStreamAttempt(
      const AttendRequest& request, void* stream, const CallOptions& call) = 0;
  virtual std::shared_ptr<StreamCore> OpenStream(const StreamOptions& options) = 0;
  // Blocks until all rows are appended. After an error, the first may have been.
  virtual absl::StatusOr<v1::LoadSequenceResponse> LoadRows(const RowsToLoad& rows,
                                                            const CallOptions& call) = 0;
  virtual absl::StatusOr<std::unique_ptr<HeldLease>> HoldLease(const CallOptions& call) = 0;

  virtual absl::StatusOr<HealthStatus> CheckHealth(absl::string_view service,
                                                   const CallOptions& call) = 0;

  // Memory that the server maps, too; it is registered with each later connection.
  virtual absl::StatusOr<std::shared_ptr<local::Memory>> CreateMemory(size_t bytes,
                                                                      bool inputs_only,
                                                                      const CallOptions& call) = 0;
  virtual void RemoveMemory(const local::Memory* memory) = 0;
  virtual bool HasMemory(const local::Memory* memory) const = 0;
  // Memory of a GPU of the server; it is of one connection. `device_id`: empty for its first.
  virtual absl::StatusOr<std::shared_ptr<const local::DeviceMemory>> AllocateDeviceMemory(
      size_t bytes, const std::string& device_id, const CallOptions& call) = 0;
  virtual void RemoveDeviceMemory(const local::DeviceMemory* memory) = 0;
  virtual bool HasDeviceMemory(const local::DeviceMemory* memory) const = 0;

  // False if there is no connection by the deadline.
  virtual bool WaitForConnected(absl::Time deadline) = 0;
  // Before a call that blocks: waits a moment for a connection, if connecting has failed.
  virtual void AwaitConnection(absl::Time /*deadline*/) {}
  // After an attempt that ended with `status` and will be repeated; then, the wait before the next.
  virtual void PrepareRetry(const absl::Status& /*status*/) {}
  virtual void Pause(const absl::Status& /*status*/, absl::Duration wait) { absl::SleepFor(wait); }
  // The most bytes of a message that the server takes, from GetServerInfo.
  virtual void SetServerMessageBytes(size_t /*bytes*/) {}

  // `status` of a call that began at `begin`; kNoAnswer with how long it took and what that means.
  absl::Status ExplainDeadline(absl::Status status, absl::Time begin) const;

 private:
  virtual bool connected() const { return true; }  // so far as is known
};

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_TRANSPORT_H_

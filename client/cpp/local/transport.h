// The way to a server over its local socket, across its restarts. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_TRANSPORT_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_TRANSPORT_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/local/local_session.h"
#include "client/cpp/memory.h"
#include "client/cpp/transport.h"
#include "client/local/device_memory.h"
#include "client/local/memory.h"
#include "client/local/timed_mutex.h"

namespace flashcore::client::local {

class LocalTransport final : public Transport, public std::enable_shared_from_this<LocalTransport> {
 public:
  // INVALID_ARGUMENT if the path or the options make no sense for a local socket.
  static absl::StatusOr<std::shared_ptr<Transport>> Create(absl::string_view path,
                                                           const ClientOptions& options);

  absl::Status Call(const google::protobuf::Message& request, const CallOptions& call,
                    google::protobuf::Message* response) override;
  absl::Status Attend(const AttendRequest& request, const CallOptions& call,
                      AttendResult* result) override;
  absl::StatusOr<std::unique_ptr<Attempts>> MakeAttempts(const AttendRequest& request,
                                                         const CallOptions& call) override;
  absl::StatusOr<std::unique_ptr<Attempts>> MakeCudaStreamAttempt(const AttendRequest& request,
                                                                  void* stream,
                                                                  const CallOptions& call) override;
  std::shared_ptr<StreamCore> OpenStream(const StreamOptions& options) override;
  // Each chunk is a call of its own, with its tensors in registered memory.
  absl::StatusOr<v1::LoadSequenceResponse> LoadRows(const RowsToLoad& rows,
                                                    const CallOptions& call) override;
  absl::StatusOr<std::unique_ptr<HeldLease>> HoldLease(const CallOptions& call) override;
  // The local socket has no health service. A server that drains answers UNAVAILABLE.
  absl::StatusOr<HealthStatus> CheckHealth(absl::string_view service,
                                           const CallOptions& call) override;
  absl::StatusOr<std::shared_ptr<Memory>> CreateMemory(size_t bytes, bool inputs_only,
                                                       const CallOptions& call) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void RemoveMemory(const Memory* memory) override ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasMemory(const Memory* memory) const override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::shared_ptr<const DeviceMemory>> AllocateDeviceMemory(
      size_t bytes, const std::string& device_id, const CallOptions& call) override
      ABSL_LOCKS_EXCLUDED(mutex_);
  void RemoveDeviceMemory(const DeviceMemory* memory) override ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasDeviceMemory(const DeviceMemory* memory) const override ABSL_LOCKS_EXCLUDED(mutex_);
  bool WaitForConnected(absl::Time deadline) override;

  // The session, connected. UNAVAILABLE if there is no server.
  absl::StatusOr<std::shared_ptr<LocalSession>> Connect(SteadyTime deadline)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The memory that is shared.
  const RegionTable& regions() const { return regions_; }
  absl::Duration timeout() const { return timeout_; }

 private:
  LocalTransport(std::string path, const ClientOptions& options);

  struct Shared {
    std::shared_ptr<Memory> memory;
    bool read_only;
    std::string id = {};       // of the last connection that has it
    absl::Status status = {};  // of the last registration
  };

  struct OnGpu {
    std::shared_ptr<const DeviceMemory> memory;
    std::weak_ptr<LocalSession> session;  // that it belongs to
  };

  // With `session`. Maps and pins the memory: takes seconds for each GiB.
  static void Register(LocalSession* session, SteadyTime deadline, Shared* shared);
  // Tensors in the region stay there from now on; or are copied, if the registration failed.
  void Publish(const Shared& shared) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same for memory of a GPU; `id` is empty if it is lost.
  void Publish(const DeviceMemory& memory, const std::string& id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string path_;
  const std::string client_;
  const absl::Duration spin_;
  const absl::Duration timeout_;  // of a call without a deadline
  RegionTable regions_;
  TimedMutex connect_mutex_;  // one attempt to connect at a time
  mutable absl::Mutex mutex_;
  std::shared_ptr<LocalSession> session_ ABSL_GUARDED_BY(mutex_);  // null: not connected yet
  std::vector<Shared> shared_ ABSL_GUARDED_BY(mutex_);
  std::vector<OnGpu> on_gpu_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_TRANSPORT_H_

// One device and all that serves it: staging memory, sequences, the queue, a thread per lane, and a
// housekeeping thread.
#ifndef FLASHCORE_SERVER_ENGINE_ENGINE_H_
#define FLASHCORE_SERVER_ENGINE_ENGINE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/device/device.h"
#include "server/engine/batcher.h"
#include "server/engine/input_waits.h"
#include "server/kv/launch.h"
#include "server/kv/operation.h"
#include "server/kv/sequence_store.h"
#include "server/memory/staging_pool.h"
#include "server/request/request.h"
#include "server/request/validate.h"
#include "server/telemetry/device_metrics.h"

namespace flashcore::server {

using AdmitDone = absl::AnyInvocable<void(absl::Status)>;

// How long a request may keep a device that nobody else uses, if Engine::Options do not say.
inline constexpr double kDefaultRequestSeconds = 1;

// Thread-safe.
class Engine {
 public:
  struct Options {
    Batcher::Options batcher;          // idle_spin and speed are the device's
    SequenceStore::Options sequences;  // dtypes and head_dims are the device's
    size_t staging_memory_bytes = size_t{1} << 30;
    Nanoseconds staging_wait{0};      // how long a request may wait for it; 0: not at all
    size_t max_waiting_bytes = 0;     // see StagingPool
    size_t client_staging_bytes = 0;  // of one client, with results not yet read; 0: no limit
    uint32_t max_spans = 4096;        // of one request
    double max_request_flop = 0;      // of one request; 0: kDefaultRequestSeconds of the device
    std::vector<int> lane_cores;      // [lanes]: the core of each lane's thread; empty: any
    // Operations wait here until they can be enqueued. An idle lane prepares the launch of one, and
    // begins it when its inputs are ready. Null: none.
    InputWaits* input_waits = nullptr;

    // Called once, on a lane's thread, when the device is lost, with the error that revealed it.
    // From then on operations fail and new ones are refused.
    std::function<void(const DeviceInfo&, const absl::Status&)> on_device_lost;
  };

  // Starts the threads. `clock` and `metrics` outlive the engine.
  Engine(const Options& options, std::unique_ptr<Device> device, const Clock* clock,
         DeviceMetrics* metrics);
  // Runs what is queued, then stops the threads. Waits until every staging buffer is released.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Validates operation->request, leases its sequences, and acquires staging memory for its
  // tensors. While that memory is full, waits for it without a thread, with an alarm from
  // `make_alarm`; null: does not wait. Then the caller writes the input tensors, and calls Enqueue.
  //
  // Calls `done`, which may destroy the operation, exactly once: before this returns, or on the
  // alarm's thread after a wait. INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED (no staging
  // memory, also after Options::staging_wait), DEADLINE_EXCEEDED, CANCELLED.
  void Admit(AttendOperation* operation, AlarmFactory make_alarm, AdmitDone done);

  // Queues an admitted operation. OK means that operation->done will be called exactly once,
  // perhaps before this returns; an error means never. RESOURCE_EXHAUSTED if the queue is full,
  // UNAVAILABLE after Close.
  absl::Status Enqueue(AttendOperation* operation);

  // Lets a lane look for an operation in Options::input_waits.
  void WakeLane() {
    if (batcher_.MayStage()) batcher_.Wake();
  }

  // Refuses new operations; those already queued still run.
  void Close() { batcher_.Close(); }

  // Close, and ends with `status` all operations that are not running on the device now, also those
  // that have run in part, and those that wait for staging memory or would wait. Those that run in
  // part now end when their part has ended. Calls `done` of the others before it returns.
  void EndAll(const absl::Status& status);

  // Operations that were queued and have not ended.
  int64_t load() const { return load_.load(std::memory_order_relaxed); }
  int queued() const { return batcher_.depth(); }  // operations that wait for a lane

  const Device& device() const { return *device_; }
  const RequestLimits& limits() const { return limits_; }
  const Options& options() const { return options_; }
  SequenceStore& sequences() { return sequences_; }
  // SequenceStore::CloseLease. The housekeeping thread deletes the orphans, at once.
  void CloseLease(LeaseId id) ABSL_LOCKS_EXCLUDED(mutex_);
  const StagingPool& staging() const { return staging_; }
  StagingPool& staging() { return staging_; }
  const Clock& clock() const { return *clock_; }

 private:
  void WaitForStaging(AttendOperation* operation, std::unique_ptr<Alarm> alarm, AdmitDone done);

  void RunLane(int lane);
  // Runs the batch as one launch, or the next part of one, and completes it. `*launch` is the
  // lane's, for reuse.
  void RunBatch(int lane, const Batch& batch, Launch* launch);
  void RunPart(int lane, AttendOperation* operation);
  absl::Status RunLaunch(int lane, const Launch& launch);
  // Prepares the launch of an operation whose inputs are not ready, awaits them for a while, and
  // runs it. False: there was none that it could run.
  bool RunAhead(int lane, Launch* launch);
  // Begins the launch of `operation` alone, but not on the device. False: it may not be prepared;
  // the launch is to be ended.
  bool Stage(int lane, AttendOperation* operation, Launch* launch);
  std::optional<absl::Status> AwaitInputs(const InputWaits::Wait& wait) const;
  void BeginLaunch(absl::Span<AttendOperation* const> operations, Launch* launch);
  // Puts operations that were taken back into the queue.
  void Return(absl::Span<AttendOperation* const> operations);
  // For the metrics.
  void RecordLaunch(absl::Span<AttendOperation* const> operations);
  // `status` is that of the launch.
  void CompleteLaunch(Launch* launch, const absl::Status& status);
  // Ends an operation that will not run, or not any further.
  void Drop(AttendOperation* operation, const absl::Status& status);
  void Complete(AttendOperation* operation, absl::Status status);
  // On a lane's thread, because only lanes can copy pages.
  void MovePages(int lane);
  // Closes the engine if `status` says that the device is lost.
  void CheckDeviceLost(const absl::Status& status);
  void RunHousekeeping() ABSL_LOCKS_EXCLUDED(mutex_);

  const Options options_;
  const Clock* const clock_;
  DeviceMetrics* const metrics_;
  const std::unique_ptr<Device> device_;
  const RequestLimits limits_;
  StagingPool staging_;
  SequenceStore sequences_;
  Batcher batcher_;
  std::atomic<bool> moves_due_{false};
  std::atomic<bool> device_lost_{false};
  std::atomic<int64_t> load_{0};

  Mutex mutex_;
  CondVar wake_;  // the housekeeper
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_orphans_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> lanes_;
  std::thread housekeeper_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ENGINE_ENGINE_H_

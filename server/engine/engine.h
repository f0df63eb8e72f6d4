// Everything between the transport and the devices: staging memory, sequences, the queue, the
// lanes' threads, and one that keeps house.
#ifndef FLASHCORE_SERVER_ENGINE_ENGINE_H_
#define FLASHCORE_SERVER_ENGINE_ENGINE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/device/device.h"
#include "server/engine/batcher.h"
#include "server/kv/launch.h"
#include "server/kv/sequence_store.h"
#include "server/memory/staging_pool.h"
#include "server/request/request.h"
#include "server/request/validate.h"
#include "server/telemetry/device_metrics.h"

namespace flashcore::server {

// Thread-safe.
class Engine {
 public:
  struct Options {
    Batcher::Options batcher;          // idle_spin is the device's
    SequenceStore::Options sequences;  // dtypes and head_dims are the device's
    size_t staging_memory_bytes = size_t{1} << 30;
    Nanoseconds staging_wait{0};     // how long a request waits for it; 0: not at all
    size_t max_waiting_bytes = 0;    // inputs of those that wait; the first may have more
    uint32_t max_spans = 4096;       // of one request
    uint32_t max_heads = 1024;       // of one request
    double max_request_flop = 4e12;  // of one request; see RequestLimits
    std::vector<int> lane_cores;     // [lanes]: where each lane's thread stays; empty: anywhere

    // Called once, by a lane's thread, when the device is lost, with the error that showed it:
    // operations fail from then on, and new ones are refused.
    std::function<void(const DeviceInfo&, const absl::Status&)> on_device_lost;
  };

  // Starts its threads, one per lane of `device` and one more. `clock` and `metrics` outlive the
  // engine.
  Engine(const Options& options, std::unique_ptr<Device> device, const Clock* clock,
         DeviceMetrics* metrics);
  // Runs what is queued, then stops the threads. Every staging buffer has come back.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Checks `operation->request`, finds its sequences, and takes staging memory for its tensors,
  // which the caller then fills. INVALID_ARGUMENT, NOT_FOUND, or RESOURCE_EXHAUSTED if there is no
  // staging memory now.
  absl::Status Prepare(AttendOperation* operation);

  // Where an operation that found none may wait for it: staging().Wait(operation->tensors.claim()).
  StagingPool& staging() { return staging_; }

  // Queues a prepared operation whose input tensors are in place. OK means that operation->done
  // will be called exactly once, perhaps before this returns; an error means never.
  // RESOURCE_EXHAUSTED if the queue is full, UNAVAILABLE after Close.
  absl::Status Submit(AttendOperation* operation);

  // Refuses new operations; those already queued still run.
  void Close() { batcher_.Close(); }

  // Requests that were submitted and have not ended.
  int64_t load() const { return load_.load(std::memory_order_relaxed); }

  const Device& device() const { return *device_; }
  const RequestLimits& limits() const { return limits_; }
  const Options& options() const { return options_; }
  SequenceStore& sequences() { return sequences_; }
  const Clock& clock() const { return *clock_; }

 private:
  // A batch on a lane, from BeginLaunch to EndLaunch.
  struct Flight {
    Batch batch;
    Launch launch;
  };

  void RunLane(int lane);
  // Runs flight->batch as one launch, and ends it.
  void RunBatch(int lane, Flight* flight);
  // `status` is that of the launch.
  void EndBatch(Flight* flight, const absl::Status& status);
  // On a lane, because only a lane can copy.
  void MovePages(int lane);
  void KeepHouse() ABSL_LOCKS_EXCLUDED(mutex_);
  void Finish(AttendOperation* operation, absl::Status status);
  // If `status` says that it is.
  void LoseDevice(const absl::Status& status);

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
  CondVar stopping_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> lanes_;
  std::thread housekeeper_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ENGINE_ENGINE_H_

#include "server/engine/engine.h"

#include <chrono>
#include <utility>

#include "server/base/cores.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

// How often idle sequences are looked for and K/V is placed anew.
constexpr std::chrono::milliseconds kHousekeepingInterval(500);

// Of K/V that changes its segment at a time: a lane is busy with it for some milliseconds at most.
constexpr size_t kMaxMoveBytes = size_t{8} << 20;

SequenceStore::Options Within(const RequestLimits& limits, SequenceStore::Options options) {
  options.dtypes = limits.dtypes;
  options.head_dims = limits.head_dims;
  return options;
}

Batcher::Options With(Nanoseconds idle_spin, Batcher::Options options) {
  options.idle_spin = idle_spin;
  return options;
}

}  // namespace

Engine::Engine(const Options& options, std::unique_ptr<Device> device, const Clock* clock,
               DeviceMetrics* metrics)
    : options_(options),
      clock_(clock),
      metrics_(metrics),
      device_(std::move(device)),
      limits_{options.max_spans, options.max_heads, SupportedDTypes(*device_),
              SupportedHeadDims(*device_), options.max_request_flop},
      staging_(options.staging_memory_bytes, device_->staging_allocator(),
               options.max_waiting_bytes),
      sequences_(Within(limits_, options.sequences), device_->kv_memory(), clock, metrics),
      batcher_(With(device_->info().idle_spin, options.batcher), clock) {
  for (int lane = 0; lane < device_->info().lanes; ++lane) {
    lanes_.emplace_back([this, lane] { RunLane(lane); });
  }
  housekeeper_ = std::thread([this] { KeepHouse(); });
}

Engine::~Engine() {
  Close();
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    stopping_.NotifyAll();
  }
  housekeeper_.join();
  for (std::thread& lane : lanes_) lane.join();
}

absl::Status Engine::Prepare(AttendOperation* operation) {
  const AttendRequest& request = operation->request;
  if (absl::Status status = ValidateAttend(request, limits_); !status.ok()) return status;
  if (absl::Status status = sequences_.Lease(operation); !status.ok()) return status;
  if (absl::Status status = ValidateWork(request, operation->sequence_lengths, limits_);
      !status.ok()) {
    return status;
  }
  return operation->tensors.Allocate(request, &staging_);
}

absl::Status Engine::Submit(AttendOperation* operation) {
  load_.fetch_add(1, std::memory_order_relaxed);
  metrics_->queue_depth.Increment();  // first, so that the lane cannot take it off before it is on
  AttendOperation* displaced = nullptr;
  absl::Status status = batcher_.Enqueue(operation, &displaced);
  if (!status.ok()) {
    metrics_->queue_depth.Decrement();
    load_.fetch_sub(1, std::memory_order_relaxed);
  }
  if (displaced != nullptr) {
    metrics_->queue_depth.Decrement();
    Finish(displaced, absl::ResourceExhaustedError(
                          "the request queue is full, and most of it is this client's: the "
                          "request made room for another client's"));
  }
  return status;
}

void Engine::RunLane(int lane) {
  if (!options_.lane_cores.empty()) {
    const absl::Status pinned = StayOnCores({options_.lane_cores[lane]});
    if (!pinned.ok()) LogWarning("a lane's thread is not pinned", {{"error", pinned.message()}});
  }
  Flight flight;
  const Batch& batch = flight.batch;
  while (batcher_.Take(&flight.batch)) {
    metrics_->queue_depth.Decrement(
        static_cast<double>(batch.operations.size() + batch.dropped.size()));
    for (const auto& [operation, status] : batch.dropped) Finish(operation, status);
    if (!batch.operations.empty()) RunBatch(lane, &flight);
    if (moves_due_.exchange(false)) MovePages(lane);
  }
}

void Engine::RunBatch(int lane, Flight* flight) {
  const Batch& batch = flight->batch;
  Launch* const launch = &flight->launch;
  const TimePoint taken = clock_->Now();
  int64_t query_rows = 0;
  for (AttendOperation* operation : batch.operations) {
    operation->times.queue = taken - operation->submitted;
    metrics_->PhaseSeconds(Phase::kQueue).Observe(Seconds(operation->times.queue));
    query_rows += operation->request.query_rows();
  }
  metrics_->batch_requests.Observe(static_cast<double>(batch.operations.size()));
  metrics_->batch_query_rows.Observe(static_cast<double>(query_rows));

  sequences_.BeginLaunch(batch.operations, launch);
  absl::Status status;
  if (!launch->operations.empty()) {
    status = device_->Dispatch(lane, *launch);
    if (status.ok()) status = device_->Complete(lane);
  }
  EndBatch(flight, status);
}

void Engine::EndBatch(Flight* flight, const absl::Status& status) {
  Launch* const launch = &flight->launch;
  LoseDevice(status);
  sequences_.EndLaunch(*launch, status.ok());
  batcher_.Release(flight->batch);
  for (AttendOperation* operation : launch->operations) {
    if (status.ok()) {
      metrics_->PhaseSeconds(Phase::kCopyIn).Observe(Seconds(operation->times.copy_in));
      metrics_->PhaseSeconds(Phase::kKernel).Observe(Seconds(operation->times.kernel));
      metrics_->PhaseSeconds(Phase::kCopyOut).Observe(Seconds(operation->times.copy_out));
    }
    Finish(operation, status);
  }
  for (auto& [operation, reason] : launch->refused) Finish(operation, std::move(reason));
}

void Engine::MovePages(int lane) {
  if (sequences_.ShouldResetPersistingL2()) {
    if (absl::Status status = device_->ResetPersistingL2(); !status.ok()) {
      LogWarning("the L2 still keeps what was pinned", {{"error", status.message()}});
    }
  }
  const PageMoves moves = sequences_.BeginMoves(kMaxMoveBytes);
  if (moves.empty()) return;
  bool ok = true;
  for (const PageMoves::Group& group : moves.groups) {
    const absl::Status status = device_->CopyPages(lane, group.page_bytes, group.copies);
    LoseDevice(status);
    ok = status.ok() && ok;
  }
  sequences_.EndMoves(moves, ok);
}

void Engine::KeepHouse() {
  const bool places = sequences_.stats().hot.capacity_bytes > 0;
  auto next = std::chrono::steady_clock::now();
  MutexLock lock(&mutex_);
  while (!stop_) {
    next += kHousekeepingInterval;
    while (!stop_ && stopping_.WaitUntil(&mutex_, next)) {
    }
    sequences_.ExpireIdle();
    if (places) {
      moves_due_ = true;
      batcher_.Wake();
    }
  }
}

void Engine::LoseDevice(const absl::Status& status) {
  if (!IsDeviceLost(status) || device_lost_.exchange(true)) return;
  Close();
  if (options_.on_device_lost) options_.on_device_lost(device_->info(), status);
}

void Engine::Finish(AttendOperation* operation, absl::Status status) {
  if (status.ok()) status = operation->request.CheckRegions();
  operation->tensors.ReleaseInputs();
  operation->sequences.Reset();
  load_.fetch_sub(1, std::memory_order_relaxed);
  auto done = std::move(operation->done);  // which may destroy the operation
  done(std::move(status));
}

}  // namespace flashcore::server

#include "server/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/cores.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

// How often idle sequences are expired and page moves are scheduled.
constexpr std::chrono::milliseconds kHousekeepingInterval(500);

// Limit on the K/V that one round of page moves copies: it occupies a lane for a few milliseconds.
constexpr size_t kMaxMoveBytes = size_t{8} << 20;

// Completes the options with what the device says.
Engine::Options WithDevice(Engine::Options options, const Device& device) {
  options.batcher.idle_spin = device.info().idle_spin;
  options.sequences.dtypes = SupportedDTypes(device);
  options.sequences.head_dims = SupportedHeadDims(device);
  options.sequences.max_request_flop = options.max_request_flop;
  return options;
}

}  // namespace

Engine::Engine(const Options& options, std::unique_ptr<Device> device, const Clock* clock,
               DeviceMetrics* metrics)
    : options_(WithDevice(options, *device)),
      clock_(clock),
      metrics_(metrics),
      device_(std::move(device)),
      limits_{options.max_spans, options.max_heads, options_.sequences.dtypes,
              options_.sequences.head_dims, options.max_request_flop},
      staging_(options.staging_memory_bytes, device_->staging_allocator(),
               options.max_waiting_bytes, options.client_staging_bytes),
      sequences_(options_.sequences, device_->kv_memory(), clock, metrics),
      batcher_(options_.batcher, clock) {
  for (int lane = 0; lane < device_->info().lanes; ++lane) {
    lanes_.emplace_back([this, lane] { RunLane(lane); });
  }
  housekeeper_ = std::thread([this] { RunHousekeeping(); });
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

absl::Status Engine::Validate(AttendOperation* operation) {
  const AttendRequest& request = operation->request;
  if (absl::Status status = ValidateAttend(request, limits_); !status.ok()) return status;
  if (absl::Status status = sequences_.Lease(operation); !status.ok()) return status;
  return ValidateWork(request, operation->sequence_lengths, limits_.max_flop);
}

void Engine::Admit(AttendOperation* operation, AlarmFactory make_alarm, AdmitDone done) {
  absl::Status status = Validate(operation);
  if (status.ok()) {
    operation->tensors.claim()->client = operation->identity.name;
    status = operation->tensors.Allocate(operation->request, &staging_);
    if (!status.ok() && make_alarm != nullptr && options_.staging_wait > Nanoseconds(0)) {
      WaitForStaging(operation, make_alarm(), std::move(done));
      return;
    }
  }
  done(std::move(status));
}

void Engine::WaitForStaging(AttendOperation* operation, std::unique_ptr<Alarm> alarm,
                            AdmitDone done) {
  const TimePoint start = clock_->Now();
  const Nanoseconds to_deadline = std::max(operation->deadline - start, Nanoseconds(0));
  const bool by_deadline = to_deadline <= options_.staging_wait;
  auto end = [this, operation, start, by_deadline,
              done = std::move(done)](absl::Status status) mutable {
    operation->times.staging_wait = clock_->Now() - start;
    if (absl::IsDeadlineExceeded(status) && !by_deadline) {
      const absl::Status full = staging_.FullError(*operation->tensors.claim());
      status = absl::ResourceExhaustedError(absl::StrCat(full.message(), "; it has waited for ",
                                                         Seconds(options_.staging_wait), " s"));
    }
    done(std::move(status));
  };
  operation->staging_wait.Start(&staging_, operation->tensors.claim(),
                                std::min(to_deadline, options_.staging_wait), std::move(alarm),
                                std::move(end));
}

absl::Status Engine::Enqueue(AttendOperation* operation) {
  load_.fetch_add(1, std::memory_order_relaxed);
  metrics_->queue_depth.Increment();  // before a lane can subtract it
  AttendOperation* displaced = nullptr;
  absl::Status status = batcher_.Enqueue(operation, &displaced);
  if (!status.ok()) {
    metrics_->queue_depth.Decrement();
    load_.fetch_sub(1, std::memory_order_relaxed);
  }
  if (displaced != nullptr) {
    metrics_->queue_depth.Decrement();
    Complete(displaced, absl::ResourceExhaustedError(
                            "the request queue is full, and most of it is this client's: the "
                            "request made room for another client's"));
  }
  return status;
}

void Engine::EndAll(const absl::Status& status) { staging_.EndWaits(status); }

void Engine::RunLane(int lane) {
  if (!options_.lane_cores.empty()) {
    const absl::Status pinned = StayOnCores({options_.lane_cores[lane]});
    if (!pinned.ok()) LogWarning("a lane's thread is not pinned", {{"error", pinned.message()}});
  }
  Batch batch;
  Launch launch;
  while (batcher_.Take(&batch)) {
    metrics_->queue_depth.Decrement(
        static_cast<double>(batch.operations.size() + batch.dropped.size()));
    for (const auto& [operation, status] : batch.dropped) Complete(operation, status);
    if (!batch.operations.empty()) RunBatch(lane, batch, &launch);
    if (moves_due_.exchange(false)) MovePages(lane);
  }
}

void Engine::RunBatch(int lane, const Batch& batch, Launch* launch) {
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
  CompleteBatch(batch, launch, status);
}

void Engine::CompleteBatch(const Batch& batch, Launch* launch, const absl::Status& status) {
  CheckDeviceLost(status);
  sequences_.EndLaunch(*launch, status.ok());
  batcher_.Release(batch);
  for (AttendOperation* operation : launch->operations) {
    if (status.ok()) {
      metrics_->PhaseSeconds(Phase::kCopyIn).Observe(Seconds(operation->times.copy_in));
      metrics_->PhaseSeconds(Phase::kKernel).Observe(Seconds(operation->times.kernel));
      metrics_->PhaseSeconds(Phase::kCopyOut).Observe(Seconds(operation->times.copy_out));
    }
    Complete(operation, status);
  }
  for (auto& [operation, reason] : launch->refused) Complete(operation, std::move(reason));
}

void Engine::MovePages(int lane) {
  if (sequences_.ShouldResetPersistingL2()) {
    if (absl::Status status = device_->ResetPersistingL2(); !status.ok()) {
      LogWarning("cannot reset persisting L2 lines", {{"error", status.message()}});
    }
  }
  const PageMoves moves = sequences_.BeginMoves(kMaxMoveBytes);
  if (moves.empty()) return;
  bool ok = true;
  for (const PageMoves::Group& group : moves.groups) {
    const absl::Status status = device_->CopyPages(lane, group.page_bytes, group.copies);
    CheckDeviceLost(status);
    ok = status.ok() && ok;
  }
  sequences_.EndMoves(moves, ok);
}

void Engine::RunHousekeeping() {
  const bool has_hot_segment = sequences_.stats().hot.capacity_bytes > 0;
  auto next = std::chrono::steady_clock::now();
  MutexLock lock(&mutex_);
  while (!stop_) {
    next += kHousekeepingInterval;
    while (!stop_ && stopping_.WaitUntil(&mutex_, next)) {
    }
    sequences_.ExpireIdle();
    if (has_hot_segment) {
      moves_due_ = true;
      batcher_.Wake();
    }
  }
}

void Engine::CheckDeviceLost(const absl::Status& status) {
  if (!IsDeviceLost(status) || device_lost_.exchange(true)) return;
  Close();
  if (options_.on_device_lost) options_.on_device_lost(device_->info(), status);
}

void Engine::Complete(AttendOperation* operation, absl::Status status) {
  if (status.ok()) status = operation->request.CheckRegions();
  operation->tensors.ReleaseInputs();
  operation->sequences.Reset();
  load_.fetch_sub(1, std::memory_order_relaxed);
  auto done = std::move(operation->done);  // may destroy the operation
  done(std::move(status));
}

}  // namespace flashcore::server

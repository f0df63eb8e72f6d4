#include "server/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/cores.h"
#include "server/base/error_info.h"
#include "server/engine/work.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

// How often idle sequences are expired, unneeded memory given back and page moves scheduled.
constexpr std::chrono::milliseconds kHousekeepingInterval(500);

// Limit on the K/V that one round of page moves copies: it occupies a lane for a few milliseconds.
constexpr size_t kMaxMoveBytes = size_t{8} << 20;

// How long a lane awaits the inputs of a launch that it has prepared: beyond most layers of a
// model. Meanwhile memory that was freed stays in use (PagePool), and the thread polls.
constexpr std::chrono::milliseconds kMostStaged(5);

// Completes the options with what the device says.
Engine::Options WithDevice(Engine::Options options, const Device& device) {
  options.batcher.idle_spin = device.info().idle_spin;
  options.batcher.speed = device.info().speed;
  if (options.max_request_flop == 0) {
    options.max_request_flop = kDefaultRequestSeconds * device.info().speed.flop_per_s;
  }
  options.sequences.dtypes = SupportedDTypes(device);
  for (const auto kv_dtype :
       {kernels::KvDType::kSameAsQuery, kernels::KvDType::kFloat8E4M3, kernels::KvDType::kInt8}) {
    options.sequences.head_dims[kv_dtype] = SupportedHeadDims(device, kv_dtype);
  }
  options.sequences.max_request_flop = options.max_request_flop;
  if (options.sequences.client_kv_bytes == SequenceOptions::kHalfOfTheMemory) {
    options.sequences.client_kv_bytes = device.kv_memory().bytes / 2;
  }
  return options;
}

}  // namespace

Engine::Engine(const Options& options, std::unique_ptr<Device> device, const Clock* clock,
               DeviceMetrics* metrics)
    : options_(WithDevice(options, *device)),
      clock_(clock),
      metrics_(metrics),
      device_(std::move(device)),
      limits_{options.max_spans, options.sequences.max_heads, options_.sequences.dtypes,
              options_.sequences.head_dims.at(kernels::KvDType::kSameAsQuery),
              options_.max_request_flop},
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
    wake_.NotifyAll();
  }
  housekeeper_.join();
  for (std::thread& lane : lanes_) lane.join();
}

void Engine::Admit(AttendOperation* operation, AlarmFactory make_alarm, AdmitDone done) {
  absl::Status status = ValidateAttend(operation->request, limits_);
  if (status.ok()) status = sequences_.Lease(operation);
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
      status = WithMessage(full, absl::StrCat(full.message(), "; it has waited for ",
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
    Complete(displaced, WithInfo(absl::ResourceExhaustedError(
                                     "the request queue is full, and most of it is this client's: "
                                     "the request made room for another client's"),
                                 reason::kQueueFull));
  }
  return status;
}

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
    for (const auto& [operation, status] : batch.dropped) Drop(operation, status);
    if (!batch.operations.empty()) RunBatch(lane, batch, &launch);
    if (moves_due_.exchange(false)) MovePages(lane);
    while (RunAhead(lane, &launch)) {
    }
  }
}

void Engine::RunBatch(int lane, const Batch& batch, Launch* launch) {
  AttendOperation* const first = batch.operations.front();
  if (first->cut != nullptr) return RunPart(lane, first);
  const TimePoint taken = clock_->Now();
  for (AttendOperation* operation : batch.operations) {
    operation->times.queue = taken - operation->submitted;
  }
  BeginLaunch(batch.operations, launch);
  if (launch->operations.size() == 1) {
    AttendOperation* const operation = launch->operations.front();
    if (operation->work > options_.batcher.max_launch) {
      operation->cut = Cut(*device_, options_.batcher.max_launch, launch);
      if (operation->cut != nullptr) return RunPart(lane, operation);
    }
  }
  CompleteLaunch(launch, launch->operations.empty() ? absl::OkStatus() : RunLaunch(lane, *launch));
}

bool Engine::RunAhead(int lane, Launch* launch) {
  // Without time to spin, a lane's thread must not poll.
  if (options_.input_waits == nullptr || options_.batcher.idle_spin == Nanoseconds(0)) return false;
  if (!batcher_.MayStage()) return false;
  std::optional<InputWaits::Wait> wait = options_.input_waits->Lend(options_.sequences.device);
  if (!wait.has_value()) return false;
  AttendOperation* const operation = wait->operation;
  if (!batcher_.BeginStaging(operation)) {
    options_.input_waits->GiveBack(*std::move(wait));
    return false;
  }
  std::optional<absl::Status> end;
  if (Stage(lane, operation, launch)) end = AwaitInputs(*wait);
  if (!end.has_value() || !end->ok()) {
    sequences_.EndLaunch(*launch, false);
    batcher_.EndStaging(operation, /*launched=*/false);
    if (end.has_value()) {
      InputWaits::End(*std::move(wait), *std::move(end));
    } else {
      wait->staged = true;
      options_.input_waits->GiveBack(*std::move(wait));
    }
    return false;
  }
  wait.reset();  // when the operation has ended, nothing here uses its memory
  load_.fetch_add(1, std::memory_order_relaxed);
  absl::Status status = device_->Dispatch(lane, *launch);
  batcher_.EndStaging(operation, /*launched=*/true);
  RecordLaunch(launch->operations);
  if (status.ok()) status = device_->Complete(lane);
  CheckDeviceLost(status);
  CompleteLaunch(launch, status);
  return true;
}

bool Engine::Stage(int lane, AttendOperation* operation, Launch* launch) {
  const auto fits = [&](AttendOperation* one) {
    one->work = EstimateWork(*one, /*is_launched=*/true, options_.batcher.speed);
    return one->work <= options_.batcher.max_launch;
  };
  if (sequences_.BeginLaunch({&operation, 1}, fits, launch) == 0) return false;
  // Refused it may be because an operation before it has not run.
  if (launch->operations.empty() || operation->work > options_.batcher.max_launch) return false;
  launch->staged = device_->Stage(lane, *launch).ok();
  return launch->staged;
}

std::optional<absl::Status> Engine::AwaitInputs(const InputWaits::Wait& wait) const {
  const TimePoint last = clock_->Now() + kMostStaged;
  while (true) {
    const TimePoint now = clock_->Now();
    std::optional<absl::Status> end = wait.EndAt(now);
    if (end.has_value() || batcher_.StagingMustEnd() || now >= last) return end;
    std::this_thread::yield();
  }
}

absl::Status Engine::RunLaunch(int lane, const Launch& launch) {
  absl::Status status = device_->Dispatch(lane, launch);
  if (status.ok()) status = device_->Complete(lane);
  CheckDeviceLost(status);
  return status;
}

void Engine::RunPart(int lane, AttendOperation* operation) {
  CutLaunch& cut = *operation->cut;
  if (cut.done > 0) operation->times.queue += clock_->Now() - cut.queued;
  const absl::Status status = RunLaunch(lane, cut.launch);
  if (status.ok() && cut.Next()) {
    cut.queued = clock_->Now();
    return Return({&operation, 1});
  }
  Launch launch = std::move(cut.launch);
  operation->cut.reset();
  CompleteLaunch(&launch, status);
}

// Begins a launch of as many of the operations as have time in one. The others return to the queue:
// sequences may have grown since it estimated their work. Completes those that are refused.
void Engine::BeginLaunch(absl::Span<AttendOperation* const> operations, Launch* launch) {
  Nanoseconds work{0};
  const auto fits = [&](AttendOperation* operation) {
    operation->work = EstimateWork(*operation, /*is_launched=*/true, options_.batcher.speed);
    const bool is_first = work == Nanoseconds(0);
    work += operation->work;
    return is_first || work <= options_.batcher.max_launch;
  };
  const size_t fit = sequences_.BeginLaunch(operations, fits, launch);
  if (fit < operations.size()) Return(operations.subspan(fit));
  RecordLaunch(operations.first(fit));
  for (auto& [operation, reason] : std::exchange(launch->refused, {})) {
    batcher_.Release({&operation, 1});
    Complete(operation, std::move(reason));
  }
}

void Engine::RecordLaunch(absl::Span<AttendOperation* const> operations) {
  int64_t query_rows = 0;
  for (const AttendOperation* operation : operations) {
    metrics_->PhaseSeconds(Phase::kQueue, operation->rpc).Observe(Seconds(operation->times.queue));
    query_rows += operation->request.query_rows();
  }
  metrics_->batch_requests.Observe(static_cast<double>(operations.size()));
  metrics_->batch_query_rows.Observe(static_cast<double>(query_rows));
}

void Engine::Return(absl::Span<AttendOperation* const> operations) {
  const auto count = static_cast<double>(operations.size());
  metrics_->queue_depth.Increment(count);  // before a lane can subtract it
  const absl::Status ended = batcher_.Return(operations);
  if (ended.ok()) return;
  metrics_->queue_depth.Decrement(count);
  for (AttendOperation* operation : operations) {
    if (operation->cut == nullptr) batcher_.Release({&operation, 1});
    Drop(operation, ended);
  }
}

void Engine::CompleteLaunch(Launch* launch, const absl::Status& status) {
  sequences_.EndLaunch(*launch, status.ok());
  batcher_.Release(launch->operations);
  for (AttendOperation* operation : launch->operations) {
    if (status.ok()) {
      const PhaseTimes& times = operation->times;
      const auto observe = [&](Phase phase, Nanoseconds time) {
        metrics_->PhaseSeconds(phase, operation->rpc).Observe(Seconds(time));
      };
      observe(Phase::kCopyIn, times.copy_in);
      observe(Phase::kKernel, times.kernel);
      observe(Phase::kCopyOut, times.copy_out);
    }
    Complete(operation, status);
  }
}

void Engine::Drop(AttendOperation* operation, const absl::Status& status) {
  if (operation->cut != nullptr) {
    Launch launch = std::move(operation->cut->launch);
    operation->cut.reset();
    sequences_.EndLaunch(launch, false);
    batcher_.Release({&operation, 1});
  }
  Complete(operation, status);
}

void Engine::EndAll(const absl::Status& status) {
  staging_.EndWaits(status);
  for (AttendOperation* operation : batcher_.EndAll(status)) {
    metrics_->queue_depth.Decrement();
    Drop(operation, status);
  }
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

void Engine::CloseLease(LeaseId id) {
  sequences_.CloseLease(id);
  MutexLock lock(&mutex_);
  has_orphans_ = true;
  wake_.NotifyAll();
}

void Engine::RunHousekeeping() {
  const bool has_hot_segment = sequences_.stats().hot.capacity_bytes > 0;
  auto next = std::chrono::steady_clock::now() + kHousekeepingInterval;
  MutexLock lock(&mutex_);
  while (!stop_) {
    if (!has_orphans_) wake_.WaitUntil(&mutex_, next);
    if (std::exchange(has_orphans_, false)) {
      mutex_.unlock();
      while (sequences_.DeleteOrphan()) {
      }
      mutex_.lock();
    }
    if (stop_ || std::chrono::steady_clock::now() < next) continue;
    next += kHousekeepingInterval;
    sequences_.ExpireIdle();
    mutex_.unlock();
    while (sequences_.GiveBackUnneeded()) {
    }
    mutex_.lock();
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

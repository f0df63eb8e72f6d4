#include "server/core/engine.h"

#include <utility>

namespace flashcore::server {

Engine::Engine(const Options& options, std::unique_ptr<Device> device, const Clock* clock,
               Metrics* metrics)
    : options_(options),
      clock_(clock),
      metrics_(metrics),
      device_(std::move(device)),
      limits_{options.max_spans, options.max_heads, SupportedHeadDims(*device_),
              options.max_request_flop},
      staging_(options.staging_memory_bytes, device_->staging_allocator()),
      batcher_(options.batcher, clock) {
  for (int lane = 0; lane < device_->info().lanes; ++lane) {
    lanes_.emplace_back([this, lane] { RunLane(lane); });
  }
}

Engine::~Engine() {
  Close();
  for (std::thread& lane : lanes_) lane.join();
}

absl::Status Engine::Prepare(AttendOperation* operation) {
  if (absl::Status status = ValidateAttend(operation->request, limits_); !status.ok()) {
    return status;
  }
  return operation->tensors.Allocate(operation->request, &staging_);
}

absl::Status Engine::Submit(AttendOperation* operation) {
  metrics_->queue_depth.Add(1);  // first, so that the lane cannot take it off before it is on
  absl::Status status = batcher_.Enqueue(operation);
  if (!status.ok()) metrics_->queue_depth.Add(-1);
  return status;
}

void Engine::RunLane(int lane) {
  Batch batch;
  while (batcher_.Take(&batch)) {
    metrics_->queue_depth.Add(
        -static_cast<int64_t>(batch.operations.size() + batch.dropped.size()));
    for (auto& [operation, status] : batch.dropped) Finish(operation, std::move(status));
    if (!batch.operations.empty()) RunBatch(lane, batch);
  }
}

void Engine::RunBatch(int lane, const Batch& batch) {
  const TimePoint taken = clock_->Now();
  int64_t query_rows = 0;
  for (AttendOperation* operation : batch.operations) {
    operation->times.queue = taken - operation->submitted;
    metrics_->PhaseSeconds(Phase::kQueue).Observe(Seconds(operation->times.queue));
    query_rows += operation->query_rows;
  }
  metrics_->batch_requests.Observe(static_cast<double>(batch.operations.size()));
  metrics_->batch_query_rows.Observe(static_cast<double>(query_rows));

  const absl::Status status = device_->Run(lane, batch.operations);
  for (AttendOperation* operation : batch.operations) {
    if (status.ok()) {
      metrics_->PhaseSeconds(Phase::kCopyIn).Observe(Seconds(operation->times.copy_in));
      metrics_->PhaseSeconds(Phase::kKernel).Observe(Seconds(operation->times.kernel));
      metrics_->PhaseSeconds(Phase::kCopyOut).Observe(Seconds(operation->times.copy_out));
    }
    Finish(operation, status);
  }
}

void Engine::Finish(AttendOperation* operation, absl::Status status) {
  operation->tensors.ReleaseInputs();
  operation->done(std::move(status));
}

}  // namespace flashcore::server

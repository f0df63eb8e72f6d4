#include "server/transport/tensor_receiver.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/wire.h"

namespace flashcore::server {

void TensorReceiver::Start(const absl::Status& parsed,
                           std::function<void(const absl::Status&)> done) {
  done_ = std::move(done);
  absl::Status status = parsed;
  if (status.ok()) status = fleet_->Prepare(operation_);
  const bool waits = parsed.ok() && absl::IsResourceExhausted(status) &&
                     operation_->engine->options().staging_wait > Nanoseconds(0);
  if (waits) {
    Wait();
  } else {
    Finish(status);
  }
}

void TensorReceiver::Cancel() {
  MutexLock lock(&mutex_);
  operation_->cancelled = true;
  if (alarm_.has_value()) alarm_->Cancel();
}

void TensorReceiver::Wait() {
  wait_start_ = fleet_->clock().Now();
  const Nanoseconds longest =
      std::min(operation_->engine->options().staging_wait,
               std::max(operation_->deadline - wait_start_, Nanoseconds(0)));
  MutexLock lock(&mutex_);
  alarm_.emplace();
  alarm_->Set(std::chrono::system_clock::now() + longest, [this](bool /*expired*/) { EndWait(); });
  StagingClaim* const claim = operation_->tensors.claim();
  claim->granted = [this] { alarm_->Cancel(); };
  refusal_ = operation_->cancelled ? absl::CancelledError("cancelled by the client")
                                   : operation_->engine->staging().Wait(claim);
  if (!refusal_.ok()) alarm_->Cancel();
}

void TensorReceiver::EndWait() {
  absl::Status status;
  {
    MutexLock lock(&mutex_);  // Wait may still hold it
    status = refusal_;
  }
  StagingPool& staging = operation_->engine->staging();
  if (status.ok() && !staging.Leave(operation_->tensors.claim())) status = WhyNoMemory();
  operation_->times.staging_wait = fleet_->clock().Now() - wait_start_;
  metrics_->staging_wait_seconds.Observe(Seconds(operation_->times.staging_wait));
  Finish(status);
}

absl::Status TensorReceiver::WhyNoMemory() const {
  if (operation_->cancelled) return absl::CancelledError("cancelled by the client");
  const Nanoseconds longest = operation_->engine->options().staging_wait;
  if (operation_->deadline - wait_start_ <= longest) {
    return absl::DeadlineExceededError("the deadline passed before there was staging memory");
  }
  const absl::Status full = operation_->engine->staging().Full(*operation_->tensors.claim());
  return absl::ResourceExhaustedError(
      absl::StrCat(full.message(), "; it has waited for ", Seconds(longest), " s"));
}

void TensorReceiver::Finish(const absl::Status& status) {
  if (status.ok()) {
    wire::CopyField(*message_, tensors[kQuery], operation_->tensors.query());
    wire::CopyField(*message_, tensors[kKey], operation_->tensors.key());
    wire::CopyField(*message_, tensors[kValue], operation_->tensors.value());
  }
  ReleaseMessage(message_);
  PhaseTimes& times = operation_->times;
  times.receive = fleet_->clock().Now() - start_ - times.staging_wait;
  metrics_->receive_seconds.Observe(Seconds(times.receive));
  const auto done = std::move(done_);  // which may destroy this
  done(status);
}

}  // namespace flashcore::server

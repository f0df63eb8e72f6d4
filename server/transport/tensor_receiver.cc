#include "server/transport/tensor_receiver.h"

#include <chrono>
#include <memory>
#include <utility>

#include "grpcpp/alarm.h"
#include "proto/wire.h"

namespace flashcore::server {
namespace {

class GrpcAlarm final : public Alarm {
 public:
  void Set(Nanoseconds delay, std::function<void()> callback) override {
    alarm_.Set(std::chrono::system_clock::now() + delay,
               [callback = std::move(callback)](bool /*expired*/) { callback(); });
  }
  void Cancel() override { alarm_.Cancel(); }

 private:
  grpc::Alarm alarm_;
};

std::unique_ptr<Alarm> MakeAlarm() { return std::make_unique<GrpcAlarm>(); }

}  // namespace

void TensorReceiver::Receive(const absl::Status& parsed,
                             std::function<void(const absl::Status&)> done) {
  done_ = std::move(done);
  if (!parsed.ok()) {
    Finish(parsed);
    return;
  }
  fleet_->Admit(operation_, MakeAlarm, [this](const absl::Status& status) { Finish(status); });
}

void TensorReceiver::Finish(const absl::Status& status) {
  if (status.ok()) {
    wire::CopyField(view_, tensors[kQuery], operation_->tensors.query());
    wire::CopyField(view_, tensors[kKey], operation_->tensors.key());
    wire::CopyField(view_, tensors[kValue], operation_->tensors.value());
  }
  if (message_ != nullptr) ReleaseMessage(message_);
  PhaseTimes& times = operation_->times;
  times.receive = fleet_->clock().Now() - start_ - times.staging_wait;
  rpc_->RecordReceive(Seconds(times.receive), Seconds(times.staging_wait));
  const auto done = std::move(done_);  // may destroy this
  done(status);
}

}  // namespace flashcore::server

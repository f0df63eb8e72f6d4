#include "server/transport/rpc/exchange.h"

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "grpcpp/alarm.h"

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

Exchange::Exchange(const Origin& origin, grpc::ByteBuffer* slices, std::string text)
    : origin_(origin),
      slices_(slices),
      text_(std::move(text)),
      message_(slices != nullptr ? wire::MessageView(*slices)
                                 : wire::MessageView(absl::string_view(text_))),
      scope_(origin.context, origin.rpc),
      start_(origin.fleet->clock().Now()) {
  operation_.rpc = origin.rpc->number();
  operation_.done = [this](const absl::Status& status) { Complete(status); };
}

void Exchange::Receive(const absl::Status& parsed) {
  if (!parsed.ok()) return Take(parsed);
  origin_.fleet->Admit(&operation_, MakeAlarm,
                       [this](const absl::Status& status) { Take(status); });
}

void Exchange::Take(const absl::Status& admitted) {
  if (admitted.ok()) {
    wire::CopyField(message_, tensors_[kQuery], operation_.tensors.query());
    wire::CopyField(message_, tensors_[kKey], operation_.tensors.key());
    wire::CopyField(message_, tensors_[kValue], operation_.tensors.value());
  }
  if (slices_ != nullptr) ReleaseMessage(slices_);
  text_ = std::string();
  PhaseTimes& times = operation_.times;
  times.receive = origin_.fleet->clock().Now() - start_ - times.staging_wait;
  origin_.rpc->RecordReceive(Seconds(times.receive), Seconds(times.staging_wait));
  Received(admitted);
}

void Exchange::Received(const absl::Status& status) {
  if (status.ok()) {
    Enqueue();
  } else {
    Complete(status);
  }
}

void Exchange::Enqueue() {
  const absl::Status status = origin_.fleet->Enqueue(&operation_);
  if (!status.ok()) Complete(status);  // else `this` may be gone already: do not touch it
}

}  // namespace flashcore::server

#include "server/transport/rpc/exchange.h"

#include <utility>

namespace flashcore::server {

Exchange::Exchange(const Origin& origin, RequestMessage message)
    : origin_(origin),
      message_(std::move(message)),
      scope_(origin.context, origin.rpc),
      start_(origin.fleet->clock().Now()) {
  operation_.rpc = origin.rpc->number();
  operation_.done = [this](const absl::Status& status) { End(status); };
}

void Exchange::Receive(const absl::Status& parsed) {
  if (!parsed.ok()) return Take(parsed);
  origin_.fleet->Admit(&operation_, origin_.context->make_alarm,
                       [this](const absl::Status& status) { Take(status); });
}

void Exchange::Take(const absl::Status& admitted) {
  if (admitted.ok()) {
    const wire::MessageView message = message_.view();
    wire::CopyField(message, tensors_[kQuery], operation_.tensors.query());
    wire::CopyField(message, tensors_[kKey], operation_.tensors.key());
    wire::CopyField(message, tensors_[kValue], operation_.tensors.value());
  }
  message_.Release();
  PhaseTimes& times = operation_.times;
  times.receive = origin_.fleet->clock().Now() - start_ - times.staging_wait;
  origin_.rpc->RecordReceive(Seconds(times.receive), Seconds(times.staging_wait));
  Received(admitted);
}

void Exchange::Received(const absl::Status& status) {
  if (status.ok()) {
    Enqueue();
  } else {
    End(status);
  }
}

void Exchange::Enqueue() {
  const absl::Status status = origin_.fleet->Enqueue(&operation_);
  if (!status.ok()) End(status);  // else `this` may be gone already: do not touch it
}

// A stream of the client that awaits the results goes on, whatever has become of them.
void Exchange::End(const absl::Status& status) {
  const AttendRequest& request = operation_.request;
  const bool raised = status.ok() && operation_.raised_by_device;
  if (request.results_ready.region != nullptr && !raised) {
    const TimelinePoint& inputs = request.inputs_ready;
    if (inputs.region == nullptr || inputs.reached()) {
      request.results_ready.Raise();
    } else {
      origin_.fleet->input_waits().RaiseWhenReady(request, operation_.identity.name, owner_);
    }
  }
  Complete(status);
}

}  // namespace flashcore::server

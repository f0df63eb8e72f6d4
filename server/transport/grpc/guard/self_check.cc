#include "server/transport/grpc/guard/self_check.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/channel_arguments.h"

namespace flashcore::server {
namespace {

constexpr char kMethod[] = "/grpc.health.v1.Health/Check";

}  // namespace

// Never destroyed by the thread of gRPC that ends it: with its context goes perhaps the last use of
// the channel, and then of the completion queue that this thread serves.
struct SelfCheck::Call {
  ~Call() {
    context.TryCancel();
    ended.WaitForNotification();
  }
  grpc::ClientContext context;
  grpc::ByteBuffer request, reply;
  absl::Notification ended;
};

SelfCheck::SelfCheck(Options options, grpc::Server* server)
    : options_(std::move(options)),
      stub_(server->InProcessChannel(grpc::ChannelArguments())),
      thread_(SteadyClock::Get(), options_.interval, [this] { Check(); }) {}

SelfCheck::~SelfCheck() = default;

void SelfCheck::Check() {
  const auto has_ended = [](const auto& call) { return call->ended.HasBeenNotified(); };
  calls_.erase(std::remove_if(calls_.begin(), calls_.end(), has_ended), calls_.end());
  Call* const call = calls_.emplace_back(std::make_unique<Call>()).get();
  call->context.set_deadline(std::chrono::system_clock::now() + 2 * options_.timeout);
  const grpc::Slice empty;  // gRPC asserts that a message has a slice
  call->request = grpc::ByteBuffer(&empty, 1);
  stub_.UnaryCall(&call->context, kMethod, grpc::StubOptions(), &call->request, &call->reply,
                  [call](const grpc::Status&) { call->ended.Notify(); });
  // Any answer in time will do: gRPC also ends calls when it lacks memory. The threads that are
  // checked also end calls at their deadline, so that this thread waits by itself.
  const absl::Duration timeout = absl::FromChrono(options_.timeout);
  const bool answers = call->ended.WaitForNotificationWithTimeout(timeout);
  failures_ = answers ? 0 : failures_ + 1;
  if (failures_ == options_.failures && options_.on_dead) {
    options_.on_dead(absl::UnavailableError("the health check gets no answer"));
  }
}

}  // namespace flashcore::server

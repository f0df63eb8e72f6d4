#include "server/transport/grpc/self_check.h"

#include <chrono>
#include <future>
#include <memory>
#include <utility>

#include "grpcpp/client_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/channel_arguments.h"

namespace flashcore::server {
namespace {

constexpr char kMethod[] = "/grpc.health.v1.Health/Check";

}  // namespace

SelfCheck::SelfCheck(Options options, grpc::Server* server)
    : options_(std::move(options)),
      stub_(server->InProcessChannel(grpc::ChannelArguments())),
      thread_(SteadyClock::Get(), options_.interval, [this] { Check(); }) {}

void SelfCheck::Check() {
  struct Call {
    grpc::ClientContext context;
    grpc::ByteBuffer request, reply;
    std::promise<grpc::Status> ended;
  };
  const auto call = std::make_shared<Call>();  // it may end late, or never
  call->context.set_deadline(std::chrono::system_clock::now() + 2 * options_.timeout);
  const grpc::Slice empty;  // gRPC asserts that a message has a slice
  call->request = grpc::ByteBuffer(&empty, 1);
  std::future<grpc::Status> ended = call->ended.get_future();
  stub_.UnaryCall(&call->context, kMethod, grpc::StubOptions(), &call->request, &call->reply,
                  [call](grpc::Status status) { call->ended.set_value(std::move(status)); });
  // Any answer in time will do: gRPC also ends calls when it lacks memory. The threads that are
  // checked also end calls at their deadline, so that this thread waits by itself.
  const bool answers = ended.wait_for(options_.timeout) == std::future_status::ready;
  failures_ = answers ? 0 : failures_ + 1;
  if (failures_ == options_.failures && options_.on_dead) {
    options_.on_dead(absl::UnavailableError("the health check gets no answer"));
  }
}

}  // namespace flashcore::server

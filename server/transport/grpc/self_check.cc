#include "server/transport/grpc/self_check.h"

#include <future>
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
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + options_.timeout);
  const grpc::Slice empty;  // gRPC asserts that a message has a slice
  const grpc::ByteBuffer request(&empty, 1);
  grpc::ByteBuffer reply;
  std::promise<grpc::Status> ended;
  stub_.UnaryCall(&context, kMethod, grpc::StubOptions(), &request, &reply,
                  [&ended](grpc::Status status) { ended.set_value(std::move(status)); });
  // Any answer in time will do: gRPC also ends calls when it lacks memory.
  const bool answers = ended.get_future().get().error_code() != grpc::StatusCode::DEADLINE_EXCEEDED;
  failures_ = answers ? 0 : failures_ + 1;
  if (failures_ == options_.failures && options_.on_dead) {
    options_.on_dead(absl::UnavailableError("the health check gets no answer"));
  }
}

}  // namespace flashcore::server

#include "server/transport/grpc_poll_workaround.h"

#include <chrono>
#include <future>
#include <utility>

#include "grpcpp/client_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/channel_arguments.h"

namespace flashcore::server {
namespace {

constexpr std::chrono::milliseconds kInterval(500);

}  // namespace

GrpcPollWorkaround::GrpcPollWorkaround(grpc::Server* server, std::string method)
    : method_(std::move(method)),
      stub_(server->InProcessChannel(grpc::ChannelArguments())),
      // Of the real time: gRPC sleeps by it.
      thread_(SteadyClock::Get(), kInterval, [this] { CallOnce(); }) {}

void GrpcPollWorkaround::CallOnce() {
  grpc::ClientContext context;
  const grpc::Slice empty;  // gRPC asserts that a message has a slice
  const grpc::ByteBuffer request(&empty, 1);
  grpc::ByteBuffer reply;
  std::promise<void> done;
  stub_.UnaryCall(&context, method_, grpc::StubOptions(), &request, &reply,
                  [&done](const grpc::Status&) { done.set_value(); });
  done.get_future().wait();
}

}  // namespace flashcore::server

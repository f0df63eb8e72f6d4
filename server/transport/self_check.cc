#include "server/transport/self_check.h"

#include <poll.h>

#include <future>
#include <memory>
#include <utility>

#include "grpcpp/client_context.h"
#include "grpcpp/create_channel_posix.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/byte_buffer.h"

namespace flashcore::server {
namespace {

constexpr char kMethod[] = "/grpc.health.v1.Health/Check";

grpc::Status CallHealth(const std::shared_ptr<grpc::Channel>& channel,
                        std::chrono::milliseconds timeout) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  const grpc::Slice empty;  // gRPC asserts that a message has a slice
  const grpc::ByteBuffer request(&empty, 1);
  grpc::ByteBuffer reply;
  std::promise<grpc::Status> ended;
  stub.UnaryCall(&context, kMethod, grpc::StubOptions(), &request, &reply,
                 [&ended](grpc::Status status) { ended.set_value(std::move(status)); });
  return ended.get_future().get();
}

}  // namespace

SelfCheck::SelfCheck(Options options, AcceptLoop* loop, const Clock* clock)
    : options_(std::move(options)),
      loop_(loop),
      failures_(loop->listeners().size(), 0),
      thread_(clock, options_.interval, [this] { CallAll(); }) {}

void SelfCheck::CallAll() {
  for (size_t listener = 0; listener < failures_.size() && !dead_; ++listener) {
    const std::string& address = loop_->listeners()[listener].address;
    const absl::Status status = Call(listener);
    if (options_.on_checked) options_.on_checked(address, status);
    failures_[listener] = status.ok() ? 0 : failures_[listener] + 1;
    if (failures_[listener] < options_.failures) continue;
    dead_ = true;
    if (options_.on_dead) options_.on_dead(address, status);
  }
}

absl::Status SelfCheck::Call(size_t listener) const {
  auto connection = loop_->ConnectToSelf(listener);
  if (!connection.ok()) return connection.status();
  pollfd connected = {(*connection)->socket.get(), POLLOUT, 0};
  if (poll(&connected, 1, static_cast<int>(options_.timeout.count())) != 1 ||
      (connected.revents & (POLLERR | POLLHUP)) != 0) {
    return absl::UnavailableError("the connection is not accepted");
  }
  const grpc::Status status = CallHealth(
      grpc::CreateInsecureChannelFromFd("self", (*connection)->socket.release()), options_.timeout);
  // Any answer in time will do: gRPC also ends connections when it lacks memory.
  if (status.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED) return absl::OkStatus();
  return absl::UnavailableError("the health check gets no answer");
}

}  // namespace flashcore::server

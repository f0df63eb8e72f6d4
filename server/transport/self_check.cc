#include "server/transport/self_check.h"

#include <poll.h>

#include <future>
#include <memory>
#include <utility>
#include <vector>

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

SelfCheck::SelfCheck(Options options, AcceptLoop* loop)
    : options_(std::move(options)), loop_(loop), thread_([this] { Loop(); }) {}

SelfCheck::~SelfCheck() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  stop_.NotifyOne();
  thread_.join();
}

void SelfCheck::Loop() {
  std::vector<int> failures(loop_->listeners().size(), 0);
  while (WaitForNext()) {
    for (size_t listener = 0; listener < failures.size(); ++listener) {
      const absl::Status status = Call(listener);
      failures[listener] = status.ok() ? 0 : failures[listener] + 1;
      if (failures[listener] < options_.failures) continue;
      if (options_.on_dead) options_.on_dead(loop_->listeners()[listener].address, status);
      return;
    }
  }
}

bool SelfCheck::WaitForNext() {
  const auto next = std::chrono::steady_clock::now() + options_.interval;
  MutexLock lock(&mutex_);
  while (!stopping_ && stop_.WaitUntil(&mutex_, next)) {
  }
  return !stopping_;
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

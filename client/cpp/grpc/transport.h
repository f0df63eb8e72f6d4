// The way to a server over gRPC. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_GRPC_TRANSPORT_H_
#define FLASHCORE_CLIENT_CPP_GRPC_TRANSPORT_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "client/cpp/security.h"
#include "client/cpp/transport.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/byte_buffer.h"

namespace flashcore::client {

// For gRPC, to which a time before 1970 is infinitely late.
inline std::chrono::system_clock::time_point ToGrpc(absl::Time deadline) {
  return absl::ToChronoTime(std::max(deadline, absl::UnixEpoch()));
}

class GrpcTransport final : public Transport, public std::enable_shared_from_this<GrpcTransport> {
 public:
  // INVALID_ARGUMENT if target or options make no sense.
  static absl::StatusOr<std::shared_ptr<Transport>> Create(absl::string_view target,
                                                           const ClientOptions& options);

  absl::Status Call(const google::protobuf::Message& request, const CallOptions& call,
                    google::protobuf::Message* response) override;
  absl::Status Attend(const AttendRequest& request, const CallOptions& call,
                      AttendResult* result) override;
  absl::StatusOr<std::unique_ptr<Attempts>> MakeAttempts(const AttendRequest& request,
                                                         const CallOptions& call) override;
  // UNIMPLEMENTED.
  absl::StatusOr<std::unique_ptr<Attempts>> MakeCudaStreamAttempt(const AttendRequest& request,
                                                                  void* stream,
                                                                  const CallOptions& call) override;
  std::shared_ptr<StreamCore> OpenStream(const StreamOptions& options) override;
  absl::StatusOr<v1::LoadSequenceResponse> LoadRows(const RowsToLoad& rows,
                                                    const CallOptions& call) override;
  absl::StatusOr<std::unique_ptr<HeldLease>> HoldLease(const CallOptions& options) override;
  absl::StatusOr<HealthStatus> CheckHealth(absl::string_view service,
                                           const CallOptions& call) override;
  // UNIMPLEMENTED.
  absl::StatusOr<std::shared_ptr<local::Memory>> CreateMemory(size_t bytes, bool inputs_only,
                                                              const CallOptions& call) override;
  void RemoveMemory(const local::Memory* /*memory*/) override {}
  bool HasMemory(const local::Memory* /*memory*/) const override { return false; }
  // UNIMPLEMENTED.
  absl::StatusOr<std::shared_ptr<const local::DeviceMemory>> AllocateDeviceMemory(
      size_t bytes, const std::string& device_id, const CallOptions& call) override;
  void RemoveDeviceMemory(const local::DeviceMemory* /*memory*/) override {}
  bool HasDeviceMemory(const local::DeviceMemory* /*memory*/) const override { return false; }

  bool WaitForConnected(absl::Time deadline) override;
  // Blocking calls alone poll the sockets, and they do not if they fail at once.
  void AwaitConnection(absl::Time deadline) override;
  void PrepareRetry(const absl::Status& status) override;
  // Less if the attempt was never sent and a connection comes.
  void Pause(const absl::Status& status, absl::Duration wait) override;
  void SetServerMessageBytes(size_t bytes) override { server_message_bytes_ = bytes; }

  // For its attempts and streams: a channel for calls with callbacks, whose threads it starts; a
  // new context for a call until `deadline`; and the limit of a message, the client's, or the
  // server's if that is less.
  const std::shared_ptr<grpc::Channel>& callback_channel() const;
  void Prepare(absl::Time deadline, absl::string_view affinity, grpc::ClientContext* context) const;
  size_t MaxMessageBytes() const {
    return std::min(max_message_bytes_, server_message_bytes_.load());
  }

 private:
  GrpcTransport(const ClientOptions& options, std::unique_ptr<TokenFile> token,
                std::shared_ptr<grpc::Channel> channel);
  bool connected() const override;
  // A unary call with raw messages.
  absl::Status CallBytes(const char* method, const CallOptions& call,
                         const grpc::ByteBuffer& request, grpc::ByteBuffer* reply) const;

  const std::string name_;
  const size_t max_message_bytes_;
  const std::unique_ptr<TokenFile> token_;  // null: none
  const std::shared_ptr<grpc::Channel> channel_;
  std::atomic<size_t> server_message_bytes_{SIZE_MAX};
};

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_GRPC_TRANSPORT_H_

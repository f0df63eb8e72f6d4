// Every private part of gRPC and protobuf that this project uses, behind functions of our own.
//
// Known to hold for gRPC 1.51 and protobuf 3.21, the minimum and the tested versions (those of
// Debian 12). Later versions up to the limits below still have these parts as far as we know,
// but nobody has tested them. Before a limit is raised: read each part in the new version, run all
// tests, and update this comment.
//
//   grpc::internal::BlockingUnaryCall    a unary call that polls on the calling
//                                        thread. The public GenericStub has only callbacks and
//                                        completion queues, which cost a hand-off between threads.
//   grpc::internal::RpcMethod            names the method of such a call.
//   grpc::internal::ClientWriterFactory  a blocking client stream of raw messages. No public API
//                                        opens one for a method outside of the generated stub.
//   grpc::internal::Callback...Handler   what generated code hands to Service::MarkMethodCallback.
//                                        With them, one table names the methods of a service.
//   ServerReactor::InternalInlineable    runs OnDone and OnCancel on the thread that completes the
//                                        RPC; by default gRPC wakes another thread for each.
//   ServerCredentials::AddPortToServer   credentials of our own that wrap those of gRPC's C API:
//                                        it alone has a callback for new server certificates.
//   grpc::AddInsecureChannelFromFd       public, but not what the server relies on: peer() of its
//                                        calls is "fd:N", and gRPC closes that descriptor only when
//                                        the last call of the connection is gone.
//   gpr_set_log_function                 public, but gone in gRPC 1.66.
#ifndef FLASHCORE_PROTO_GRPC_GRPC_COMPAT_H_
#define FLASHCORE_PROTO_GRPC_GRPC_COMPAT_H_

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/log.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "google/protobuf/stubs/common.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/impl/client_unary_call.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "grpcpp/support/status.h"
#include "grpcpp/support/sync_stream.h"
#include "grpcpp/version_info.h"

#if GRPC_CPP_VERSION_MAJOR != 1 || GRPC_CPP_VERSION_MINOR < 51 || GRPC_CPP_VERSION_MINOR > 62
#error "proto/grpc/grpc_compat.h: want gRPC 1.51 to 1.62; only 1.51 is tested"
#endif
#if GOOGLE_PROTOBUF_VERSION < 3021000 || GOOGLE_PROTOBUF_VERSION >= 4022000
#error "proto/grpc/grpc_compat.h: want protobuf 3.21 or 4.21; only 3.21 is tested"
#endif

namespace flashcore::grpc_compat {

// Calls the unary `method` ("/package.Service/Method") and waits on this thread for the reply. A
// Message is a grpc::ByteBuffer or a google::protobuf::MessageLite.
template <typename Message>
grpc::Status CallUnary(grpc::Channel* channel, const char* method, grpc::ClientContext* context,
                       const Message& request, Message* reply) {
  const grpc::internal::RpcMethod rpc(method, grpc::internal::RpcMethod::NORMAL_RPC);
  return grpc::internal::BlockingUnaryCall(channel, rpc, context, request, reply);
}

// Opens the client-streaming `method` for raw messages. `context` and `reply` outlive the writer.
template <typename Reply>
std::unique_ptr<grpc::ClientWriter<grpc::ByteBuffer>> OpenWriter(grpc::Channel* channel,
                                                                 const char* method,
                                                                 grpc::ClientContext* context,
                                                                 Reply* reply) {
  const grpc::internal::RpcMethod rpc(method, grpc::internal::RpcMethod::CLIENT_STREAMING);
  return std::unique_ptr<grpc::ClientWriter<grpc::ByteBuffer>>(
      grpc::internal::ClientWriterFactory<grpc::ByteBuffer>::Create(channel, rpc, context, reply));
}

template <typename Request, typename Response>
using UnaryHandler = grpc::internal::CallbackUnaryHandler<Request, Response>;
template <typename Request, typename Response>
using ClientStreamHandler = grpc::internal::CallbackClientStreamingHandler<Request, Response>;
template <typename Request, typename Response>
using ServerStreamHandler = grpc::internal::CallbackServerStreamingHandler<Request, Response>;
template <typename Request, typename Response>
using BidiStreamHandler = grpc::internal::CallbackBidiHandler<Request, Response>;

// A unary reactor whose OnDone and OnCancel run on the thread that completes the RPC. They must be
// short and must not block.
class InlineServerUnaryReactor : public grpc::ServerUnaryReactor {
 private:
  bool InternalInlineable() final { return true; }
};

// Takes over `credentials`, which use `data`. Keep the result until the server is gone: gRPC keeps
// `credentials` alone.
inline std::shared_ptr<grpc::ServerCredentials> WrapServerCredentials(
    grpc_server_credentials* credentials, std::shared_ptr<void> data) {
  class Wrapped final : public grpc::ServerCredentials {
   public:
    Wrapped(grpc_server_credentials* wrapped, std::shared_ptr<void> used)
        : data_(std::move(used)), credentials_(wrapped) {}
    ~Wrapped() override { grpc_server_credentials_release(credentials_); }
    void SetAuthMetadataProcessor(
        const std::shared_ptr<grpc::AuthMetadataProcessor>& /*processor*/) override {
      std::abort();  // nobody does
    }

   private:
    int AddPortToServer(const std::string& address, grpc_server* server) override {
      return grpc_server_add_http2_port(server, address.c_str(), credentials_);
    }

    const std::shared_ptr<void> data_;
    grpc_server_credentials* const credentials_;
  };
  return std::make_shared<Wrapped>(credentials, std::move(data));
}

// Sends gRPC's own log messages to `sink`, from any thread.
inline void SetLogSink(void (*sink)(gpr_log_func_args* message)) { gpr_set_log_function(sink); }

}  // namespace flashcore::grpc_compat

#endif  // FLASHCORE_PROTO_GRPC_GRPC_COMPAT_H_

// gRPC's messages as flashcore::wire reads them, for server and client.
#ifndef FLASHCORE_PROTO_GRPC_MESSAGE_VIEW_H_
#define FLASHCORE_PROTO_GRPC_MESSAGE_VIEW_H_

#include <cstddef>

#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "proto/wire/message.h"

namespace flashcore::wire {

// `message` outlives the result.
inline MessageView ViewOf(const grpc::ByteBuffer& message) {
  return {&message, message.Length(),
          [](const void* slices, size_t /*size*/, MessageView::Reader reader) {
            // ProtoBufferReader takes a mutable pointer but only reads.
            auto* const buffer =
                const_cast<grpc::ByteBuffer*>(static_cast<const grpc::ByteBuffer*>(slices));
            grpc::ProtoBufferReader stream(buffer);
            reader(&stream);
          }};
}

}  // namespace flashcore::wire

#endif  // FLASHCORE_PROTO_GRPC_MESSAGE_VIEW_H_

// Reads the messages of one LoadSequence, whatever transport they come by.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_LOAD_CHUNKS_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_LOAD_CHUNKS_H_

#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "flashcore/v1/attention.pb.h"
#include "proto/wire/message.h"
#include "server/engine/fleet.h"
#include "server/kv/operation.h"
#include "server/kv/sequence.h"
#include "server/memory/regions.h"
#include "server/request/identity.h"
#include "server/transport/rpc/message.h"

namespace flashcore::server {

// Not thread-safe. The fleet and the regions outlive it.
class LoadChunks {
 public:
  // `regions` resolves ranges in shared memory; null over gRPC.
  LoadChunks(Fleet* fleet, const Regions* regions, Identity identity)
      : fleet_(fleet), regions_(regions), identity_(std::move(identity)) {}

  // Parses the next message, a v1::LoadSequenceRequest, into operation->request and `*tensors`. The
  // first one names the sequence.
  absl::Status Parse(const wire::MessageView& message, AttendOperation* operation,
                     TensorFields* tensors);
  // The answer, when all chunks are appended.
  absl::Status Finish(v1::LoadSequenceResponse* response) const;

 private:
  // Fills in `*request`, without the sizes of the tensors.
  absl::Status ToRequest(const v1::LoadSequenceRequest& message, AttendRequest* request);

  Fleet* const fleet_;
  const Regions* const regions_;
  const Identity identity_;
  std::optional<SequenceId> sequence_;  // set by the first message
  SequenceShape shape_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_LOAD_CHUNKS_H_

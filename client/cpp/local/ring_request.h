// An AttendRequest as a ring takes it: its tensors in registered memory. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_RING_REQUEST_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_RING_REQUEST_H_

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cpp/encode.h"
#include "client/cpp/memory.h"
#include "client/local/block_pool.h"
#include "flashcore/attend.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore::client::local {

// Used for one request after the other, a decode step allocates next to nothing. Not thread-safe.
class RingRequest {
 public:
  // `request` has passed CheckRequest. Tensors in one of `regions` stay there. Inputs elsewhere are
  // copied to a block of `pool`, and outputs elsewhere get room in it; `pool` and the output
  // memory outlive the request. With null as `pool`, a tensor elsewhere is INVALID_ARGUMENT.
  absl::Status Prepare(const AttendRequest& request, const RegionTable& regions, BlockPool* pool,
                       SteadyTime deadline);

  // Adds serialized fields of an AttendRequest, after Prepare.
  void Append(std::string_view fields) { ranges_.append(fields); }

  size_t Bytes() const { return small_bytes_ + ranges_.size(); }  // of the message
  size_t MaxAnswerBytes() const;                                  // of its answer
  void Serialize(std::byte* to) const;                            // Bytes() bytes
  std::string Serialized() const;

  // Reads an answer: its status, or O and LSE to where the request wants them and the rest to
  // `result`. INTERNAL if the answer does not match the request.
  absl::Status Take(absl::Span<const std::byte> answer, AttendResult* result);

  // Lets the inputs of `request` that were copied be the copies.
  void UseCopies(AttendRequest* request) const;

  // Gives the block back. The server must be done with the request.
  void Reset() { block_.Reset(); }

 private:
  // A tensor in the block; null if it is not there.
  struct Copies {
    std::byte *query, *key, *value, *output, *lse;
  };

  void AddRange(int field, const std::string& region_id, uint64_t offset, uint64_t bytes);

  // The message follows the other. All are kept for their memory.
  v1::AttendRequest message_;  // without ranges
  size_t small_bytes_ = 0;     // of message_
  std::string ranges_;         // serialized, and what was appended

  v1::MemoryRange range_;      // of Prepare
  v1::AttendResponse answer_;  // of Take
  BlockPool::Block block_;
  Copies copies_ = {};
  Destination destination_;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_RING_REQUEST_H_

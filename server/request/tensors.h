// Where the tensors of a request are.
#ifndef FLASHCORE_SERVER_REQUEST_TENSORS_H_
#define FLASHCORE_SERVER_REQUEST_TENSORS_H_

#include <array>
#include <cstddef>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "server/memory/shared_region.h"
#include "server/memory/staging_pool.h"
#include "server/request/request.h"

namespace flashcore::server {

// The start of each tensor. A tensor holds all spans, one after the other.
struct TensorAddresses {
  const std::byte* query = nullptr;
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  std::byte* output = nullptr;
  float* lse = nullptr;  // null: not requested
};

// The tensors of one request: each in staging memory, or in shared memory if the request has a
// range for it. That may be memory of the device.
//
// A device that copies tensors of the host has one block for the inputs (query, key, value) and one
// for the results (output, LSE). Staging memory has the same blocks, with every tensor aligned to
// StagingPool::kAlignment. Tensors on the device have no place in them.
class AttendTensors {
 public:
  // Bytes of the host with the same layout there and in a block.
  struct Piece {
    const SharedRegion* region;  // that the host's side lies in; null: staging memory
    std::byte* host;
    size_t offset;  // in the block
    size_t bytes;
  };
  using Pieces = absl::InlinedVector<Piece, 3>;

  // Acquires staging memory for the tensors of `request` that are not in shared memory.
  // RESOURCE_EXHAUSTED if there is none now: claim() may then wait for it.
  absl::Status Allocate(const AttendRequest& request, StagingPool* pool);
  StagingClaim* claim() { return &claim_; }

  // Null if the tensor has no bytes.
  std::byte* query() const { return At(kQuery); }
  std::byte* key() const { return At(kKey); }
  std::byte* value() const { return At(kValue); }
  std::byte* output() const { return At(kOutput); }
  float* lse() const { return reinterpret_cast<float*>(At(kLse)); }
  const SharedRegion* region(Tensor tensor) const { return regions_[tensor]; }  // null: staging
  TensorAddresses addresses() const { return {query(), key(), value(), output(), lse()}; }
  bool on_device(Tensor tensor) const {
    return regions_[tensor] != nullptr && regions_[tensor]->device() != SharedRegion::kHost;
  }

  size_t lse_offset() const { return offsets_[kLse]; }   // in the result block
  size_t input_bytes() const { return input_bytes_; }    // of the input block
  size_t result_bytes() const { return result_bytes_; }  // of the result block
  Pieces inputs() const { return PiecesOf(kQuery, kValue); }
  Pieces results() const { return PiecesOf(kOutput, kLse); }
  // The addresses of the tensors on the device, if the others are in blocks that start at `inputs`
  // and `results`.
  TensorAddresses InBlocks(std::byte* inputs, std::byte* results) const;
  bool in_reach() const { return in_reach_; }  // the device's kernels can access all in place

  void ReleaseInputs() { claim_.inputs.Reset(); }
  StagingUse staged_results() const { return claim_.results.use(); }
  StagingBuffer TakeResults() { return std::move(claim_.results); }

 private:
  // Lays out tensors [first, last] in a block. Returns the block's bytes, and in `*staged_bytes`
  // those up to the end of the last tensor that is not in shared memory.
  size_t LayOut(const AttendRequest& request, Tensor first, Tensor last, size_t* staged_bytes);
  std::byte* At(Tensor tensor) const;
  // The address on the device of a tensor that is there, or else is in `block`.
  std::byte* InBlock(Tensor tensor, std::byte* block) const {
    return on_device(tensor) ? At(tensor) : block + offsets_[tensor];
  }
  Pieces PiecesOf(Tensor first, Tensor last) const;

  StagingClaim claim_;
  std::array<const SharedRegion*, kNumTensors> regions_ = {};  // null: in staging memory
  std::array<size_t, kNumTensors> region_offsets_ = {};
  std::array<size_t, kNumTensors> offsets_ = {};  // in the blocks
  std::array<size_t, kNumTensors> bytes_ = {};
  size_t input_bytes_ = 0;
  size_t result_bytes_ = 0;
  bool in_reach_ = true;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_TENSORS_H_

#include "server/request/tensors.h"

#include "server/memory/block_allocator.h"

namespace flashcore::server {

absl::Status AttendTensors::Allocate(const AttendRequest& request, StagingPool* pool) {
  bytes_ = {request.query_bytes, request.key_bytes, request.value_bytes, request.output_bytes(),
            request.lse_bytes()};
  input_bytes_ = LayOut(request, kQuery, kValue, &claim_.input_bytes);
  result_bytes_ = LayOut(request, kOutput, kLse, &claim_.result_bytes);
  return pool->Acquire(&claim_);
}

size_t AttendTensors::LayOut(const AttendRequest& request, Tensor first, Tensor last,
                             size_t* staged_bytes) {
  size_t block_bytes = 0;
  for (int i = first; i <= last; ++i) {
    if (bytes_[i] == 0) continue;
    regions_[i] = request.ranges[i].region.get();
    region_offsets_[i] = request.ranges[i].offset;
    if (on_device(static_cast<Tensor>(i))) continue;
    offsets_[i] = AlignUp(block_bytes, StagingPool::kAlignment);
    block_bytes = offsets_[i] + bytes_[i];
    if (regions_[i] == nullptr) *staged_bytes = block_bytes;
    in_reach_ = in_reach_ && (regions_[i] == nullptr || regions_[i]->in_reach());
  }
  return block_bytes;
}

std::byte* AttendTensors::At(Tensor tensor) const {
  if (bytes_[tensor] == 0) return nullptr;
  if (regions_[tensor] != nullptr) return regions_[tensor]->data() + region_offsets_[tensor];
  const StagingBuffer& staging = tensor < kOutput ? claim_.inputs : claim_.results;
  return staging.data() + offsets_[tensor];
}

AttendTensors::Pieces AttendTensors::PiecesOf(Tensor first, Tensor last) const {
  Pieces pieces;
  for (int i = first; i <= last; ++i) {
    if (bytes_[i] == 0 || on_device(static_cast<Tensor>(i))) continue;
    std::byte* const host = At(static_cast<Tensor>(i));
    if (!pieces.empty() && regions_[i] == pieces.back().region) {
      Piece& piece = pieces.back();
      const size_t end = offsets_[i] - piece.offset;
      // The gap between two tensors may be copied too, unless it is the client's memory.
      if (host == piece.host + end && (piece.region == nullptr || end == piece.bytes)) {
        piece.bytes = end + bytes_[i];
        continue;
      }
    }
    pieces.push_back({regions_[i], host, offsets_[i], bytes_[i]});
  }
  return pieces;
}

TensorAddresses AttendTensors::InBlocks(std::byte* inputs, std::byte* results) const {
  TensorAddresses at;
  at.query = InBlock(kQuery, inputs);
  at.key = InBlock(kKey, inputs);
  at.value = InBlock(kValue, inputs);
  at.output = InBlock(kOutput, results);
  if (lse() != nullptr) at.lse = reinterpret_cast<float*>(InBlock(kLse, results));
  return at;
}

}  // namespace flashcore::server

// Copies between host and device memory on a stream, as few as possible. Needs CUDA.
#ifndef FLASHCORE_SERVER_DEVICE_COPY_QUEUE_H_
#define FLASHCORE_SERVER_DEVICE_COPY_QUEUE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/plan_cut.h"
#include "server/memory/shared_region.h"

namespace flashcore::server {

// Some rows of every head of a [rows, heads, size] or [heads, rows, size] tensor: `height` runs of
// `width` bytes, `pitch` bytes apart, the first of them at `offset`.
struct RowBlock {
  int64_t offset = 0;
  size_t width = 0;
  size_t height = 1;
  size_t pitch = 0;

  // Strides in bytes.
  static RowBlock Of(kernels::RowRange rows, int32_t all_rows, int64_t heads, int64_t row_stride,
                     int64_t head_stride) {
    const int64_t count = rows.end - rows.begin;
    const bool rows_first = row_stride == heads * head_stride;
    RowBlock block;
    block.offset = rows.begin * row_stride;
    block.width = static_cast<size_t>(count * row_stride);
    if (rows_first) return block;
    if (count == all_rows) {
      block.width = static_cast<size_t>(heads * head_stride);
      return block;
    }
    block.height = static_cast<size_t>(heads);
    block.pitch = static_cast<size_t>(head_stride);
    return block;
  }
};

// Joins copies that follow each other on both sides, in one piece of host memory: CUDA refuses a
// copy of two that were registered one by one, also when they are neighbours. A tensor whose two
// sides are one, since it is on the device already, is not copied. The first error ends it. Not
// thread-safe.
class CopyQueue {
 public:
  CopyQueue(cudaMemcpyKind kind, cudaStream_t stream) : kind_(kind), stream_(stream) {}

  // `region`: what the host's side lies in; null: the staging memory.
  void Add(const SharedRegion* region, std::byte* to, const std::byte* from, size_t bytes) {
    if (bytes == 0 || to == from) return;
    if (region != region_ || to != to_ + bytes_ || from != from_ + bytes_) {
      Flush();
      region_ = region;
      to_ = to;
      from_ = from;
    }
    bytes_ += bytes;
  }

  // `to` and `from`: the starts of the tensor.
  void Add(const SharedRegion* region, const RowBlock& block, std::byte* to,
           const std::byte* from) {
    if (block.width == 0 || to == from) return;
    if (block.height == 1) return Add(region, to + block.offset, from + block.offset, block.width);
    Flush();
    if (error_ != cudaSuccess) return;
    error_ = cudaMemcpy2DAsync(to + block.offset, block.pitch, from + block.offset, block.pitch,
                               block.width, block.height, kind_, stream_);
  }

  // Call it at the end. Returns the first error.
  cudaError_t Flush() {
    if (bytes_ > 0 && error_ == cudaSuccess) {
      error_ = cudaMemcpyAsync(to_, from_, bytes_, kind_, stream_);
    }
    bytes_ = 0;
    return error_;
  }

 private:
  const cudaMemcpyKind kind_;
  const cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
  // The copy that may still grow.
  const SharedRegion* region_ = nullptr;
  std::byte* to_ = nullptr;
  const std::byte* from_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_COPY_QUEUE_H_

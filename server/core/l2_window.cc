#include "server/core/l2_window.h"

#include <algorithm>

#include "server/core/cuda_status.h"

namespace flashcore::server {

size_t HotSegmentBytes(const L2Limits& limits, size_t budget_bytes, size_t arena_bytes,
                       size_t superblock_bytes) {
  size_t bytes = std::min({limits.persisting_max_bytes, limits.window_max_bytes, arena_bytes});
  if (budget_bytes > 0) bytes = std::min(bytes, budget_bytes);
  return bytes / superblock_bytes * superblock_bytes;
}

absl::StatusOr<size_t> SetAsideL2(size_t bytes) {
  absl::Status status =
      CudaStatus(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, bytes), "cudaDeviceSetLimit");
  size_t granted = 0;
  if (status.ok()) {
    status = CudaStatus(cudaDeviceGetLimit(&granted, cudaLimitPersistingL2CacheSize),
                        "cudaDeviceGetLimit");
  }
  if (!status.ok()) return status;
  return granted;
}

absl::Status SetL2Window(cudaStream_t stream, std::byte* base, size_t bytes) {
  cudaStreamAttrValue value = {};
  value.accessPolicyWindow.base_ptr = base;
  value.accessPolicyWindow.num_bytes = bytes;
  value.accessPolicyWindow.hitRatio = 1.0f;
  value.accessPolicyWindow.hitProp = cudaAccessPropertyPersisting;
  value.accessPolicyWindow.missProp = cudaAccessPropertyStreaming;
  return CudaStatus(cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value),
                    "cudaStreamSetAttribute of the access-policy window");
}

}  // namespace flashcore::server

#include "server/device/l2_window.h"

#include <algorithm>

#include "server/device/cuda_status.h"

namespace flashcore::server {

size_t HotSegmentBytes(const L2Limits& limits, size_t budget_bytes, size_t arena_bytes,
                       size_t superblock_bytes) {
  size_t bytes = std::min({limits.persisting_max_bytes, limits.window_max_bytes, arena_bytes});
  if (budget_bytes > 0) bytes = std::min(bytes, budget_bytes);
  return bytes / superblock_bytes * superblock_bytes;
}

absl::StatusOr<size_t> L2SetAside() {
  size_t bytes = 0;
  absl::Status status = CudaStatus(cudaDeviceGetLimit(&bytes, cudaLimitPersistingL2CacheSize),
                                   "cudaDeviceGetLimit of the persisting L2");
  if (!status.ok()) return status;
  return bytes;
}

absl::StatusOr<size_t> SetAsideL2(size_t bytes) {
  absl::Status status =
      CudaStatus(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, bytes),
                 "cudaDeviceSetLimit of the persisting L2 (not for a process under MPS)");
  if (!status.ok()) return status;
  return L2SetAside();
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

absl::Status ResetPersistingL2() {
  return CudaStatus(cudaCtxResetPersistingL2Cache(), "cudaCtxResetPersistingL2Cache");
}

}  // namespace flashcore::server

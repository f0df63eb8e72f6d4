// The one virtual seam of the server: what can run a batch.
#ifndef FLASHCORE_SERVER_CORE_DEVICE_H_
#define FLASHCORE_SERVER_CORE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/registry.h"
#include "server/core/request.h"
#include "server/core/staging_pool.h"

namespace flashcore::server {

struct DeviceInfo {
  std::string id;    // "cpu", "cuda:0"
  std::string name;  // "AMD EPYC", "NVIDIA L4"
  std::string arch;  // SIMD target of a CPU, compute capability of a GPU
  uint64_t memory_bytes = 0;
  uint64_t l2_bytes = 0;                 // 0: not known
  uint64_t l2_persisting_max_bytes = 0;  // 0: no access-policy window
  int lanes = 0;
  int compute_units = 0;  // threads, or streaming multiprocessors
};

// One GPU, or the CPU: runs batches on its lanes.
class Device {
 public:
  virtual ~Device() = default;

  virtual const DeviceInfo& info() const = 0;

  // The kernels that this device serves with.
  virtual const std::vector<const kernels::Kernel*>& kernels() const = 0;

  // Where staging memory for this device comes from.
  virtual StagingPool::Allocator staging_allocator() = 0;

  // Attends every operation of `batch` (validated, not empty, of one geometry) and fills in its
  // times.copy_in, .kernel and .copy_out. Called by the one thread that drives `lane`, in
  // [0, info().lanes). An error means that no operation of the batch has a result.
  virtual absl::Status Run(int lane, absl::Span<AttendOperation* const> batch) = 0;
};

// The head_dims for which `device` has kernels of every dtype, ascending.
std::vector<uint32_t> SupportedHeadDims(const Device& device);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_CORE_DEVICE_H_

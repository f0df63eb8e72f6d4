// Memory on the server's GPU that a client shares with the server, so that tensors never leave it.
#ifndef FLASHCORE_DEVICE_MEMORY_H_
#define FLASHCORE_DEVICE_MEMORY_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "flashcore/options.h"

namespace flashcore {

namespace client {
class Connection;
namespace local {
class DeviceMemory;
}
}  // namespace client

// From Client::AllocateDeviceMemory; zero at first. A tensor in it, at a multiple of 16 bytes from
// its start, is read and written in place by requests of that Client. It is mapped for the primary
// context of its GPU, as memory of cudaMalloc is: the host cannot use its addresses, kernels can.
//
// It belongs to the connection on which it was allocated. Once that has ended it stays mapped, and
// keeps its content, but requests that name it are NOT_FOUND with the reason REGION_LOST: allocate
// it again. Move-only; a moved-from one is empty, and can only be destroyed or assigned to. Its
// functions are thread-safe. May outlive its Client.
class DeviceMemory {
 public:
  // Unmaps it and gives it back. Requests that use it must have been answered, and no work of the
  // GPU may use it any more.
  ~DeviceMemory() { Release(); }
  DeviceMemory(DeviceMemory&& other) noexcept = default;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    if (this == &other) return *this;
    Release();
    connection_ = std::move(other.connection_);
    memory_ = std::move(other.memory_);
    return *this;
  }

  // A CUdeviceptr, as of cudaMalloc: for kernels, and for the tensors of an AttendRequest. Not for
  // the host.
  std::byte* address() const;
  size_t bytes() const;             // at least what was asked for
  int ordinal() const;              // of its GPU in this process, as of cudaGetDevice
  std::string device_uuid() const;  // of its GPU: "GPU-01020304-...", as nvidia-smi prints it
  bool registered() const;          // whether the server still has it

 private:
  friend class Client;
  static absl::StatusOr<DeviceMemory> Allocate(std::shared_ptr<const client::Connection> connection,
                                               size_t bytes, const std::string& device_id,
                                               const CallOptions& call);
  DeviceMemory(std::shared_ptr<const client::Connection> connection,
               std::shared_ptr<const client::local::DeviceMemory> memory);
  void Release();

  std::shared_ptr<const client::Connection> connection_;  // null: empty
  std::shared_ptr<const client::local::DeviceMemory> memory_;
};

}  // namespace flashcore

#endif  // FLASHCORE_DEVICE_MEMORY_H_

// One region of memory that a client on this host and the server share.
#ifndef FLASHCORE_SERVER_MEMORY_SHARED_REGION_H_
#define FLASHCORE_SERVER_MEMORY_SHARED_REGION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/socket.h"

namespace flashcore::server {

// Keeps the process alive when a mapped file becomes shorter. Touching a page that is gone raises
// SIGBUS, which ends the process by default. While a guard exists, the first SIGBUS in its range
// replaces the whole range by zeroed private memory: the thread continues with meaningless values,
// and lost() is true. Faults elsewhere go to the previous handler. Thread-safe.
class FaultGuard {
 public:
  static constexpr size_t kMaxGuards = 2048;  // in the process, at a time

  // `data` is page-aligned, and stays mapped as long as the guard exists. Nullopt if there are
  // kMaxGuards already.
  static std::optional<FaultGuard> Make(std::byte* data, size_t bytes);
  FaultGuard(FaultGuard&& other) noexcept;
  FaultGuard& operator=(FaultGuard&& other) = delete;
  ~FaultGuard();

  bool lost() const;

 private:
  explicit FaultGuard(size_t slot) : slot_(slot) {}

  size_t slot_;  // kMaxGuards: moved from
};

// Memory that a client shares with the server. The client can change the contents at any time, so
// the server reads nothing but tensor values from it, and counters that it checks. Thread-safe.
class SharedRegion {
 public:
  static constexpr size_t kAlignment = 16;  // of tensors: the width of a kernel's load
  static constexpr int kHost = -1;

  // INVALID_ARGUMENT if `file` is no memory. Asks no file system, and so never blocks.
  static absl::Status CheckIsMemory(const FileDescriptor& file);
  // INVALID_ARGUMENT if `file` is not a memfd that is sealed against shrinking, so that none of its
  // pages can go, or has huge pages, or if `bytes` is not a multiple of the page size within the
  // file. A hole that the client punches reads as zeros.
  static absl::Status CheckFile(const FileDescriptor& file, uint64_t bytes);
  // Maps the first `bytes` of a file that passed, which may then be closed. PERMISSION_DENIED if it
  // cannot be written and `read_only` is false; RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<SharedRegion>> Map(const FileDescriptor& file,
                                                           uint64_t bytes, bool read_only);
  virtual ~SharedRegion() = default;
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  std::byte* data() const { return data_; }  // the address on its device, if it has one
  size_t bytes() const { return bytes_; }
  bool read_only() const { return read_only_; }

  // Whether kernels of every device can access it at data(). Set before the region is shared.
  bool in_reach() const { return in_reach_; }
  void set_in_reach(bool in_reach) { in_reach_ = in_reach; }
  // The device whose memory it is, by its number in the fleet. kHost: none. Set before the region
  // is shared.
  int device() const { return device_; }
  void set_device(int device) { device_ = device; }

  // FAILED_PRECONDITION if the system had no memory for a part of it.
  virtual absl::Status Check() const { return absl::OkStatus(); }

 protected:
  SharedRegion(std::byte* data, size_t bytes, bool read_only)
      : data_(data), bytes_(bytes), read_only_(read_only) {}

 private:
  std::byte* const data_;
  const size_t bytes_;
  const bool read_only_;
  bool in_reach_ = false;
  int device_ = kHost;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_SHARED_REGION_H_

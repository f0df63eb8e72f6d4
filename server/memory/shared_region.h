// One region of memory that a client on this host shares.
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

// Mapped memory of a client: a memfd that it has sent, sealed against shrinking, so that none of
// its pages can go; a hole that the client punches reads as zeros. The client can change the
// contents at any time, so the server reads nothing but tensor values from it. FaultGuard still
// matters: the system may lack memory for a page that was never written. Thread-safe.
class SharedRegion {
 public:
  static constexpr size_t kAlignment = 16;  // of tensors: the width of a kernel's load

  // INVALID_ARGUMENT if `file` is no memory. Asks no file system, and so never blocks.
  static absl::Status CheckIsMemory(const FileDescriptor& file);
  // INVALID_ARGUMENT if `file` is not such a memfd, or has huge pages, or if `bytes` is not a
  // multiple of the page size within the file.
  static absl::Status CheckFile(const FileDescriptor& file, uint64_t bytes);
  // Maps the first `bytes` of a file that passed, which may then be closed. PERMISSION_DENIED if it
  // cannot be written and `read_only` is false; RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<SharedRegion>> Map(const FileDescriptor& file,
                                                           uint64_t bytes, bool read_only);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool read_only() const { return read_only_; }

  // Whether kernels of every device can access it at data(). Set before the region is shared.
  bool in_reach() const { return in_reach_; }
  void set_in_reach(bool in_reach) { in_reach_ = in_reach; }

  // FAILED_PRECONDITION if the system had no memory for a part of it.
  absl::Status Check() const;

 private:
  SharedRegion(std::byte* data, size_t bytes, bool read_only, FaultGuard guard)
      : data_(data), bytes_(bytes), read_only_(read_only), guard_(std::move(guard)) {}

  std::byte* const data_;
  const size_t bytes_;
  const bool read_only_;
  std::optional<FaultGuard> guard_;
  bool in_reach_ = false;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_SHARED_REGION_H_

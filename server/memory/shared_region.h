// One segment of a client's shared memory, POSIX or memfd: opened, then mapped.
#ifndef FLASHCORE_SERVER_MEMORY_SHARED_REGION_H_
#define FLASHCORE_SERVER_MEMORY_SHARED_REGION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/socket.h"

namespace flashcore::server {

// Keeps the process alive when a mapped file becomes shorter. Touching a page that is gone raises
// SIGBUS, which ends the process by default. While a guard exists, the first SIGBUS in its range
// replaces the whole range by zeroed private memory: the thread continues with meaningless values,
// and lost() is true. Faults elsewhere go to the previous handler. Thread-safe.
class FaultGuard {
 public:
  static constexpr size_t kMaxGuards = 1024;  // in the process, at a time

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

// An open segment. Only its first bytes are read until the client has shown that it owns it.
class SharedSegment {
 public:
  // INVALID_ARGUMENT if `name` is malformed, or if the segment has fewer than `bytes` or is no
  // regular file; NOT_FOUND; PERMISSION_DENIED.
  static absl::StatusOr<SharedSegment> Open(const std::string& name, uint64_t bytes,
                                            bool read_only);
  // A memfd that the client has sent, which is sealed against shrinking, so that none of its pages
  // can go. INVALID_ARGUMENT for any other file, also one of huge pages, and if `bytes` is not a
  // multiple of the page size within the file. FaultGuard still matters: the system may lack memory
  // for a page that was never written.
  static absl::StatusOr<SharedSegment> FromMemfd(FileDescriptor file, uint64_t bytes,
                                                 bool read_only);
  SharedSegment(SharedSegment&& other) noexcept = default;
  SharedSegment& operator=(SharedSegment&&) = delete;

  size_t bytes() const { return bytes_; }  // as passed to Open; the file's size may differ
  bool read_only() const { return read_only_; }
  bool StartsWith(absl::string_view text) const;
  bool IsWhole() const;              // the file still has bytes()
  absl::StatusOr<std::byte*> Map();  // all of bytes(), page-aligned

 private:
  SharedSegment(FileDescriptor file, size_t bytes, bool read_only, bool sealed)
      : file_(std::move(file)), bytes_(bytes), read_only_(read_only), sealed_(sealed) {}

  FileDescriptor file_;  // if sealed_, only until it is mapped
  const size_t bytes_;
  const bool read_only_;
  const bool sealed_;  // against shrinking
};

// A mapped segment. The client can change its contents at any time, so the server reads nothing but
// tensor values from it. The client can also shorten it, unless it is sealed; FaultGuard survives
// that. Thread-safe.
class SharedRegion {
 public:
  static constexpr size_t kAlignment = 16;  // of tensors: the width of a kernel's load

  static absl::StatusOr<std::unique_ptr<SharedRegion>> Map(SharedSegment segment);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return segment_.bytes(); }
  bool read_only() const { return segment_.read_only(); }

  // Whether kernels of every device can access it at data(). Set before the region is shared.
  bool in_reach() const { return in_reach_; }
  void set_in_reach(bool in_reach) { in_reach_ = in_reach; }

  // FAILED_PRECONDITION if a part of it is gone.
  absl::Status Check() const;

 private:
  SharedRegion(SharedSegment segment, std::byte* data, FaultGuard guard);

  const SharedSegment segment_;
  std::byte* const data_;
  std::optional<FaultGuard> guard_;
  bool in_reach_ = false;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_SHARED_REGION_H_

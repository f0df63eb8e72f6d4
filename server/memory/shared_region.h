// One POSIX shared-memory segment of a client: opened, and mapped.
#ifndef FLASHCORE_SERVER_MEMORY_SHARED_REGION_H_
#define FLASHCORE_SERVER_MEMORY_SHARED_REGION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/memory/fault_guard.h"

namespace flashcore::server {

// An open segment, of which only the first bytes are read before its owner is known.
class SharedSegment {
 public:
  // INVALID_ARGUMENT if `name` is none or the segment has fewer than `bytes` or is no regular file,
  // NOT_FOUND, PERMISSION_DENIED.
  static absl::StatusOr<SharedSegment> Open(const std::string& name, uint64_t bytes,
                                            bool read_only);
  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&&) = delete;
  ~SharedSegment();

  size_t bytes() const { return bytes_; }  // that were asked for; the file may have more, or fewer
  bool read_only() const { return read_only_; }
  bool StartsWith(absl::string_view text) const;
  bool IsWhole() const;                    // the file still has bytes()
  absl::StatusOr<std::byte*> Map() const;  // all of bytes(), at the start of a page

 private:
  SharedSegment(int fd, size_t bytes, bool read_only)
      : fd_(fd), bytes_(bytes), read_only_(read_only) {}

  int fd_;  // -1: moved away
  const size_t bytes_;
  const bool read_only_;
};

// A mapped segment. The client can change what is in it at any time, so nothing but values is ever
// read from it; and can make it shorter, which FaultGuard survives. Thread-safe.
class SharedRegion {
 public:
  static constexpr size_t kAlignment = 16;  // of tensors: what kernels load at once

  // `on_gone` runs once the memory is no longer mapped.
  static absl::StatusOr<std::unique_ptr<SharedRegion>> Map(SharedSegment segment,
                                                           std::function<void()> on_gone);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return segment_.bytes(); }
  bool read_only() const { return segment_.read_only(); }

  // Whether kernels of every device reach it at data(). `unpin` undoes what made it so.
  bool in_reach() const { return in_reach_; }
  void SetInReach(std::function<void()> unpin);

  // FAILED_PRECONDITION if a part of it is gone.
  absl::Status Check() const;

 private:
  SharedRegion(SharedSegment segment, std::byte* data, FaultGuard guard,
               std::function<void()> on_gone);

  const SharedSegment segment_;
  std::byte* const data_;
  std::optional<FaultGuard> guard_;
  bool in_reach_ = false;
  std::function<void()> unpin_;
  const std::function<void()> on_gone_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_SHARED_REGION_H_

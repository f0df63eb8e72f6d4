// Keeps the process alive when a file that it has mapped becomes shorter: touching a page that is
// gone raises SIGBUS, whose default is the end of the process.
#ifndef FLASHCORE_SERVER_MEMORY_FAULT_GUARD_H_
#define FLASHCORE_SERVER_MEMORY_FAULT_GUARD_H_

#include <cstddef>
#include <optional>

namespace flashcore::server {

// While it lives, the first SIGBUS in a mapped range puts zeroed private memory in place of the
// whole range: whoever touched it goes on, with values that mean nothing, and lost() is true.
// Faults elsewhere go to the handler that was there before. Thread-safe.
class FaultGuard {
 public:
  static constexpr size_t kMaxGuards = 1024;  // at a time, in the process

  // `data` is page-aligned, and stays mapped as long as the guard lives. None if there are
  // kMaxGuards already.
  static std::optional<FaultGuard> Make(std::byte* data, size_t bytes);
  FaultGuard(FaultGuard&& other) noexcept;
  FaultGuard& operator=(FaultGuard&& other) = delete;
  ~FaultGuard();

  bool lost() const;

 private:
  explicit FaultGuard(size_t slot) : slot_(slot) {}

  size_t slot_;  // kMaxGuards: moved away
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_MEMORY_FAULT_GUARD_H_

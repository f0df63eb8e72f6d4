// Counts what a process copies and allocates. A program that links this has its own memcpy, memmove
// and malloc, which its shared libraries (gRPC, protobuf, the C++ library) call too. Copies that a
// compiler has put in line, of a few bytes each, are not seen.
#ifndef FLASHCORE_TESTS_TRANSPORT_COUNTED_MEMORY_H_
#define FLASHCORE_TESTS_TRANSPORT_COUNTED_MEMORY_H_

#include <cstddef>
#include <cstdint>

namespace flashcore::testing {

// Bytes that calls, of any thread, have copied to and from [memory, memory + size) since it was
// made. At most kMaxWatches at a time, made and destroyed by one thread.
class CopyWatch {
 public:
  static constexpr int kMaxWatches = 8;

  CopyWatch(const void* memory, size_t size);
  ~CopyWatch();
  CopyWatch(const CopyWatch&) = delete;
  CopyWatch& operator=(const CopyWatch&) = delete;

  size_t copied_in() const;
  size_t copied_out() const;

 private:
  int slot_ = 0;
};

// Since the process started, by any thread.
size_t CopiedBytes();

struct Allocations {
  int64_t count = 0;
  int64_t bytes = 0;
};
Allocations AllocationsSoFar();

}  // namespace flashcore::testing

#endif  // FLASHCORE_TESTS_TRANSPORT_COUNTED_MEMORY_H_

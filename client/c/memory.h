// Memory that another process can map. Internal to the C library.
#ifndef FLASHCORE_CLIENT_C_MEMORY_H_
#define FLASHCORE_CLIENT_C_MEMORY_H_

#include <cstddef>
#include <utility>

#include "client/c/connection.h"
#include "client/c/status.h"

namespace flashcore::c {

// Zeroed, and mapped until it is destroyed. May be empty.
class Memory {
 public:
  // Of whole pages, at least `bytes`. RESOURCE_EXHAUSTED if this host has no memory.
  static Status Create(size_t bytes, Memory* memory);
  Memory() = default;
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(file_, other.file_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Memory();

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int file() const { return file_.get(); }  // a memfd, sealed against shrinking

 private:
  File file_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace flashcore::c

#endif  // FLASHCORE_CLIENT_C_MEMORY_H_

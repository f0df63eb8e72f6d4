// Memory that another process can map. Internal to the clients.
#ifndef FLASHCORE_CLIENT_LOCAL_MEMORY_H_
#define FLASHCORE_CLIENT_LOCAL_MEMORY_H_

#include <cstddef>
#include <utility>

#include "client/local/status.h"

namespace flashcore::client::local {

// Owns a file descriptor; -1: none.
class File {
 public:
  File() = default;
  explicit File(int fd) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~File();

  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

// Host memory: zeroed, and mapped until it is destroyed. May be empty. See device_memory.h for that
// of a GPU.
class Memory {
 public:
  // Whole pages, at least `bytes`. RESOURCE_EXHAUSTED if this host has none.
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

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int file() const { return file_.get(); }  // a memfd, sealed against shrinking

 private:
  File file_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_MEMORY_H_

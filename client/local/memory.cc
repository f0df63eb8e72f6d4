#include "client/local/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

namespace flashcore::client::local {

File::~File() {
  if (fd_ >= 0) close(fd_);
}

Status Memory::Create(size_t bytes, Memory* memory) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes == 0 || bytes > SIZE_MAX / 2) {
    return {kInvalidArgument, "bytes: " + std::to_string(bytes) + "; want at least 1", ""};
  }
  bytes = (bytes + page - 1) / page * page;
  File file(memfd_create("flashcore", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) return SystemError(kResourceExhausted, "local memory: memfd_create", errno);
  // Reserves the memory: without it, a later access could end the process with SIGBUS.
  const int reserved = posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
  if (reserved != 0) {
    return SystemError(kResourceExhausted, "local memory: posix_fallocate", reserved);
  }
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    return SystemError(kResourceExhausted, "local memory: F_ADD_SEALS", errno);
  }
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) return SystemError(kResourceExhausted, "local memory: mmap", errno);
  Memory made;
  made.file_ = std::move(file);
  made.data_ = static_cast<std::byte*>(data);
  made.bytes_ = bytes;
  *memory = std::move(made);
  return {};
}

Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace flashcore::client::local

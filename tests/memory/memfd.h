// Memory of a client: a memfd, mapped.
#ifndef FLASHCORE_TESTS_MEMORY_MEMFD_H_
#define FLASHCORE_TESTS_MEMORY_MEMFD_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <memory>

#include "server/base/socket.h"
#include "server/memory/shared_region.h"

namespace flashcore::server::testing {

class Memfd {
 public:
  enum class Kind { kSealed, kUnsealed };

  explicit Memfd(size_t bytes, Kind kind = Kind::kSealed)
      : bytes_(bytes), file_(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    Resize(bytes);
    if (kind == Kind::kSealed) fcntl(file_.get(), F_ADD_SEALS, F_SEAL_SHRINK);
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
    if (data == MAP_FAILED) std::abort();
    data_ = static_cast<std::byte*>(data);
  }
  ~Memfd() { munmap(data_, bytes_); }
  Memfd(const Memfd&) = delete;
  Memfd& operator=(const Memfd&) = delete;

  int fd() const { return file_.get(); }
  std::byte* data() const { return data_; }  // do not touch it beyond a new end
  size_t bytes() const { return bytes_; }
  void Resize(size_t bytes) {  // only if it is not sealed
    if (ftruncate(file_.get(), static_cast<off_t>(bytes)) != 0) std::abort();
  }

  // Maps it as the server does.
  std::unique_ptr<SharedRegion> Map(bool read_only = false) const {
    return SharedRegion::Map(FileDescriptor(dup(fd())), bytes_, read_only).value();
  }

 private:
  const size_t bytes_;
  FileDescriptor file_;
  std::byte* data_ = nullptr;
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_MEMORY_MEMFD_H_

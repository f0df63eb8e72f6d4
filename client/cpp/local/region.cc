#include "client/cpp/local/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"

namespace flashcore::client::local {
namespace {

absl::Status SystemError(const char* call, int code) {
  return absl::ResourceExhaustedError(absl::StrCat("local memory: ", call, ": ", strerror(code)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Region>> Region::Create(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes == 0 || bytes > SIZE_MAX / 2) {
    return absl::InvalidArgumentError(absl::StrCat("bytes: ", bytes, "; want at least 1"));
  }
  bytes = (bytes + page - 1) / page * page;
  UniqueFd fd(memfd_create("flashcore", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) return SystemError("memfd_create", errno);
  // Reserves the memory: without it, a later access could end the process with SIGBUS.
  const int reserved = posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  if (reserved != 0) return SystemError("posix_fallocate", reserved);
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) return SystemError("F_ADD_SEALS", errno);
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return SystemError("mmap", errno);
  return absl::WrapUnique(new Region(std::move(fd), static_cast<std::byte*>(data), bytes));
}

Region::~Region() { munmap(data_, bytes_); }

}  // namespace flashcore::client::local

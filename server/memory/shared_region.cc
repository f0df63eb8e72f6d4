#include "server/memory/shared_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"

namespace flashcore::server {
namespace {

constexpr size_t kMaxNameBytes = 255;  // after the slash: the file system's limit
constexpr uint64_t kMinBytes = 16;     // room for a challenge

absl::Status CheckName(const std::string& name) {
  const bool ok = name.size() > 1 && name.size() <= 1 + kMaxNameBytes && name[0] == '/' &&
                  name.find('/', 1) == std::string::npos && name.find('\0') == std::string::npos;
  if (ok) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("name: ", name.size(), " bytes; want a slash and then 1 to ", kMaxNameBytes,
                   " others, none of them a slash or NUL"));
}

absl::Status OpenError(int error) {
  const std::string message = absl::StrCat("name: cannot open the segment: ", strerror(error));
  switch (error) {
    case ENOENT:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(message);
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return absl::ResourceExhaustedError(message);
    default:
      return absl::InvalidArgumentError(message);
  }
}

}  // namespace

absl::StatusOr<SharedSegment> SharedSegment::Open(const std::string& name, uint64_t bytes,
                                                  bool read_only) {
  if (absl::Status status = CheckName(name); !status.ok()) return status;
  // Not to wait for the other end of a pipe that somebody has put there.
  const int fd = shm_open(name.c_str(), (read_only ? O_RDONLY : O_RDWR) | O_NONBLOCK, 0);
  if (fd < 0) return OpenError(errno);
  SharedSegment segment(fd, bytes, read_only);
  struct stat file;
  if (fstat(fd, &file) != 0 || !S_ISREG(file.st_mode)) {
    return absl::InvalidArgumentError("name: not shared memory");
  }
  if (bytes < kMinBytes || bytes > static_cast<uint64_t>(file.st_size)) {
    return absl::InvalidArgumentError(absl::StrCat("bytes: ", bytes, " is not in ", kMinBytes, "..",
                                                   file.st_size, ", the segment's size"));
  }
  return segment;
}

SharedSegment::SharedSegment(SharedSegment&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), bytes_(other.bytes_), read_only_(other.read_only_) {}

SharedSegment::~SharedSegment() {
  if (fd_ >= 0) close(fd_);
}

bool SharedSegment::StartsWith(absl::string_view text) const {
  std::string start(text.size(), '\0');
  return pread(fd_, start.data(), start.size(), 0) == static_cast<ssize_t>(start.size()) &&
         start == text;
}

bool SharedSegment::IsWhole() const {
  struct stat file;
  return fstat(fd_, &file) == 0 && static_cast<uint64_t>(file.st_size) >= bytes_;
}

absl::StatusOr<std::byte*> SharedSegment::Map() const {
  const int protection = read_only_ ? PROT_READ : PROT_READ | PROT_WRITE;
  // Page faults now, not in requests.
  void* const memory =
      mmap(nullptr, bytes_, protection, MAP_SHARED | MAP_POPULATE | MAP_NORESERVE, fd_, 0);
  if (memory != MAP_FAILED) return static_cast<std::byte*>(memory);
  return absl::ResourceExhaustedError(
      absl::StrCat("bytes: cannot map ", bytes_, ": ", strerror(errno)));
}

absl::StatusOr<std::unique_ptr<SharedRegion>> SharedRegion::Map(SharedSegment segment,
                                                                std::function<void()> on_gone) {
  const absl::StatusOr<std::byte*> data = segment.Map();
  if (!data.ok()) return data.status();
  std::optional<FaultGuard> guard = FaultGuard::Make(*data, segment.bytes());
  if (!guard.has_value()) {
    munmap(*data, segment.bytes());
    return absl::ResourceExhaustedError(
        absl::StrCat("shared memory: ", FaultGuard::kMaxGuards,
                     " regions are registered, the most there can be"));
  }
  return absl::WrapUnique(
      new SharedRegion(std::move(segment), *data, *std::move(guard), std::move(on_gone)));
}

SharedRegion::SharedRegion(SharedSegment segment, std::byte* data, FaultGuard guard,
                           std::function<void()> on_gone)
    : segment_(std::move(segment)),
      data_(data),
      guard_(std::move(guard)),
      on_gone_(std::move(on_gone)) {}

SharedRegion::~SharedRegion() {
  if (unpin_) unpin_();
  guard_.reset();
  munmap(data_, bytes());
  on_gone_();
}

void SharedRegion::SetInReach(std::function<void()> unpin) {
  in_reach_ = true;
  unpin_ = std::move(unpin);
}

absl::Status SharedRegion::Check() const {
  if (!guard_->lost() && segment_.IsWhole()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "region_id: the segment has become shorter than the ", bytes(),
      " bytes of the region, or has no memory for them; the region is of no further use"));
}

}  // namespace flashcore::server

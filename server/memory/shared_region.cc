#include "server/memory/shared_region.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

// Read by the signal handler, so: no locks, no allocation. A range is one word (first page and page
// count), set after it is mapped and cleared before it is unmapped. Mapped ranges do not overlap,
// so the one that contains the faulting address is the right one, even while other threads change
// other ranges.
constexpr int kPageCountBits = 28;  // 1 TiB; the other 36 bits hold the page of a 48-bit address
std::atomic<uint64_t> ranges[FaultGuard::kMaxGuards];  // 0: free
std::atomic<bool> lost_ranges[FaultGuard::kMaxGuards];
constexpr uint64_t kTaken = uint64_t{1} << kPageCountBits;  // no pages

const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
struct sigaction previous_action;

bool ReplaceRange(uint64_t address) {
  const uint64_t page = address / page_bytes;
  for (size_t slot = 0; slot < FaultGuard::kMaxGuards; ++slot) {
    const uint64_t range = ranges[slot].load();
    const uint64_t first = range >> kPageCountBits;
    const uint64_t count = range & ((uint64_t{1} << kPageCountBits) - 1);
    if (page < first || page >= first + count) continue;
    lost_ranges[slot].store(true);
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the handler knows the range as numbers only
    return mmap(reinterpret_cast<void*>(first * page_bytes), count * page_bytes,
                PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
                0) != MAP_FAILED;
  }
  return false;
}

void OnFault(int signal, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const bool replaced = ReplaceRange(reinterpret_cast<uint64_t>(info->si_addr));
  errno = saved_errno;
  if (replaced) return;
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(signal, info, context);
  } else if (previous_action.sa_handler == SIG_DFL || previous_action.sa_handler == SIG_IGN) {
    ::signal(signal, SIG_DFL);  // the instruction faults again and ends the process
  } else {
    previous_action.sa_handler(signal);
  }
}

void InstallHandler() {
  struct sigaction action = {};
  action.sa_sigaction = OnFault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGBUS, &action, &previous_action);
}

// FaultGuard matters although no page can go: the system may lack memory for a page that was never
// written.
class MappedFile final : public SharedRegion {
 public:
  MappedFile(std::byte* data, size_t bytes, bool read_only, FaultGuard guard)
      : SharedRegion(data, bytes, read_only), guard_(std::move(guard)) {}
  ~MappedFile() override {
    guard_.reset();
    munmap(data(), bytes());
  }

  absl::Status Check() const override {
    if (!guard_->lost()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("region_id: the system has no memory for all of the ", bytes(),
                     " bytes of the region; it can no longer be used"));
  }

 private:
  std::optional<FaultGuard> guard_;
};

absl::Status NotMemory() {
  return absl::InvalidArgumentError(
      "file: not a memfd of normal pages; make it with memfd_create and MFD_ALLOW_SEALING, "
      "without MFD_HUGETLB");
}

}  // namespace

std::optional<FaultGuard> FaultGuard::Make(std::byte* data, size_t bytes) {
  static const bool installed = (InstallHandler(), true);
  static_cast<void>(installed);
  const uint64_t first = reinterpret_cast<uint64_t>(data) / page_bytes;
  const uint64_t count = (bytes + page_bytes - 1) / page_bytes;
  if (count >> kPageCountBits != 0 || first >> (64 - kPageCountBits) != 0) return std::nullopt;
  for (size_t slot = 0; slot < kMaxGuards; ++slot) {
    uint64_t free = 0;
    if (!ranges[slot].compare_exchange_strong(free, kTaken)) continue;
    lost_ranges[slot].store(false);
    ranges[slot].store(first << kPageCountBits | count);
    return FaultGuard(slot);
  }
  return std::nullopt;
}

FaultGuard::FaultGuard(FaultGuard&& other) noexcept
    : slot_(std::exchange(other.slot_, kMaxGuards)) {}

FaultGuard::~FaultGuard() {
  if (slot_ < kMaxGuards) ranges[slot_].store(0);
}

bool FaultGuard::lost() const { return lost_ranges[slot_].load(std::memory_order_relaxed); }

absl::Status SharedRegion::CheckIsMemory(const FileDescriptor& file) {
  return fcntl(file.get(), F_GET_SEALS) < 0 ? NotMemory() : absl::OkStatus();
}

absl::Status SharedRegion::CheckFile(const FileDescriptor& file, uint64_t bytes) {
  if (absl::Status is_memory = CheckIsMemory(file); !is_memory.ok()) return is_memory;
  struct stat status;
  struct statfs system;
  const bool has_normal_pages = fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode) &&
                                fstatfs(file.get(), &system) == 0 && system.f_type == TMPFS_MAGIC;
  if (!has_normal_pages) return NotMemory();
  if ((fcntl(file.get(), F_GET_SEALS) & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError(
        "file: not sealed against shrinking; use fcntl(F_ADD_SEALS, F_SEAL_SHRINK)");
  }
  if (bytes == 0 || bytes % page_bytes != 0 || bytes > static_cast<uint64_t>(status.st_size)) {
    return absl::InvalidArgumentError(absl::StrCat("bytes: ", bytes, " is not a multiple of ",
                                                   page_bytes, " in ", page_bytes, "..",
                                                   status.st_size, ", the file's size"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SharedRegion>> SharedRegion::Map(const FileDescriptor& file,
                                                                uint64_t bytes, bool read_only) {
  const int protection = read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  // MAP_POPULATE: take the page faults now, not during requests.
  void* const memory =
      mmap(nullptr, bytes, protection, MAP_SHARED | MAP_POPULATE | MAP_NORESERVE, file.get(), 0);
  if (memory == MAP_FAILED && (errno == EACCES || errno == EPERM)) {
    return absl::PermissionDeniedError("file: it cannot be written; register it read_only");
  }
  if (memory == MAP_FAILED) {
    return WithInfo(absl::ResourceExhaustedError(
                        absl::StrCat("bytes: cannot map ", bytes, ": ", strerror(errno))),
                    reason::kServerFull);
  }
  auto* const data = static_cast<std::byte*>(memory);
  std::optional<FaultGuard> guard = FaultGuard::Make(data, bytes);
  if (!guard.has_value()) {
    munmap(data, bytes);
    return WithInfo(absl::ResourceExhaustedError(
                        absl::StrCat("shared memory: ", FaultGuard::kMaxGuards,
                                     " regions are registered, which is the limit of the server")),
                    reason::kServerFull);
  }
  return std::make_unique<MappedFile>(data, bytes, read_only, *std::move(guard));
}

}  // namespace flashcore::server

#include "client/cpp/shared_memory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/memory/memory.h"
#include "absl/random/random.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/connection.h"
#include "client/cpp/local/link.h"

namespace flashcore {
namespace {

constexpr size_t kChallengeBytes = 16;
constexpr absl::Duration kUnregisterTimeout = absl::Seconds(5);

absl::Status SystemError(const char* call) {
  return absl::ResourceExhaustedError(absl::StrCat("shared memory: ", call, ": ", strerror(errno)));
}

// Where Linux keeps POSIX shared memory, and how our segments are called there. As long as one has
// a name, its creator holds a lock on it.
constexpr char kFolder[] = "/dev/shm/";
constexpr char kPrefix[] = "flashcore-held-";

// A process that was killed while it registered a segment has left its name, but not its lock.
void RemoveLeftovers() {
  DIR* const folder = opendir(kFolder);
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    if (!absl::StartsWith(entry->d_name, kPrefix)) continue;
    const int fd = openat(dirfd(folder), entry->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) continue;  // another user's, or gone
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) unlinkat(dirfd(folder), entry->d_name, 0);
    close(fd);
  }
  closedir(folder);
}

}  // namespace

// Memory and its registration; ends both when destroyed.
class SharedMemory::Backing {
 public:
  virtual ~Backing() = default;
  virtual std::byte* data() const = 0;
  virtual size_t bytes() const = 0;
  virtual bool registered() const = 0;
};

// A memfd over the local socket.
class SharedMemory::LocalBacking final : public Backing {
 public:
  LocalBacking(std::shared_ptr<const client::Connection> connection,
               std::shared_ptr<client::local::Region> region, size_t bytes)
      : connection_(std::move(connection)), region_(std::move(region)), bytes_(bytes) {}
  ~LocalBacking() override { connection_->local()->Remove(region_.get()); }

  std::byte* data() const override { return region_->data(); }
  size_t bytes() const override { return bytes_; }
  bool registered() const override { return connection_->local()->Registered(region_.get()); }

 private:
  const std::shared_ptr<const client::Connection> connection_;
  const std::shared_ptr<client::local::Region> region_;
  const size_t bytes_;  // that were asked for; the region has whole pages
};

absl::StatusOr<std::unique_ptr<SharedMemory::Backing>> SharedMemory::CreateLocal(
    std::shared_ptr<const client::Connection> connection, size_t bytes,
    const SharedMemoryOptions& options, absl::Time deadline) {
  absl::StatusOr<std::unique_ptr<client::local::Region>> made =
      client::local::Region::Create(bytes);
  if (!made.ok()) return made.status();
  std::shared_ptr<client::local::Region> region = *std::move(made);
  const absl::Status status = connection->local()->Add(region, options.inputs_only, deadline);
  if (!status.ok()) return status;
  return std::make_unique<LocalBacking>(std::move(connection), std::move(region), bytes);
}

// A new POSIX segment, mapped. It has no name until it is complete, and then only while the server
// needs one: so a process that is killed leaves next to nothing.
class SharedMemory::Segment {
 public:
  static absl::StatusOr<std::unique_ptr<Segment>> Create(size_t bytes, unsigned mode) {
    RemoveLeftovers();
    auto segment = absl::WrapUnique(new Segment);
    segment->fd_ = open(kFolder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (segment->fd_ < 0) return SystemError("open of /dev/shm");
    if (absl::Status status = segment->Map(bytes, mode); !status.ok()) return status;
    if (absl::Status status = segment->Link(); !status.ok()) return status;
    return segment;
  }
  ~Segment() {
    Unlink();
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  const std::string& name() const { return name_; }
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // From then on nothing remains of the segment, however this process ends.
  void Unlink() {
    if (!name_.empty()) shm_unlink(name_.c_str());
    name_.clear();
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  Segment() = default;

  absl::Status Map(size_t bytes, unsigned mode) {
    // Reserves the memory: without it, a later access could end the process with SIGBUS.
    if ((errno = posix_fallocate(fd_, 0, static_cast<off_t>(bytes))) != 0) {
      return SystemError("posix_fallocate");
    }
    if (fchmod(fd_, mode) != 0) return SystemError("fchmod");
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (data == MAP_FAILED) return SystemError("mmap");
    data_ = static_cast<std::byte*>(data);
    bytes_ = bytes;
    return absl::OkStatus();
  }

  absl::Status Link() {
    if (flock(fd_, LOCK_EX) != 0) return SystemError("flock");
    absl::BitGen random;
    const std::string name = absl::StrCat(kPrefix, absl::Hex(random(), absl::kZeroPad16),
                                          absl::Hex(random(), absl::kZeroPad16));
    if (linkat(AT_FDCWD, absl::StrCat("/proc/self/fd/", fd_).c_str(), AT_FDCWD,
               absl::StrCat(kFolder, name).c_str(), AT_SYMLINK_FOLLOW) != 0) {
      return SystemError("linkat");
    }
    name_ = absl::StrCat("/", name);
    return absl::OkStatus();
  }

  std::string name_;  // empty: not linked, or unlinked
  int fd_ = -1;       // holds the lock while it is linked
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// A RegisterMemory stream. Owned by the SharedMemory, and by itself until OnDone returns.
//
// A hold delays OnDone while a write may still start. It is removed once, when reading has ended.
class SharedMemory::Registration final
    : public grpc::ClientBidiReactor<v1::RegisterMemoryRequest, v1::RegisterMemoryResponse>,
      public std::enable_shared_from_this<Registration> {
 public:
  Registration(std::shared_ptr<const client::Connection> connection, const Segment& segment,
               bool read_only)
      : connection_(std::move(connection)),
        stub_(v1::AttentionService::NewStub(connection_->callback_channel())),
        data_(segment.data()) {
    request_.set_name(segment.name());
    request_.set_bytes(segment.bytes());
    request_.set_read_only(read_only);
    region_.bytes = segment.bytes();
    region_.read_only = read_only;
  }

  // Blocks until the region is registered, or returns why it cannot be.
  absl::Status Start(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_) {
    self_ = shared_from_this();
    connection_->Prepare(absl::InfiniteFuture(), /*affinity=*/"", &context_);
    stub_->async()->RegisterMemory(&context_, this);
    AddHold();
    StartRead(&response_);
    StartWrite(&request_);
    StartCall();
    absl::MutexLock lock(&mutex_);
    const auto settled = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return done_ || !region_.id.empty();
    };
    if (!mutex_.AwaitWithDeadline(absl::Condition(&settled), deadline)) {
      context_.TryCancel();
      mutex_.Await(absl::Condition(&done_));
      return absl::DeadlineExceededError("shared memory: the server did not answer in time");
    }
    if (!done_) return absl::OkStatus();
    return final_.ok() ? absl::InternalError("the server ended RegisterMemory too early") : final_;
  }

  bool alive() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return !ended_;
  }

  void Stop() ABSL_LOCKS_EXCLUDED(mutex_) {
    connection_->regions().Remove(data_);
    absl::MutexLock lock(&mutex_);
    if (!ended_) StartWritesDone();
    if (mutex_.AwaitWithTimeout(absl::Condition(&done_), kUnregisterTimeout)) return;
    context_.TryCancel();
    mutex_.Await(absl::Condition(&done_));
  }

  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      ended_ = !ok;
      if (ok) Take();
    }
    if (ok) return StartRead(&response_);
    connection_->regions().Remove(data_);
    RemoveHold();
  }

  void OnWriteDone(bool /*ok*/) override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    Prove();
  }

  void OnDone(const grpc::Status& status) override ABSL_LOCKS_EXCLUDED(mutex_) {
    const std::shared_ptr<Registration> self = std::move(self_);
    absl::MutexLock lock(&mutex_);
    final_ = client::FromGrpc(status);
    done_ = true;
  }

 private:
  void Take() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!response_.region_id().empty() && region_.id.empty()) {
      region_.id = response_.region_id();
      connection_->regions().Add(data_, region_);
    } else if (response_.challenge().size() == kChallengeBytes && !challenged_) {
      std::memcpy(data_, response_.challenge().data(), kChallengeBytes);
      challenged_ = true;
      Prove();
    }
  }

  // Tells the server that the challenge is in place, as soon as a write can start.
  void Prove() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!challenged_ || writing_ || proved_ || ended_) return;
    writing_ = proved_ = true;
    request_.Clear();
    StartWrite(&request_);
  }

  const std::shared_ptr<const client::Connection> connection_;
  const std::unique_ptr<v1::AttentionService::Stub> stub_;
  std::byte* const data_;
  grpc::ClientContext context_;
  v1::RegisterMemoryRequest request_;    // of the write in progress
  v1::RegisterMemoryResponse response_;  // of the read in progress
  std::shared_ptr<Registration> self_;   // set by Start, dropped by OnDone

  mutable absl::Mutex mutex_;
  client::RegionTable::Region region_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = true;  // the request of Start
  bool challenged_ ABSL_GUARDED_BY(mutex_) = false;
  bool proved_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // reading has ended: start no more writes
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status final_ ABSL_GUARDED_BY(mutex_);  // valid once done_
};

// A POSIX segment over gRPC.
class SharedMemory::PosixBacking final : public Backing {
 public:
  PosixBacking(std::unique_ptr<Segment> segment, std::shared_ptr<Registration> registration)
      : segment_(std::move(segment)), registration_(std::move(registration)) {}
  ~PosixBacking() override { registration_->Stop(); }

  std::byte* data() const override { return segment_->data(); }
  size_t bytes() const override { return segment_->bytes(); }
  bool registered() const override { return registration_->alive(); }

 private:
  const std::unique_ptr<Segment> segment_;
  const std::shared_ptr<Registration> registration_;
};

absl::StatusOr<std::unique_ptr<SharedMemory::Backing>> SharedMemory::CreatePosix(
    std::shared_ptr<const client::Connection> connection, size_t bytes,
    const SharedMemoryOptions& options, absl::Time deadline) {
  absl::StatusOr<std::unique_ptr<Segment>> segment = Segment::Create(bytes, options.mode);
  if (!segment.ok()) return segment.status();
  auto registration =
      std::make_shared<Registration>(std::move(connection), **segment, options.inputs_only);
  absl::Status status = registration->Start(deadline);
  if (!status.ok()) return status;
  (*segment)->Unlink();
  return std::make_unique<PosixBacking>(*std::move(segment), std::move(registration));
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(
    std::shared_ptr<const client::Connection> connection, size_t bytes,
    const SharedMemoryOptions& options, const CallOptions& call) {
  if (bytes < kChallengeBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes: ", bytes, "; want at least ", kChallengeBytes));
  }
  const absl::Time deadline = connection->Deadline(call);
  const bool local = connection->local() != nullptr;
  absl::StatusOr<std::unique_ptr<Backing>> backing =
      (local ? &CreateLocal : &CreatePosix)(std::move(connection), bytes, options, deadline);
  if (!backing.ok()) return backing.status();
  return absl::WrapUnique(new SharedMemory(*std::move(backing)));
}

SharedMemory::SharedMemory(std::unique_ptr<Backing> backing) : backing_(std::move(backing)) {}

SharedMemory::~SharedMemory() = default;

std::byte* SharedMemory::data() const { return backing_->data(); }
size_t SharedMemory::bytes() const { return backing_->bytes(); }
bool SharedMemory::registered() const { return backing_->registered(); }

}  // namespace flashcore

#include "tests/client/fake_local_server.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/wire/frames.h"

namespace flashcore {

struct FakeLocalServer::RegionMemory {
  RegionMemory(int fd, size_t size)
      : bytes(size),
        data(static_cast<std::byte*>(
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0))) {}
  ~RegionMemory() { munmap(data, bytes); }
  const size_t bytes;
  std::byte* const data;
};

struct FakeLocalServer::RingServer {
  std::shared_ptr<RegionMemory> memory;
  wire::RingHeader* header = nullptr;
  uint32_t slots = 0, slot_bytes = 0;
  int doorbell = -1;
  std::atomic<bool> stop{false};
  std::thread thread;
  absl::Mutex mutex;
  std::set<uint64_t> cancelled ABSL_GUARDED_BY(mutex);

  ~RingServer() {
    stop = true;
    if (thread.joinable()) thread.join();
    close(doorbell);
  }
  std::byte* Slot(uint64_t number, bool completion) {
    return reinterpret_cast<std::byte*>(header + 1) +
           (number % slots + (completion ? slots : 0)) * slot_bytes;
  }
};

struct FakeLocalServer::Connection {
  int fd = -1;
  std::thread thread;
  std::atomic<bool> ended{false};
  absl::Mutex mutex;
  std::map<std::string, std::shared_ptr<RegionMemory>> regions ABSL_GUARDED_BY(mutex);
  std::map<uint32_t, std::unique_ptr<RingServer>> rings ABSL_GUARDED_BY(mutex);
  uint32_t next = 0;

  std::byte* At(const v1::MemoryRange& range) ABSL_LOCKS_EXCLUDED(mutex) {
    absl::MutexLock lock(&mutex);
    const auto it = regions.find(range.region_id());
    return it == regions.end() ? nullptr : it->second->data + range.offset();
  }
  // The counter of a point, as long as it is held; null without a point.
  std::shared_ptr<std::atomic<uint64_t>> Counter(const v1::TimelinePoint& point)
      ABSL_LOCKS_EXCLUDED(mutex) {
    absl::MutexLock lock(&mutex);
    const auto it = regions.find(point.region_id());
    if (it == regions.end()) return nullptr;
    return {it->second,
            reinterpret_cast<std::atomic<uint64_t>*>(it->second->data + point.offset())};
  }
  // Whether the point is reached, or there is none.
  bool Reached(const v1::TimelinePoint& point) {
    const auto counter = Counter(point);
    return counter == nullptr || static_cast<int64_t>(counter->load() - point.value()) >= 0;
  }
  void Raise(const v1::TimelinePoint& point) {
    if (const auto counter = Counter(point); !Reached(point)) counter->store(point.value());
  }
  void Send(const v1::LocalReply& reply, int to_pass = -1) {
    wire::SendBytes(fd, wire::Frame(reply.SerializeAsString()), to_pass, /*flags=*/0);
  }
  // False at the end. `*passed` is -1 without a descriptor.
  bool Receive(v1::LocalRequest* request, int* passed) {
    *passed = -1;
    char header[wire::kFrameHeaderBytes];
    if (!Read(header, sizeof(header), passed)) return false;
    std::string message(wire::FrameLength(header), '\0');
    return Read(message.data(), message.size(), passed) && request->ParseFromString(message);
  }
  bool Read(char* to, size_t size, int* passed) const {
    while (size > 0) {
      const wire::Received received =
          wire::ReceiveBytes(fd, to, size, /*flags=*/0, [passed](int file) { *passed = file; });
      if (received.bytes <= 0) return false;
      to += received.bytes;
      size -= static_cast<size_t>(received.bytes);
    }
    return true;
  }
};

FakeLocalServer::FakeLocalServer() {
  char folder[] = "/tmp/flashcore-local-XXXXXX";
  folder_ = mkdtemp(folder);
  path_ = folder_ + "/s";
  Start();
}

FakeLocalServer::~FakeLocalServer() {
  Stop();
  rmdir(folder_.c_str());
}

void FakeLocalServer::Start() {
  stopping_ = false;
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener_, 64) != 0) {
    std::abort();
  }
  acceptor_ = std::thread([this] { Accept(); });
}

void FakeLocalServer::Stop() {
  if (listener_ < 0) return;
  stopping_ = true;
  shutdown(listener_, SHUT_RDWR);
  acceptor_.join();
  close(listener_);
  listener_ = -1;
  unlink(path_.c_str());
  std::vector<std::unique_ptr<Connection>> connections;
  {
    absl::MutexLock lock(&mutex_);
    connections.swap(connections_);
  }
  for (const auto& connection : connections) shutdown(connection->fd, SHUT_RDWR);
  for (const auto& connection : connections) {
    connection->thread.join();
    close(connection->fd);
  }
}

size_t FakeLocalServer::regions() const {
  absl::MutexLock lock(&mutex_);
  size_t count = 0;
  for (const auto& connection : connections_) {
    absl::MutexLock connection_lock(&connection->mutex);
    count += connection->regions.size();
  }
  return count;
}

uint64_t FakeLocalServer::submitted() const {
  return Sum([](const wire::RingHeader& ring) { return ring.submitted.load(); });
}

size_t FakeLocalServer::rings() const {
  return Sum([](const wire::RingHeader&) { return uint64_t{1}; });
}

uint64_t FakeLocalServer::sleepers() const {
  return Sum([](const wire::RingHeader& ring) { return uint64_t{ring.client_sleeps.load()}; });
}

uint64_t FakeLocalServer::Sum(uint64_t (*of)(const wire::RingHeader& ring)) const {
  absl::MutexLock lock(&mutex_);
  uint64_t sum = 0;
  for (const auto& connection : connections_) {
    absl::MutexLock connection_lock(&connection->mutex);
    for (const auto& [number, ring] : connection->rings) sum += of(*ring->header);
  }
  return sum;
}

std::shared_ptr<std::atomic<uint64_t>> FakeLocalServer::Counter(
    const v1::TimelinePoint& point) const {
  absl::MutexLock lock(&mutex_);
  return connections_.back()->Counter(point);
}

void FakeLocalServer::Accept() {
  while (true) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return;
    auto connection = std::make_unique<Connection>();
    connection->fd = fd;
    ++accepted_;
    Connection* const raw = connection.get();
    absl::MutexLock lock(&mutex_);
    connection->thread = std::thread([this, raw] { Serve(raw); });
    connections_.push_back(std::move(connection));
  }
}

void FakeLocalServer::Serve(Connection* connection) {
  v1::LocalRequest request;
  int fd = -1;
  while (connection->Receive(&request, &fd)) {
    Handle(connection, request, fd);
    if (fd >= 0) close(fd);
  }
  connection->ended = true;
  std::map<uint32_t, std::unique_ptr<RingServer>> rings;
  {
    absl::MutexLock lock(&connection->mutex);
    rings.swap(connection->rings);
  }
  rings.clear();
  absl::MutexLock lock(&connection->mutex);
  connection->regions.clear();
}

// Returns the file of the memory.
int FakeLocalServer::AllocateDeviceMemory(Connection* connection, const std::string& device_uuid,
                                          uint64_t bytes, v1::LocalReply* reply) {
  constexpr uint64_t kGranularity = 65536;
  const uint64_t whole = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  const int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(whole)) != 0) std::abort();
  absl::MutexLock lock(&connection->mutex);
  const std::string id = "device-" + std::to_string(100'000'000 + connection->next++);
  connection->regions[id] = std::make_shared<RegionMemory>(fd, whole);
  v1::LocalAllocateDeviceMemoryResult* const result = reply->mutable_allocate_device_memory();
  result->set_region_id(id);
  result->set_bytes(whole);
  result->set_device_uuid(device_uuid);
  return fd;
}

void FakeLocalServer::Handle(Connection* connection, const v1::LocalRequest& request, int fd) {
  v1::LocalReply reply;
  reply.set_id(request.id());
  if (on_request != nullptr && on_request(request, &reply)) return connection->Send(reply);
  if (request.has_hello()) {
    reply.mutable_hello()->set_version(wire::kLocalVersion);
    reply.mutable_hello()->set_identity("uid:" + std::to_string(getuid()));
  } else if (request.has_register_memory()) {
    absl::MutexLock lock(&connection->mutex);
    const std::string id = "region-" + std::to_string(100'000'000 + connection->next++);
    struct stat status = {};
    fstat(fd, &status);
    if (status.st_size < static_cast<off_t>(request.register_memory().bytes())) std::abort();
    connection->regions[id] = std::make_shared<RegionMemory>(fd, request.register_memory().bytes());
    reply.mutable_register_memory()->set_region_id(id);
  } else if (request.has_allocate_device_memory()) {
    const int memory = AllocateDeviceMemory(connection, device_uuid,
                                            request.allocate_device_memory().bytes(), &reply);
    connection->Send(reply, memory);
    close(memory);
    return;
  } else if (request.has_unregister_memory()) {
    absl::MutexLock lock(&connection->mutex);
    connection->regions.erase(request.unregister_memory().region_id());
  } else if (request.has_open_ring()) {
    auto ring = std::make_unique<RingServer>();
    absl::MutexLock lock(&connection->mutex);
    ring->memory = connection->regions.at(request.open_ring().region_id());
    ring->header =
        reinterpret_cast<wire::RingHeader*>(ring->memory->data + request.open_ring().offset());
    ring->slots = request.open_ring().slots();
    ring->slot_bytes = request.open_ring().slot_bytes();
    ring->doorbell = eventfd(0, EFD_CLOEXEC);
    RingServer* const raw = ring.get();
    ring->thread = std::thread([this, connection, raw] { ServeRing(connection, raw); });
    reply.mutable_open_ring()->set_ring(connection->next);
    connection->rings[connection->next++] = std::move(ring);
    return connection->Send(reply, raw->doorbell);
  } else if (request.has_close_ring()) {
    std::unique_ptr<RingServer> ring;
    absl::MutexLock lock(&connection->mutex);
    ring = std::move(connection->rings[request.close_ring().ring()]);
    connection->rings.erase(request.close_ring().ring());
  } else if (request.has_cancel()) {
    ++cancelled_;
    absl::MutexLock lock(&connection->mutex);
    const auto it = connection->rings.find(request.cancel().ring());
    if (!request.cancel().in_ring() || it == connection->rings.end()) return;
    absl::MutexLock ring_lock(&it->second->mutex);
    it->second->cancelled.insert(request.cancel().tag());
    return;
  } else if (request.has_call()) {
    v1::Status status;
    std::string message;
    if (request.call().method() == "Attend") {
      v1::AttendRequest attend;
      attend.ParseFromString(request.call().message());
      while (!connection->Reached(attend.inputs_ready()) && !stopping_) sched_yield();
      message = Answer(connection, attend).SerializeAsString();
      connection->Raise(attend.results_ready());
    } else if (on_call != nullptr) {
      status = on_call(request.call(), &message);
    } else {
      status.set_code(static_cast<int>(absl::StatusCode::kUnimplemented));
    }
    if (status.code() != 0) *reply.mutable_status() = status;
    if (status.code() == 0) reply.set_message(message);
  }
  connection->Send(reply);
}

v1::AttendResponse FakeLocalServer::Answer(Connection* connection,
                                           const v1::AttendRequest& request) {
  v1::AttendResponse response;
  response.set_request_id(request.request_id());
  if (on_attend != nullptr) {
    const v1::Status status = on_attend(request);
    if (status.code() != 0) {
      *response.mutable_status() = status;
      return response;
    }
  }
  size_t elements = 0;
  bool resident = false;
  for (const v1::Span& span : request.spans()) {
    elements += size_t{span.query_rows()} * request.num_heads();
    resident = resident || !span.sequence_id().empty();
  }
  for (const v1::Span& span : request.spans()) {
    if (resident) response.add_sequence_lengths(span.expected_length() + span.kv_rows());
  }
  std::byte* const query = connection->At(request.query_range());
  std::byte* const output = connection->At(request.output_range());
  if (query == nullptr || output == nullptr) {
    response.mutable_status()->set_code(static_cast<int>(absl::StatusCode::kNotFound));
    response.mutable_status()->set_message("region_id: unknown");
    return response;
  }
  std::memcpy(output, query, elements * request.head_dim() * 2);
  if (request.return_lse()) {
    auto* const lse = reinterpret_cast<float*>(connection->At(request.lse_range()));
    for (size_t i = 0; i < elements; ++i) lse[i] = static_cast<float>(i);
  }
  response.mutable_timing()->set_kernel_ns(1000);
  return response;
}

void FakeLocalServer::ServeRing(Connection* connection, RingServer* ring) {
  using wire::CompletionSlot;
  using wire::SubmissionSlot;
  uint64_t taken = 0, completed = 0;
  struct Request {
    uint64_t tag;
    v1::AttendRequest request;
    absl::Time deadline;  // to begin with it
  };
  std::deque<Request> requests;
  const auto answer = [&](uint64_t tag, const v1::AttendResponse& response) {
    const std::string message = response.SerializeAsString();
    CompletionSlot slot = {tag, static_cast<uint32_t>(message.size()), 0};
    if (on_completion != nullptr) on_completion(&slot);
    std::byte* const to = ring->Slot(completed, true);
    std::memcpy(to, &slot, sizeof(slot));
    std::memcpy(to + sizeof(slot), message.data(), message.size());
    ring->header->completed.store(++completed, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (ring->header->client_sleeps.exchange(0) != 0) {
      syscall(SYS_futex, &ring->header->client_sleeps, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  };
  while (!ring->stop && !connection->ended) {
    bool idle = true;
    while (taken != ring->header->submitted.load(std::memory_order_acquire)) {
      SubmissionSlot slot;
      const std::byte* const from = ring->Slot(taken, false);
      std::memcpy(&slot, from, sizeof(slot));
      Request& request = requests.emplace_back();
      request.tag = slot.tag;
      request.deadline = slot.timeout_ns == 0 ? absl::InfiniteFuture()
                                              : absl::Now() + absl::Nanoseconds(slot.timeout_ns);
      request.request.ParseFromArray(from + sizeof(slot), static_cast<int>(slot.bytes));
      ring->header->taken.store(++taken, std::memory_order_release);
      ++taken_;
      idle = false;
    }
    for (auto it = requests.begin(); it != requests.end();) {
      bool cancelled = false;
      {
        absl::MutexLock lock(&ring->mutex);
        cancelled = ring->cancelled.count(it->tag) > 0;
      }
      const bool ready = connection->Reached(it->request.inputs_ready());
      const bool late = !ready && absl::Now() >= it->deadline;
      if (!cancelled && !late && (held_ || !ready)) {
        ++it;
        continue;
      }
      v1::AttendResponse response;
      if (cancelled || late) {
        response.mutable_status()->set_code(static_cast<int>(
            cancelled ? absl::StatusCode::kCancelled : absl::StatusCode::kDeadlineExceeded));
      } else {
        response = Answer(connection, it->request);
      }
      connection->Raise(it->request.results_ready());
      answer(it->tag, response);
      it = requests.erase(it);
      idle = false;
    }
    if (!idle) continue;
    ring->header->server_sleeps.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (taken == ring->header->submitted.load(std::memory_order_acquire)) {
      // Short, because what is held is not announced by the doorbell.
      pollfd readable = {ring->doorbell, POLLIN, 0};
      uint64_t ignored = 0;
      if (poll(&readable, 1, /*timeout=*/requests.empty() ? 20 : 1) > 0 &&
          read(ring->doorbell, &ignored, sizeof(ignored)) < 0) {
        return;
      }
    }
    ring->header->server_sleeps.store(0, std::memory_order_relaxed);
  }
}

}  // namespace flashcore

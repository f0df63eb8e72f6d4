#include "client/cpp/local/transport.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/cpp/local/convert.h"
#include "client/cpp/status.h"

namespace flashcore::client::local {
namespace {

constexpr absl::Duration kConnectPause = absl::Milliseconds(20);

// The element of `all` with this memory.
template <class All, class AnyMemory>
auto Find(All& all, const AnyMemory* memory) {
  return std::find_if(all.begin(), all.end(),
                      [memory](const auto& one) { return one.memory.get() == memory; });
}

// The key of `memory` in a RegionTable.
const void* KeyOf(const DeviceMemory& memory) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver gives a number
  return reinterpret_cast<const void*>(memory.address());
}

// The status of a request that could not be sent, as NeverSent knows it.
absl::Status NotConnected(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return status;
  return absl::UnavailableError(absl::StrCat(kNotConnected, ": ", status.message()));
}

absl::Status CheckOptions(absl::string_view path, const ClientOptions& options) {
  absl::Status status = ToAbsl(CheckPath({path.data(), path.size()}));
  if (!status.ok()) return status;
  const auto error = [path](absl::string_view option, absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat(option, ": not with the target local:", path, ", ", why));
  };
  constexpr char kWhoCalls[] = "where the server knows who calls by the user id of the process";
  if (!options.token_file.empty()) return error("token_file", kWhoCalls);
  if (options.tls.has_value()) return error("tls", "which never leaves this host");
  if (options.credentials != nullptr) return error("credentials", kWhoCalls);
  if (options.local_spin < absl::ZeroDuration() || options.local_spin > absl::Seconds(1)) {
    return absl::InvalidArgumentError("local_spin: want 0 to 1 s");
  }
  return absl::OkStatus();
}

// A lease of a connection, which ends with it.
class LocalLease final : public HeldLease {
 public:
  LocalLease(std::string id, const std::shared_ptr<LocalSession>& session)
      : HeldLease(std::move(id)), session_(session) {}
  bool ended() override {
    const std::shared_ptr<LocalSession> on = session_.lock();
    return on == nullptr || !on->alive();
  }

 private:
  const std::weak_ptr<LocalSession> session_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<Transport>> LocalTransport::Create(absl::string_view path,
                                                                  const ClientOptions& options) {
  if (absl::Status status = CheckOptions(path, options); !status.ok()) return status;
  return std::shared_ptr<Transport>(new LocalTransport(std::string(path), options));
}

LocalTransport::LocalTransport(std::string path, const ClientOptions& options)
    : path_(std::move(path)),
      client_(absl::StrCat("flashcore-cpp", options.name.empty() ? "" : " ", options.name)),
      spin_(options.local_spin),
      timeout_(options.timeout) {}

absl::StatusOr<std::shared_ptr<LocalSession>> LocalTransport::Connect(SteadyTime deadline) {
  const auto connected = [this]() -> std::shared_ptr<LocalSession> {
    absl::MutexLock lock(&mutex_);
    return session_ != nullptr && session_->alive() ? session_ : nullptr;
  };
  if (auto session = connected(); session != nullptr) return session;
  std::shared_ptr<LocalSession> old;  // destroyed without the locks: its callbacks may come here
  const TimedMutex::Lock connect_lock(&connect_mutex_, deadline);
  if (!connect_lock.status().ok()) return ToAbsl(connect_lock.status());
  if (auto session = connected(); session != nullptr) return session;
  if (std::chrono::steady_clock::now() >= deadline) return ToAbsl(TooLate());
  std::shared_ptr<Connection> made;
  absl::Status status = ToAbsl(Connection::Connect(path_, &made));
  if (!status.ok()) return NotConnected(status);
  status = ToAbsl(made->Hello(client_, deadline));
  if (!status.ok()) {
    return NotConnected(
        absl::Status(status.code(), absl::StrCat("local:", path_, ": ", status.message())));
  }
  auto session = std::make_shared<LocalSession>(std::move(made), &regions_, spin_);
  std::vector<Shared> registered;
  {
    absl::MutexLock lock(&mutex_);
    registered = shared_;
  }
  for (Shared& shared : registered) Register(session.get(), deadline, &shared);
  absl::MutexLock lock(&mutex_);
  old = std::exchange(session_, session);
  for (const OnGpu& lost : on_gpu_) Publish(*lost.memory, /*id=*/"");
  for (Shared& shared : registered) {
    const auto it = Find(shared_, shared.memory.get());
    if (it != shared_.end()) {
      Publish(shared);
      *it = std::move(shared);
    } else if (shared.status.ok()) {  // removed in the meantime
      session->connection().Unregister(shared.id);
    }
  }
  return session;
}

absl::Status LocalTransport::Call(const google::protobuf::Message& request, const CallOptions& call,
                                  google::protobuf::Message* response) {
  const SteadyTime deadline = ToSteady(*call.deadline);
  const absl::StatusOr<std::shared_ptr<LocalSession>> session = Connect(deadline);
  if (!session.ok()) return session.status();
  return (*session)->Call(request, deadline, response);
}

absl::Status LocalTransport::Attend(const AttendRequest& request, const CallOptions& call,
                                    AttendResult* result) {
  const SteadyTime deadline = ToSteady(*call.deadline);
  const absl::StatusOr<std::shared_ptr<LocalSession>> session = Connect(deadline);
  if (!session.ok()) return session.status();
  return (*session)->Attend(request, deadline, result);
}

absl::StatusOr<v1::LoadSequenceResponse> LocalTransport::LoadRows(const RowsToLoad& rows,
                                                                  const CallOptions& call) {
  const SteadyTime deadline = ToSteady(*call.deadline);
  const absl::StatusOr<std::shared_ptr<LocalSession>> session = Connect(deadline);
  if (!session.ok()) return session.status();
  const uint64_t chunk_rows = std::min(ChunkRows(rows, Sequence::kMessageBytes), rows.num_rows);
  const size_t tensor_bytes = chunk_rows * rows.RowBytes();
  const size_t value_offset =
      (tensor_bytes + BlockPool::kAlignment - 1) / BlockPool::kAlignment * BlockPool::kAlignment;
  BlockPool::Block block;
  absl::Status status = (*session)->Allocate(value_offset + tensor_bytes, deadline, &block);
  if (!status.ok()) return status;
  v1::LoadSequenceResponse response;
  for (uint64_t first = 0; first < rows.num_rows; first += chunk_rows) {
    const uint64_t count = std::min(chunk_rows, rows.num_rows - first);
    v1::LoadSequenceRequest chunk = ChunkFields(rows, first, count);
    chunk.set_sequence_id(rows.sequence_id);
    CopyRows(rows, rows.key, first, count, block.data());
    CopyRows(rows, rows.value, first, count, block.data() + value_offset);
    const auto set_range = [&](uint64_t offset, v1::MemoryRange* range) {
      range->set_region_id(block.region_id());
      range->set_offset(block.offset() + offset);
      range->set_bytes(count * rows.RowBytes());
    };
    set_range(0, chunk.mutable_key_range());
    set_range(value_offset, chunk.mutable_value_range());
    status = (*session)->Call(chunk, deadline, &response);
    if (!status.ok()) return status;
  }
  return response;
}

absl::StatusOr<std::unique_ptr<HeldLease>> LocalTransport::HoldLease(const CallOptions& call) {
  const SteadyTime deadline = ToSteady(*call.deadline);
  const absl::StatusOr<std::shared_ptr<LocalSession>> session = Connect(deadline);
  if (!session.ok()) return session.status();
  v1::HoldLeaseResponse response;
  const absl::Status status = (*session)->Call(v1::HoldLeaseRequest(), deadline, &response);
  if (!status.ok()) return status;
  if (response.lease_id().empty()) return absl::InternalError("reply: no lease_id");
  return std::make_unique<LocalLease>(response.lease_id(), *session);
}

absl::StatusOr<HealthStatus> LocalTransport::CheckHealth(absl::string_view service,
                                                         const CallOptions& call) {
  if (!service.empty() && service != "flashcore.v1.AttentionService") {
    return absl::NotFoundError(absl::StrCat("service: '", service, "' is unknown"));
  }
  v1::GetServerInfoResponse info;
  const absl::Status status = Call(v1::GetServerInfoRequest(), call, &info);
  if (!status.ok()) return status;
  return HealthStatus::kServing;
}

bool LocalTransport::WaitForConnected(absl::Time deadline) {
  while (true) {
    if (Connect(ToSteady(deadline)).ok()) return true;
    if (absl::Now() + kConnectPause >= deadline) return false;
    absl::SleepFor(kConnectPause);
  }
}

void LocalTransport::Register(LocalSession* session, SteadyTime deadline, Shared* shared) {
  shared->status = ToAbsl(
      session->connection().Register(*shared->memory, shared->read_only, deadline, &shared->id));
}

void LocalTransport::Publish(const Shared& shared) {
  const Memory& memory = *shared.memory;
  if (shared.status.ok()) {
    regions_.Add(memory.data(), {memory.bytes(), shared.id, shared.read_only, /*on_gpu=*/false});
  } else {
    regions_.Remove(memory.data());
  }
}

void LocalTransport::Publish(const DeviceMemory& memory, const std::string& id) {
  regions_.Add(KeyOf(memory), {memory.bytes(), id, /*read_only=*/false, /*on_gpu=*/true});
}

absl::StatusOr<std::shared_ptr<Memory>> LocalTransport::CreateMemory(size_t bytes, bool inputs_only,
                                                                     const CallOptions& call) {
  Shared shared{std::make_shared<Memory>(), inputs_only};
  absl::Status status = ToAbsl(Memory::Create(bytes, shared.memory.get()));
  if (!status.ok()) return status;
  const SteadyTime deadline = ToSteady(*call.deadline);
  const absl::StatusOr<std::shared_ptr<LocalSession>> connected = Connect(deadline);
  if (!connected.ok()) return connected.status();
  const TimedMutex::Lock connect_lock(&connect_mutex_, deadline);  // no new connection meanwhile
  if (!connect_lock.status().ok()) return ToAbsl(connect_lock.status());
  std::shared_ptr<LocalSession> session;
  {
    absl::MutexLock lock(&mutex_);
    session = session_;
  }
  Register(session.get(), deadline, &shared);
  absl::MutexLock lock(&mutex_);
  Publish(shared);
  if (!shared.status.ok()) return shared.status;
  shared_.push_back(shared);
  return shared.memory;
}

void LocalTransport::RemoveMemory(const Memory* memory) {
  std::string id;
  std::shared_ptr<LocalSession> session;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = Find(shared_, memory);
    if (it == shared_.end()) return;
    if (it->status.ok()) id = it->id;
    shared_.erase(it);
    regions_.Remove(memory->data());
    session = session_;
  }
  if (!id.empty()) session->connection().Unregister(id);
}

bool LocalTransport::HasMemory(const Memory* memory) const {
  absl::MutexLock lock(&mutex_);
  const auto it = Find(shared_, memory);
  return it != shared_.end() && it->status.ok() && session_->alive();
}

absl::StatusOr<std::shared_ptr<const DeviceMemory>> LocalTransport::AllocateDeviceMemory(
    size_t bytes, const std::string& device_id, const CallOptions& call) {
  const SteadyTime deadline = ToSteady(*call.deadline);
  const absl::StatusOr<std::shared_ptr<LocalSession>> session = Connect(deadline);
  if (!session.ok()) return session.status();
  const auto memory = std::make_shared<DeviceMemory>();
  const Status status =
      DeviceMemory::Allocate(&(*session)->connection(), bytes, device_id, deadline, memory.get());
  if (!status.ok()) return ToAbsl(status);
  absl::MutexLock lock(&mutex_);
  // There may be a new connection by now, which does not have it.
  Publish(*memory, session_ == *session ? memory->region_id() : "");
  on_gpu_.push_back({memory, *session});
  return memory;
}

void LocalTransport::RemoveDeviceMemory(const DeviceMemory* memory) {
  std::shared_ptr<LocalSession> session;  // destroyed without the lock
  absl::MutexLock lock(&mutex_);
  const auto it = Find(on_gpu_, memory);
  if (it == on_gpu_.end()) return;
  session = it->session.lock();
  if (session != nullptr) session->connection().Unregister(memory->region_id());
  on_gpu_.erase(it);
  regions_.Remove(KeyOf(*memory));
}

bool LocalTransport::HasDeviceMemory(const DeviceMemory* memory) const {
  std::shared_ptr<LocalSession> session;  // destroyed without the lock
  absl::MutexLock lock(&mutex_);
  const auto it = Find(on_gpu_, memory);
  if (it == on_gpu_.end()) return false;
  session = it->session.lock();
  return session != nullptr && session->alive();
}

}  // namespace flashcore::client::local

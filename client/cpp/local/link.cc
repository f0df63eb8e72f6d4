#include "client/cpp/local/link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace flashcore::client::local {
namespace {

// The element of `all` with this memory.
template <class All>
auto Find(All& all, const Memory* memory) {
  return std::find_if(all.begin(), all.end(),
                      [memory](const auto& one) { return one.memory.get() == memory; });
}

// The status of a request that could not be sent, as NeverSent knows it.
absl::Status NotConnected(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return status;
  return absl::UnavailableError(absl::StrCat(kNotConnected, ": ", status.message()));
}

}  // namespace

Link::Link(std::string path, std::string client, absl::Duration spin, RegionTable* regions)
    : path_(std::move(path)), client_(std::move(client)), spin_(spin), regions_(regions) {}

absl::StatusOr<std::shared_ptr<LocalConnection>> Link::Connect(SteadyTime deadline) {
  const auto connected = [this]() -> std::shared_ptr<LocalConnection> {
    absl::MutexLock lock(&mutex_);
    return session_ != nullptr && session_->alive() ? session_ : nullptr;
  };
  if (auto session = connected(); session != nullptr) return session;
  std::shared_ptr<LocalConnection> old;  // destroyed without the locks: its callbacks may come here
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
  auto session = std::make_shared<LocalConnection>(std::move(made), regions_, spin_);
  std::vector<Shared> registered;
  {
    absl::MutexLock lock(&mutex_);
    registered = shared_;
  }
  for (Shared& shared : registered) Register(session.get(), deadline, &shared);
  absl::MutexLock lock(&mutex_);
  old = std::exchange(session_, session);
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

absl::StatusOr<std::string> Link::Call(absl::string_view method, absl::string_view message,
                                       SteadyTime deadline) {
  const absl::StatusOr<std::shared_ptr<LocalConnection>> session = Connect(deadline);
  if (!session.ok()) return session.status();
  return (*session)->Call(method, message, deadline);
}

absl::Status Link::Attend(const AttendRequest& request, SteadyTime deadline, AttendResult* result) {
  const absl::StatusOr<std::shared_ptr<LocalConnection>> session = Connect(deadline);
  if (!session.ok()) return session.status();
  return (*session)->Attend(request, deadline, result);
}

void Link::Register(LocalConnection* session, SteadyTime deadline, Shared* shared) {
  shared->status = ToAbsl(
      session->connection().Register(*shared->memory, shared->read_only, deadline, &shared->id));
}

void Link::Publish(const Shared& shared) {
  const Memory& memory = *shared.memory;
  if (shared.status.ok()) {
    regions_->Add(memory.data(), {memory.bytes(), shared.id, shared.read_only});
  } else {
    regions_->Remove(memory.data());
  }
}

absl::Status Link::Add(const std::shared_ptr<Memory>& memory, bool read_only, SteadyTime deadline) {
  const absl::StatusOr<std::shared_ptr<LocalConnection>> connected = Connect(deadline);
  if (!connected.ok()) return connected.status();
  const TimedMutex::Lock connect_lock(&connect_mutex_, deadline);  // no new session meanwhile
  if (!connect_lock.status().ok()) return ToAbsl(connect_lock.status());
  std::shared_ptr<LocalConnection> session;
  {
    absl::MutexLock lock(&mutex_);
    session = session_;
  }
  Shared shared{memory, read_only};
  Register(session.get(), deadline, &shared);
  absl::Status status = shared.status;
  absl::MutexLock lock(&mutex_);
  Publish(shared);
  if (status.ok()) shared_.push_back(std::move(shared));
  return status;
}

void Link::Remove(const Memory* memory) {
  std::string id;
  std::shared_ptr<LocalConnection> session;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = Find(shared_, memory);
    if (it == shared_.end()) return;
    if (it->status.ok()) id = it->id;
    shared_.erase(it);
    regions_->Remove(memory->data());
    session = session_;
  }
  if (!id.empty()) session->connection().Unregister(id);
}

bool Link::Registered(const Memory* memory) const {
  absl::MutexLock lock(&mutex_);
  const auto it = Find(shared_, memory);
  return it != shared_.end() && it->status.ok() && session_->alive();
}

}  // namespace flashcore::client::local

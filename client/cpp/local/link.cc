#include "client/cpp/local/link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/status.h"

namespace flashcore::client::local {
namespace {

// The element of `all` with this region.
template <class All>
auto Find(All& all, const Region* region) {
  return std::find_if(all.begin(), all.end(),
                      [region](const auto& one) { return one.region.get() == region; });
}

// The status of a request that could not be sent, as NeverSent knows it.
absl::Status NotConnected(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return status;
  absl::Status never_sent =
      absl::UnavailableError(absl::StrCat(kNotConnected, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view type, const absl::Cord& detail) {
    never_sent.SetPayload(type, detail);
  });
  return never_sent;
}

}  // namespace

Link::Link(std::string path, std::string client, absl::Duration spin, RegionTable* regions)
    : path_(std::move(path)), client_(std::move(client)), spin_(spin), regions_(regions) {}

absl::StatusOr<std::shared_ptr<Session>> Link::Connect(absl::Time deadline) {
  const auto connected = [this]() -> std::shared_ptr<Session> {
    absl::MutexLock lock(&mutex_);
    return session_ != nullptr && session_->alive() ? session_ : nullptr;
  };
  if (auto session = connected(); session != nullptr) return session;
  std::shared_ptr<Session> old;  // destroyed without the locks: its callbacks may come here
  const TimedMutex::Lock connect_lock(&connect_mutex_, deadline);
  if (!connect_lock.status().ok()) return connect_lock.status();
  if (auto session = connected(); session != nullptr) return session;
  if (absl::Now() >= deadline)
    return absl::DeadlineExceededError("the deadline passed before the request was sent");
  absl::StatusOr<std::shared_ptr<Control>> control = Control::Connect(path_, client_, deadline);
  if (!control.ok()) return NotConnected(control.status());
  auto session = std::make_shared<Session>(*std::move(control), regions_, spin_);
  std::vector<Shared> registered;
  {
    absl::MutexLock lock(&mutex_);
    registered = shared_;
  }
  for (Shared& shared : registered) Register(session.get(), deadline, &shared);
  absl::MutexLock lock(&mutex_);
  old = std::exchange(session_, session);
  for (Shared& shared : registered) {
    const auto it = Find(shared_, shared.region.get());
    if (it != shared_.end()) {
      Publish(shared);
      *it = std::move(shared);
    } else if (shared.status.ok()) {  // removed in the meantime
      session->control().Unregister(shared.id);
    }
  }
  return session;
}

absl::StatusOr<std::string> Link::Call(absl::string_view method, std::string message,
                                       absl::Time deadline) {
  const absl::StatusOr<std::shared_ptr<Session>> session = Connect(deadline);
  if (!session.ok()) return session.status();
  return (*session)->control().Call(method, std::move(message), deadline);
}

absl::Status Link::Attend(const AttendRequest& request, absl::Time deadline, AttendResult* result) {
  const absl::StatusOr<std::shared_ptr<Session>> session = Connect(deadline);
  if (!session.ok()) return session.status();
  return (*session)->Attend(request, deadline, result);
}

void Link::Register(Session* session, absl::Time deadline, Shared* shared) {
  const Region& region = *shared->region;
  absl::StatusOr<std::string> id =
      session->control().Register(region.fd(), region.bytes(), shared->read_only, deadline);
  shared->status = id.status();
  if (id.ok()) shared->id = *std::move(id);
}

void Link::Publish(const Shared& shared) {
  const Region& region = *shared.region;
  if (shared.status.ok()) {
    regions_->Add(region.data(), {region.bytes(), shared.id, shared.read_only});
  } else {
    regions_->Remove(region.data());
  }
}

absl::Status Link::Add(const std::shared_ptr<Region>& region, bool read_only, absl::Time deadline) {
  const absl::StatusOr<std::shared_ptr<Session>> connected = Connect(deadline);
  if (!connected.ok()) return connected.status();
  const TimedMutex::Lock connect_lock(&connect_mutex_, deadline);  // no new session meanwhile
  if (!connect_lock.status().ok()) return connect_lock.status();
  std::shared_ptr<Session> session;
  {
    absl::MutexLock lock(&mutex_);
    session = session_;
  }
  Shared shared{region, read_only};
  Register(session.get(), deadline, &shared);
  absl::Status status = shared.status;
  absl::MutexLock lock(&mutex_);
  Publish(shared);
  if (status.ok()) shared_.push_back(std::move(shared));
  return status;
}

void Link::Remove(const Region* region) {
  std::string id;
  std::shared_ptr<Session> session;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = Find(shared_, region);
    if (it == shared_.end()) return;
    if (it->status.ok()) id = it->id;
    shared_.erase(it);
    regions_->Remove(region->data());
    session = session_;
  }
  if (!id.empty()) session->control().Unregister(id);
}

bool Link::Registered(const Region* region) const {
  absl::MutexLock lock(&mutex_);
  const auto it = Find(shared_, region);
  return it != shared_.end() && it->status.ok() && session_->alive();
}

}  // namespace flashcore::client::local

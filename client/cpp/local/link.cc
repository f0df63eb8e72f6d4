#include "client/cpp/local/link.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace flashcore::client::local {

Link::Link(std::string path, std::string client, absl::Duration spin, RegionTable* regions)
    : path_(std::move(path)), client_(std::move(client)), spin_(spin), regions_(regions) {}

absl::StatusOr<std::shared_ptr<Session>> Link::Connect(absl::Time deadline) {
  const auto connected = [this]() -> std::shared_ptr<Session> {
    absl::MutexLock lock(&mutex_);
    return session_ != nullptr && session_->alive() ? session_ : nullptr;
  };
  if (auto session = connected(); session != nullptr) return session;
  std::shared_ptr<Session> old;  // destroyed without the locks: its callbacks may come here
  absl::MutexLock connect_lock(&connect_mutex_);
  if (auto session = connected(); session != nullptr) return session;
  if (absl::Now() >= deadline) return absl::DeadlineExceededError("Deadline Exceeded");
  absl::StatusOr<std::shared_ptr<Control>> control = Control::Connect(path_, client_, deadline);
  if (!control.ok()) return control.status();
  auto session = std::make_shared<Session>(*std::move(control), regions_, spin_);
  absl::MutexLock lock(&mutex_);
  old = std::exchange(session_, session);
  for (Shared& shared : shared_) Register(&shared, deadline).IgnoreError();
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

absl::Status Link::Register(Shared* shared, absl::Time deadline) {
  const Region& region = *shared->region;
  absl::StatusOr<std::string> id =
      session_->control().Register(region.fd(), region.bytes(), shared->read_only, deadline);
  shared->status = id.status();
  if (id.ok()) {
    shared->id = *std::move(id);
    regions_->Add(region.data(), {region.bytes(), shared->id, shared->read_only});
  } else {
    regions_->Remove(region.data());  // its tensors are copied from now on
  }
  return shared->status;
}

absl::Status Link::Add(const std::shared_ptr<Region>& region, bool read_only, absl::Time deadline) {
  const absl::StatusOr<std::shared_ptr<Session>> session = Connect(deadline);
  if (!session.ok()) return session.status();
  absl::MutexLock connect_lock(&connect_mutex_);
  absl::MutexLock lock(&mutex_);
  Shared shared{region, read_only};
  absl::Status status = Register(&shared, deadline);
  if (status.ok()) shared_.push_back(std::move(shared));
  return status;
}

void Link::Remove(const Region* region) {
  std::string id;
  std::shared_ptr<Session> session;
  {
    absl::MutexLock lock(&mutex_);
    const auto it = std::find_if(shared_.begin(), shared_.end(),
                                 [&](const Shared& s) { return s.region.get() == region; });
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
  const auto it = std::find_if(shared_.begin(), shared_.end(),
                               [&](const Shared& s) { return s.region.get() == region; });
  return it != shared_.end() && it->status.ok() && session_->alive();
}

}  // namespace flashcore::client::local

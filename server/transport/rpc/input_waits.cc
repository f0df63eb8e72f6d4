#include "server/transport/rpc/input_waits.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {

std::optional<absl::Status> InputWaits::EndOf(const Wait& wait, TimePoint now) {
  const AttendOperation* const operation = wait.operation;
  if (operation != nullptr && operation->cancelled.load(std::memory_order_relaxed)) {
    return absl::CancelledError("cancelled by the client before inputs_ready was reached");
  }
  if (wait.inputs.reached()) return absl::OkStatus();
  if (operation == nullptr) {
    return wait.owner.expired() ? std::optional(absl::CancelledError("nobody awaits it"))
                                : std::nullopt;
  }
  if (operation->deadline <= now) {
    return absl::DeadlineExceededError("the deadline passed before inputs_ready was reached");
  }
  return std::nullopt;
}

void InputWaits::Add(AttendOperation* operation, Ready ready) {
  Add({operation, operation->request.inputs_ready, std::move(ready)}, operation->identity.name);
}

void InputWaits::RaiseWhenReady(const AttendRequest& request, const std::string& client,
                                std::weak_ptr<const void> owner) {
  auto raise = [results = request.results_ready](const absl::Status&) { results.Raise(); };
  Add({nullptr, request.inputs_ready, std::move(raise), nullptr, std::move(owner)}, client);
}

void InputWaits::Add(Wait wait, const std::string& client) {
  Ready refused;
  absl::Status why;
  bool was_empty = false;
  {
    MutexLock lock(&mutex_);
    why = end_;
    if (why.ok()) {
      was_empty = waits_.empty();
      wait.client = shares_.Take(client, 1);
      waits_.push_back(std::move(wait));
      refused = TakeExcess(&why);
      empty_ = waits_.empty();
    } else {
      refused = std::move(wait.ready);
    }
  }
  if (was_empty) wake_();
  if (refused != nullptr) refused(why);
}

InputWaits::Ready InputWaits::TakeExcess(absl::Status* why) {
  const Shares::Client* const client = shares_.MustGiveBack();
  if (client == nullptr) return nullptr;
  const auto newest = std::find_if(waits_.rbegin(), waits_.rend(),
                                   [&](const Wait& wait) { return wait.client == client; });
  *why = WithInfo(absl::ResourceExhaustedError(absl::StrCat(
                      "inputs_ready: ", client->held,
                      " requests of this client wait for their inputs; at most ",
                      shares_.limits().one, " may, and ", shares_.limits().all, " of all clients")),
                  reason::kQueueFull);
  Ready ready = std::move(newest->ready);
  shares_.Give(newest->client, 1);
  waits_.erase(std::next(newest).base());
  return ready;
}

bool InputWaits::Poll() {
  if (empty()) return false;
  {
    const TimePoint now = clock_->Now();
    MutexLock lock(&mutex_);
    size_t kept = 0;
    for (Wait& wait : waits_) {
      if (std::optional<absl::Status> end = EndOf(wait, now); end.has_value()) {
        shares_.Give(wait.client, 1);
        ended_.emplace_back(std::move(wait), *std::move(end));
      } else if (&waits_[kept++] != &wait) {
        waits_[kept - 1] = std::move(wait);
      }
    }
    waits_.erase(waits_.begin() + static_cast<std::ptrdiff_t>(kept), waits_.end());
    empty_ = waits_.empty();
  }
  for (auto& [wait, status] : ended_) wait.ready(status);  // may Add
  const bool any = !ended_.empty();
  ended_.clear();
  return any;
}

void InputWaits::EndAll(const absl::Status& status) {
  std::vector<Wait> waits;
  {
    MutexLock lock(&mutex_);
    waits.swap(waits_);
    for (const Wait& wait : waits) shares_.Give(wait.client, 1);
    empty_ = true;
    end_ = status;
  }
  for (Wait& wait : waits) wait.ready(status);
}

}  // namespace flashcore::server

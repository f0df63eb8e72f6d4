#include "server/engine/input_waits.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

// Waits that Lend looks at: the next of a counter is among the first, unless very many clients
// wait.
constexpr size_t kMostLookedAt = 64;

}  // namespace

std::optional<absl::Status> InputWaits::Wait::EndAt(TimePoint now) const {
  if (operation != nullptr && operation->cancelled.load(std::memory_order_relaxed)) {
    return absl::CancelledError("cancelled by the client before inputs_ready was reached");
  }
  if (inputs.reached()) return absl::OkStatus();
  if (operation == nullptr) {
    return owner.expired() ? std::optional(absl::CancelledError("nobody awaits it")) : std::nullopt;
  }
  if (operation->deadline <= now) {
    return absl::DeadlineExceededError("the deadline passed before inputs_ready was reached");
  }
  return std::nullopt;
}

void InputWaits::End(Wait wait, absl::Status status) {
  Ready ready = std::move(wait.ready);
  wait = {};  // when the request has ended, nothing here uses its memory
  ready(std::move(status));
}

void InputWaits::SetWake(std::function<void()> wake) {
  MutexLock lock(&mutex_);
  wake_ = std::move(wake);
}

void InputWaits::Add(AttendOperation* operation, Ready ready) {
  Insert({operation, operation->request.inputs_ready, std::move(ready), operation->identity.name});
}

void InputWaits::RaiseWhenReady(const AttendRequest& request, const std::string& client,
                                std::weak_ptr<const void> owner) {
  auto raise = [results = request.results_ready](const absl::Status&) { results.Raise(); };
  Insert({nullptr, request.inputs_ready, std::move(raise), client, std::move(owner)});
}

void InputWaits::GiveBack(Wait wait) { Insert(std::move(wait)); }

void InputWaits::Insert(Wait wait) {
  Ready refused;
  absl::Status why;
  {
    MutexLock lock(&mutex_);
    why = end_;
    if (why.ok()) {
      const bool was_empty = waits_.empty();
      wait.client = shares_.Take(wait.identity, 1);
      if (wait.number == 0) wait.number = ++last_number_;
      const auto position = std::upper_bound(
          waits_.begin(), waits_.end(), wait.number,
          [](uint64_t number, const Wait& other) { return number < other.number; });
      waits_.insert(position, std::exchange(wait, {}));
      refused = TakeExcess(&why);
      empty_ = waits_.empty();
      if (was_empty && wake_ != nullptr) wake_();
    }
  }
  if (wait.ready != nullptr) return End(std::move(wait), why);
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

std::optional<InputWaits::Wait> InputWaits::Lend(size_t device) {
  if (empty()) return std::nullopt;
  MutexLock lock(&mutex_);
  std::vector<const void*> passed;  // counters, which have an earlier wait
  const auto end =
      waits_.begin() + static_cast<std::ptrdiff_t>(std::min(waits_.size(), kMostLookedAt));
  for (auto wait = waits_.begin(); wait != end; ++wait) {
    const void* const counter = wait->inputs.counter();
    const bool is_next = std::find(passed.begin(), passed.end(), counter) == passed.end();
    if (is_next && wait->operation != nullptr && wait->operation->device == device &&
        !wait->staged) {
      Wait lent = std::move(*wait);
      waits_.erase(wait);
      empty_ = waits_.empty();
      shares_.Give(std::exchange(lent.client, nullptr), 1);
      return lent;
    }
    passed.push_back(counter);
  }
  return std::nullopt;
}

bool InputWaits::Poll() {
  if (empty()) return false;
  {
    const TimePoint now = clock_->Now();
    MutexLock lock(&mutex_);
    size_t kept = 0;
    for (Wait& wait : waits_) {
      if (std::optional<absl::Status> end = wait.EndAt(now); end.has_value()) {
        shares_.Give(wait.client, 1);
        ended_.emplace_back(std::move(wait), *std::move(end));
      } else if (&waits_[kept++] != &wait) {
        waits_[kept - 1] = std::move(wait);
      }
    }
    waits_.erase(waits_.begin() + static_cast<std::ptrdiff_t>(kept), waits_.end());
    empty_ = waits_.empty();
  }
  for (auto& [wait, status] : ended_) End(std::move(wait), status);
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
  for (Wait& wait : waits) End(std::move(wait), status);
}

}  // namespace flashcore::server

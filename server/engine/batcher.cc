#include "server/engine/batcher.h"

#include <algorithm>
#include <iterator>
#include <thread>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"
#include "server/engine/work.h"
#include "server/request/order.h"

namespace flashcore::server {
namespace {

int64_t CountTokens(const AttendRequest& request) {
  int64_t appended = 0;
  for (const SpanShape& span : request.spans) {
    if (!span.sequence_id.empty()) appended += span.kv_rows;
  }
  return std::max({request.query_rows(), appended, int64_t{1}});
}

// Why `operation` must be dropped; OK if it may still be launched.
absl::Status DropReason(const AttendOperation& operation, TimePoint now) {
  if (operation.cancelled.load(std::memory_order_relaxed)) {
    return absl::CancelledError(operation.cut == nullptr
                                    ? "cancelled by the client while it was queued"
                                    : "cancelled by the client between two parts of its launch");
  }
  if (operation.deadline <= now) {
    return absl::DeadlineExceededError(absl::StrCat(
        operation.cut == nullptr ? "the deadline passed while the request was queued, after "
                                 : "the deadline passed between two parts of the launch, after ",
        (now - operation.submitted) / std::chrono::microseconds(1), " us"));
  }
  return absl::OkStatus();
}

}  // namespace

// A client's place in the search for one batch.
struct Batcher::Cursor {
  Client* client;
  Queue::iterator next;  // the next operation to look at

  // Order of a heap with the client that goes first on top. Ties: a client whose front request has
  // already begun goes last, so a newcomer waits for one part, not two.
  static bool Later(const Cursor& a, const Cursor& b) {
    const auto order = [](const Cursor& cursor) {
      const Client& of = *cursor.client;
      const bool begun = !of.queue.empty() && of.queue.front()->cut != nullptr;
      return std::make_tuple(of.served, begun, of.active_since);
    };
    return order(a) > order(b);
  }
};

struct Batcher::Choice {
  Client* client;
  Queue::iterator position;
};

// A batch that is being formed. Its operations are still in the queues, but their slots count them
// as running.
struct Batcher::Forming {
  Batch* const batch;
  const Options& options;
  const TimePoint now;
  std::vector<Cursor> cursors{};  // a heap by Cursor::Later
  std::vector<Choice> choices{};  // [batch->operations]
  int64_t tokens = 0;
  Nanoseconds work{0};
  bool alone = false;                             // its operation has a launch of its own
  bool left_out = false;                          // a request of this geometry did not fit
  TimePoint oldest_submitted = TimePoint::max();  // of all operations seen that could run now

  bool Full() const {
    return choices.size() >= static_cast<size_t>(options.max_batch_requests) ||
           tokens >= options.max_batch_tokens || work >= options.max_launch || alone;
  }
  // Whether `operation`, which may run, joins this batch, which is not full.
  bool Accepts(const AttendOperation& operation) {
    oldest_submitted = std::min(oldest_submitted, operation.submitted);
    if (choices.empty()) return true;
    if (operation.cut != nullptr) return false;
    if (!(operation.request.geometry() == batch->operations.front()->request.geometry())) {
      return false;
    }
    const bool fits = tokens + operation.tokens <= options.max_batch_tokens &&
                      work + operation.work <= options.max_launch;
    left_out |= !fits;
    return fits;
  }
  // The time to launch it, at which it no longer waits for more requests.
  TimePoint Due() const {
    return Full() || left_out ? now : oldest_submitted + options.max_queue_delay;
  }
};

absl::Status Batcher::Enqueue(AttendOperation* operation, AttendOperation** displaced) {
  *displaced = nullptr;
  operation->submitted = clock_->Now();
  operation->tokens = CountTokens(operation->request);
  operation->work = EstimateWork(*operation, /*is_launched=*/false, options_.speed);
  MutexLock lock(&mutex_);
  if (closed_) return absl::UnavailableError(kDrains);
  if (depth_ >= options_.max_queue_requests) {
    *displaced = Displace(operation->identity.name);
    if (*displaced == nullptr) {
      return WithInfo(
          absl::ResourceExhaustedError(absl::StrCat("the request queue is full: ", depth_,
                                                    " requests are waiting, which is the limit")),
          reason::kQueueFull);
    }
  }
  Activate(operation->identity.name)->queue.push_back(operation);
  StartWaiting(absl::MakeSpan(operation->order));
  ++depth_;
  queued_before_staged_ |= staged_ != 0 && IsAtSlotOf(operation->order, staged_);
  UpdateLaneWanted();
  WakeOne();
  return absl::OkStatus();
}

bool Batcher::Take(Batch* batch) {
  batch->clear();
  const TimePoint spin_end = clock_->Now() + options_.idle_spin;
  MutexLock lock(&mutex_);
  ++idle_lanes_;
  TimePoint retry;
  bool ended = false;
  while (!wake_ && !TryTake(batch, &retry)) {
    ended = closed_ && depth_ == 0;
    if (ended) break;
    Park(retry, spin_end);
  }
  --idle_lanes_;
  UpdateLaneWanted();
  if (ended) return false;
  wake_ = false;
  // Another lane may be able to use the rest. Waking one is enough: it wakes the next.
  if (depth_ > 0) {
    WakeOne();
  } else if (closed_) {
    WakeAll();
  }
  return true;
}

// Returns when woken, at `retry`, or spuriously.
void Batcher::Park(TimePoint retry, TimePoint spin_end) {
  if (!spinning_ && clock_->Now() < spin_end) {
    Spin(std::min(retry, spin_end));
    return;
  }
  CondVar woken;
  sleepers_.push_back(&woken);
  if (retry == kNoDeadline) {
    woken.Wait(&mutex_);
  } else {
    woken.WaitUntil(&mutex_, retry);
  }
  sleepers_.erase(std::remove(sleepers_.begin(), sleepers_.end(), &woken), sleepers_.end());
}

void Batcher::Spin(TimePoint end) {
  spinning_ = true;
  spinner_woken_ = false;
  mutex_.unlock();
  while (!spinner_woken_.load(std::memory_order_relaxed) && clock_->Now() < end) {
    std::this_thread::yield();
  }
  mutex_.lock();
  spinning_ = false;
}

bool Batcher::TryTake(Batch* batch, TimePoint* retry) {
  batch->clear();
  *retry = kNoDeadline;
  if (depth_ == 0) return false;
  batch->serial = ++last_serial_;
  Forming forming{batch, options_, clock_->Now()};
  Choose(&forming);
  if (!batch->operations.empty()) {
    const TimePoint due = forming.Due();
    if (closed_ || due <= forming.now) {
      Commit(forming);
    } else {
      PutBack(&forming);
      *retry = due;
    }
  }
  UpdateClients();
  return !batch->operations.empty() || !batch->dropped.empty();
}

void Batcher::Choose(Forming* forming) {
  std::vector<Cursor>& cursors = forming->cursors;
  cursors.reserve(active_.size());
  for (Client& client : active_) cursors.push_back({&client, client.queue.begin()});
  std::make_heap(cursors.begin(), cursors.end(), Cursor::Later);
  while (!cursors.empty() && !forming->Full()) {
    std::pop_heap(cursors.begin(), cursors.end(), Cursor::Later);
    Cursor& cursor = cursors.back();
    const Queue::iterator position = FindNext(&cursor, forming);
    if (position == cursor.client->queue.end()) {
      cursors.pop_back();
      continue;
    }
    AttendOperation* const operation = *position;
    forming->batch->operations.push_back(operation);
    forming->choices.push_back({cursor.client, position});
    forming->tokens += operation->tokens;
    forming->work += operation->work;
    forming->alone = operation->cut != nullptr;
    if (operation->cut == nullptr) {
      StartRunning(absl::MakeSpan(operation->order), forming->batch->serial);
    }
    cursor.client->served += Charge(*operation);
    std::push_heap(cursors.begin(), cursors.end(), Cursor::Later);
  }
}

// The client's next operation that joins the batch, or the end of its queue. Drops the cancelled
// and expired ones before it.
Batcher::Queue::iterator Batcher::FindNext(Cursor* cursor, Forming* forming) {
  Queue& queue = cursor->client->queue;
  while (cursor->next != queue.end()) {
    const Queue::iterator position = cursor->next++;
    AttendOperation* const operation = *position;
    if (absl::Status status = DropReason(*operation, forming->now); !status.ok()) {
      forming->batch->dropped.emplace_back(operation, std::move(status));
      if (operation->cut == nullptr) StopWaiting(absl::MakeSpan(operation->order));
      Erase(cursor->client, position);
      continue;
    }
    const bool may_run =
        operation->cut != nullptr || MayRun(operation->order, forming->batch->serial);
    if (may_run && forming->Accepts(*operation)) return position;
  }
  return queue.end();
}

void Batcher::Commit(const Forming& forming) {
  for (const Choice& choice : forming.choices) {
    most_served_ = std::max(most_served_, choice.client->served);
    Erase(choice.client, choice.position);
  }
}

void Batcher::PutBack(Forming* forming) {
  for (auto choice = forming->choices.rbegin(); choice != forming->choices.rend(); ++choice) {
    AttendOperation* const operation = *choice->position;
    UndoStartRunning(absl::MakeSpan(operation->order));  // it is not `cut`: that does not wait
    choice->client->served -= Charge(*operation);
  }
  forming->batch->operations.clear();
}

// After the queues have changed: moves clients without operations to idle_, updates virtual_time_,
// and forgets idle clients that it has passed or that are too many.
void Batcher::UpdateClients() {
  virtual_time_ = most_served_;
  for (auto it = active_.begin(); it != active_.end();) {
    const Clients::iterator client = it++;
    if (client->queue.empty()) {
      idle_.splice(idle_.end(), active_, client);
    } else {
      virtual_time_ = std::min(virtual_time_, client->served);
    }
  }
  const size_t max_idle = static_cast<size_t>(options_.max_queue_requests);
  while (!idle_.empty() && (idle_.front().served <= virtual_time_ || idle_.size() > max_idle)) {
    clients_.erase(idle_.front().name);
    idle_.pop_front();
  }
}

// Removes the newest operation of the longest queue, to make room for one of `newcomer`. Null if
// that queue is no longer than newcomer's would be, or has only operations that have begun.
AttendOperation* Batcher::Displace(const std::string& newcomer) {
  const auto found = clients_.find(newcomer);
  const size_t would_have = (found == clients_.end() ? 0 : found->second->queue.size()) + 1;
  const auto longest = std::max_element(
      active_.begin(), active_.end(),
      [](const Client& a, const Client& b) { return a.queue.size() < b.queue.size(); });
  if (longest == active_.end() || longest->queue.size() <= would_have) return nullptr;
  for (auto position = longest->queue.end(); position != longest->queue.begin();) {
    AttendOperation* const operation = *--position;
    if (operation->cut != nullptr) continue;
    StopWaiting(absl::MakeSpan(operation->order));
    Erase(&*longest, position);
    return operation;
  }
  return nullptr;
}

Batcher::Client* Batcher::Activate(const std::string& name) {
  auto found = clients_.find(name);
  if (found == clients_.end()) {
    const Clients::iterator added = idle_.insert(idle_.end(), Client{name, {}});
    found = clients_.emplace(added->name, added).first;
  }
  const Clients::iterator client = found->second;
  if (client->queue.empty()) {
    active_.splice(active_.end(), idle_, client);
    client->served = std::max(client->served, virtual_time_);
    client->active_since = ++activations_;
  }
  return &*client;
}

void Batcher::Erase(Client* client, Queue::iterator position) {
  client->queue.erase(position);
  --depth_;
}

// The charge to a client for the operation's next launch.
int64_t Batcher::Charge(const AttendOperation& operation) const {
  return std::min(operation.work, options_.max_launch).count();
}

void Batcher::Release(absl::Span<AttendOperation* const> operations) {
  bool freed = false;
  MutexLock lock(&mutex_);
  for (const AttendOperation* operation : operations) freed |= StopRunning(operation->order);
  if (freed && depth_ > 0) WakeOne();
}

absl::Status Batcher::Return(absl::Span<AttendOperation* const> operations) {
  MutexLock lock(&mutex_);
  if (!end_.ok()) return end_;
  for (auto it = operations.rbegin(); it != operations.rend(); ++it) {
    AttendOperation* const operation = *it;
    if (operation->cut == nullptr) WaitAgain(absl::MakeSpan(operation->order));
    Activate(operation->identity.name)->queue.push_front(operation);
    ++depth_;
  }
  UpdateLaneWanted();
  WakeOne();
  return absl::OkStatus();
}

bool Batcher::CanStage() const { return depth_ == 0 && staged_ == 0 && !closed_; }

bool Batcher::MayStage() const {
  MutexLock lock(&mutex_);
  return CanStage();
}

bool Batcher::BeginStaging(AttendOperation* operation) {
  operation->submitted = clock_->Now();
  operation->tokens = CountTokens(operation->request);
  operation->work = EstimateWork(*operation, /*is_launched=*/false, options_.speed);
  MutexLock lock(&mutex_);
  if (!CanStage()) return false;
  const absl::Span<OrderedUse> order = absl::MakeSpan(operation->order);
  const uint64_t batch = ++last_serial_;
  StartWaiting(order);
  if (!MayRun(order, batch)) {
    StopWaiting(order);
    return false;
  }
  StartRunning(order, batch);
  staged_ = batch;
  return true;
}

void Batcher::EndStaging(AttendOperation* operation, bool launched) {
  MutexLock lock(&mutex_);
  staged_ = 0;
  queued_before_staged_ = false;
  if (launched) {
    Client* const client = Activate(operation->identity.name);
    client->served += Charge(*operation);
    most_served_ = std::max(most_served_, client->served);
    UpdateClients();
  } else if (StopRunning(operation->order) && depth_ > 0) {
    WakeOne();
  }
  UpdateLaneWanted();
  wake_ = true;  // to stage the next
  WakeOne();
}

void Batcher::UpdateLaneWanted() {
  lane_wanted_ = closed_ || queued_before_staged_ || (depth_ > 0 && idle_lanes_ == 0);
}

void Batcher::Wake() {
  MutexLock lock(&mutex_);
  wake_ = true;
  WakeOne();
}

void Batcher::Close() {
  MutexLock lock(&mutex_);
  closed_ = true;
  UpdateLaneWanted();
  WakeAll();
}

std::vector<AttendOperation*> Batcher::EndAll(const absl::Status& status) {
  std::vector<AttendOperation*> operations;
  MutexLock lock(&mutex_);
  closed_ = true;
  end_ = status;
  for (Client& client : active_) {
    for (AttendOperation* operation : client.queue) {
      if (operation->cut == nullptr) StopWaiting(absl::MakeSpan(operation->order));
      operations.push_back(operation);
    }
    client.queue.clear();
  }
  depth_ = 0;
  UpdateClients();
  UpdateLaneWanted();
  WakeAll();
  return operations;
}

// Wakes an idle lane: the one that spins, or the most recently parked, whose thread wakes fastest.
void Batcher::WakeOne() {
  if (spinning_ && !spinner_woken_.exchange(true)) return;
  if (sleepers_.empty()) return;
  sleepers_.back()->NotifyOne();
  sleepers_.pop_back();
}

void Batcher::WakeAll() {
  WakeOne();  // the spinning lane, if there is one
  while (!sleepers_.empty()) WakeOne();
}

int Batcher::depth() const {
  MutexLock lock(&mutex_);
  return depth_;
}

size_t Batcher::clients() const {
  MutexLock lock(&mutex_);
  return clients_.size();
}

}  // namespace flashcore::server

#include "client/cpp/local/async_ring.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/local/convert.h"
#include "proto/wire/frames.h"
#include "proto/wire/start_thread.h"

namespace flashcore::client::local {
namespace {

constexpr uint32_t kSlots = 64;
constexpr uint32_t kSlotBytes = 4 * 1024;
constexpr std::chrono::microseconds kSpin(20);
constexpr size_t kMaxCallBytes = wire::kMaxFrameBytes - 1024;  // a call's other fields take less

}  // namespace

absl::StatusOr<std::shared_ptr<AsyncRing>> AsyncRing::Open(std::shared_ptr<Connection> connection,
                                                           std::shared_ptr<BlockPool> pool,
                                                           SteadyTime deadline) {
  BlockPool::Block memory;
  std::unique_ptr<OpenRing> ring;
  const Status opened = pool->Open(kSlots, kSlotBytes, deadline, &memory, &ring);
  if (!opened.ok()) return ToAbsl(opened);
  std::shared_ptr<AsyncRing> made(
      new AsyncRing(std::move(connection), std::move(pool), std::move(memory), std::move(ring)));
  made->end_hook_ = made->connection_->AddEndHook([raw = made.get()] {
    raw->Kick();
    return false;
  });
  const int error = StartThread(&made->thread_, [made] { made->Run(); });
  if (error != 0) return absl::ResourceExhaustedError(NoThreadMessage(error));
  return made;
}

AsyncRing::AsyncRing(std::shared_ptr<Connection> connection, std::shared_ptr<BlockPool> pool,
                     BlockPool::Block memory, std::unique_ptr<OpenRing> ring)
    : connection_(std::move(connection)),
      pool_(std::move(pool)),
      memory_(std::move(memory)),
      ring_(std::move(ring)) {}

AsyncRing::~AsyncRing() {
  connection_->RemoveEndHook(end_hook_);
  absl::MutexLock lock(&mutex_);
  entries_.clear();  // before the pool
}

void AsyncRing::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
    Kick();
  }
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

uint64_t AsyncRing::Start(std::shared_ptr<RingRequest> request, SteadyTime deadline, Done done) {
  return Add({std::move(request), deadline, std::move(done)});
}

absl::StatusOr<uint64_t> AsyncRing::StartOnCudaStream(std::shared_ptr<RingRequest> request,
                                                      CuStream stream, Timelines* timelines,
                                                      SteadyTime deadline, Done* done) {
  absl::MutexLock lock(&order_mutex_);
  // Later nothing may fail but the connection, whose end releases the stream.
  if (connection_->ended()) return ToAbsl(connection_->end_status());
  if (deadline <= std::chrono::steady_clock::now()) return ToAbsl(TooLate());
  const size_t bytes = request->Bytes() + Timelines::kMaxFieldBytes;
  if (bytes > kMaxCallBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("request: ", bytes, " bytes; want at most ", kMaxCallBytes, ": fewer spans"));
  }
  std::string_view fields;
  const Status status = timelines->Order(stream, &fields);
  if (!status.ok()) return ToAbsl(status);
  request->Append(fields);
  return Add({std::move(request), deadline, std::move(*done), /*awaited=*/true});
}

uint64_t AsyncRing::Add(Entry added) {
  absl::MutexLock lock(&mutex_);
  const uint64_t ticket = next_ticket_++;
  Entry& entry = entries_[ticket];
  entry = std::move(added);
  queue_.push_back(ticket);
  const bool earlier = entry.deadline < look_again_;
  Pump();
  if (earlier || connection_->ended()) Kick();
  return ticket;
}

void AsyncRing::Cancel(uint64_t ticket) {
  absl::MutexLock lock(&mutex_);
  cancelled_.push_back(ticket);
  Kick();
}

void AsyncRing::Kick() {
  kicked_.store(true);
  ring_->ring().Wake();
}

void AsyncRing::Run() {
  std::vector<Ended> ended;
  while (true) {
    kicked_.store(false);
    const SteadyTime look_again = Collect(&ended);
    for (Ended& one : ended) one.done(std::move(one.status), std::move(one.result));
    const bool busy = !ended.empty();
    ended.clear();
    if (busy) continue;
    {
      absl::MutexLock lock(&mutex_);
      if (stop_ && Idle()) return;
    }
    ring_->ring().Wait(kicked_, std::chrono::steady_clock::now() + kSpin, look_again);
  }
}

// Entries whose callback has run do not count, but the connection must not call back later.
bool AsyncRing::Idle() const {
  if (calls_ > 0) return false;
  return std::all_of(entries_.begin(), entries_.end(),
                     [](const auto& entry) { return entry.second.done == nullptr; });
}

SteadyTime AsyncRing::Collect(std::vector<Ended>* ended) {
  absl::MutexLock lock(&mutex_);
  TakeAnswers(ended);
  const absl::Status end =
      connection_->ended() ? ToAbsl(connection_->end_status()) : absl::OkStatus();
  const SteadyTime now = std::chrono::steady_clock::now();
  look_again_ = SteadyTime::max();
  for (auto& [ticket, entry] : entries_) {
    if (!end.ok()) {
      GiveUp(ticket, &entry, end, ended);
    } else if (entry.done != nullptr && entry.deadline <= now) {
      GiveUp(ticket, &entry, absl::DeadlineExceededError(kNoAnswer), ended);
    } else if (entry.done != nullptr) {
      look_again_ = std::min(look_again_, entry.deadline);
    }
  }
  for (const uint64_t ticket : cancelled_) {
    const auto it = entries_.find(ticket);
    if (it != entries_.end()) {
      GiveUp(ticket, &it->second, absl::CancelledError("CANCELLED"), ended);
    }
  }
  cancelled_.clear();
  if (!end.ok()) {
    entries_.clear();
    queue_.clear();
  }
  Pump();
  return look_again_;
}

void AsyncRing::TakeAnswers(std::vector<Ended>* ended) {
  const auto take = [&](uint64_t ticket, const absl::Status& status,
                        absl::Span<const std::byte> message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto it = entries_.find(ticket);
    if (it == entries_.end()) return;
    Entry& entry = it->second;
    if (entry.done != nullptr) {
      Ended& one = ended->emplace_back(Ended{std::move(entry.done), status, {}});
      if (status.ok()) one.status = entry.request->Take(message, &one.result);
      one.result.request_bytes = entry.request->Bytes();
    }
    entries_.erase(it);
  };
  Ring::Answer answer;
  while (ring_->ring().Poll(&answer)) {
    if (answer.malformed) {
      connection_->End({kInternal, "reply: malformed completion", ""});
      return;
    }
    take(answer.tag, absl::OkStatus(), {answer.data, answer.bytes});
    ring_->ring().Pop();
  }
  for (const CallAnswer& call : call_answers_) {
    const auto* const data = reinterpret_cast<const std::byte*>(call.message.data());
    take(call.ticket, call.status, {data, call.message.size()});
  }
  call_answers_.clear();
}

void AsyncRing::GiveUp(uint64_t ticket, Entry* entry, absl::Status status,
                       std::vector<Ended>* ended) {
  if (entry->done == nullptr) return;
  Ended& one = ended->emplace_back(Ended{std::move(entry->done), std::move(status), {}});
  one.result.request_bytes = entry->request->Bytes();
  entry->done = nullptr;
  CancelSent(ticket, *entry);
}

void AsyncRing::CancelSent(uint64_t ticket, const Entry& entry) {
  if (entry.in_ring) ring_->Cancel(ticket);
  if (entry.call_id != 0) connection_->CancelCall(entry.call_id);
}

void AsyncRing::Pump() {
  Ring& ring = ring_->ring();
  while (!queue_.empty() && !connection_->ended()) {
    const uint64_t ticket = queue_.front();
    const auto it = entries_.find(ticket);
    const bool given_up = it == entries_.end() || it->second.done == nullptr;
    if (given_up && (it == entries_.end() || !it->second.awaited)) {
      if (it != entries_.end()) entries_.erase(it);
      queue_.pop_front();
      continue;
    }
    Entry& entry = it->second;
    const bool in_ring = FitsInSlot(*entry.request);
    if (in_ring && ring.Full()) return;
    queue_.pop_front();
    if (in_ring) {
      entry.request->Serialize(ring.NextSlot());
      entry.in_ring = true;
      ring_->Submit(ticket, TimeoutNs(entry.deadline), entry.request->Bytes());
    } else {
      SendAsCall(ticket, &entry);
    }
    if (given_up) CancelSent(ticket, entry);
  }
}

bool AsyncRing::FitsInSlot(const RingRequest& request) const {
  const Ring& ring = ring_->ring();
  return request.Bytes() <= ring.RequestBytes() && request.MaxAnswerBytes() <= ring.AnswerBytes();
}

void AsyncRing::SendAsCall(uint64_t ticket, Entry* entry) {
  const auto answered = [this, ticket](const Status& status, Connection::Reply reply) {
    absl::MutexLock lock(&mutex_);
    --calls_;
    call_answers_.push_back({ticket, ToAbsl(status), std::move(reply.result)});
    Kick();
  };
  // A stream awaits the server's answer, however late the server reads.
  const SteadyTime send_by = entry->awaited ? SteadyTime::max() : entry->deadline;
  ++calls_;
  const Status sent = connection_->StartCall("Attend", entry->request->Serialized(),
                                             entry->deadline, send_by, answered, &entry->call_id);
  if (sent.ok()) return;
  entry->call_id = 0;
  --calls_;
  call_answers_.push_back({ticket, ToAbsl(sent), ""});
  Kick();
}

}  // namespace flashcore::client::local

#include "server/transport/rpc/unsent_replies.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

// For replies that wait too long. In that time, a client that reads has read a burst.
constexpr std::chrono::milliseconds kCheckInterval(250);

// In that time, a reply that was cut off is Sent, if the client takes bytes from its connection.
constexpr std::chrono::seconds kEndsWithin(1);

}  // namespace

void UnsentReply::Ready(absl::string_view name, size_t bytes, const StagingUse& staging) {
  all_->Ready(this, name, bytes, staging);
}

CutOff UnsentReply::Sent() { return ready_ ? all_->Sent(this) : cut_off_; }

void UnsentReplies::Start(const Options& options, const Clock* clock,
                          std::vector<StagingPool*> pools) {
  options_ = options;
  clock_ = clock;
  pools_ = std::move(pools);
  {
    MutexLock lock(&mutex_);
    shares_.emplace(options.bytes);
    thread_.emplace(clock_, kCheckInterval, [this] { CutOffCondemned(); });
  }
  for (StagingPool* pool : pools_) pool->SetOnDebt([this] { thread_->CallSoon(); });
}

UnsentReplies::~UnsentReplies() {
  for (StagingPool* pool : pools_) pool->SetOnDebt(nullptr);
}

absl::Status UnsentReplies::Check(absl::string_view client) const {
  MutexLock lock(&mutex_);
  // The rest is for refusals, and for replies to requests in flight.
  const size_t rest = options_.bytes.one / 4;
  if (!shares_->IsOverShare(client, rest)) return absl::OkStatus();
  return WithInfo(absl::ResourceExhaustedError(absl::StrCat(
                      "unread replies of this client take ", shares_->held(client),
                      " bytes; the limit is ", options_.bytes.one - rest,
                      " (three quarters of its share, a quarter of --unsent_reply_bytes). Read "
                      "replies before sending more")),
                  reason::kRepliesFull);
}

size_t UnsentReplies::bytes() const {
  MutexLock lock(&mutex_);
  return shares_->held();
}

size_t UnsentReplies::bytes(absl::string_view client) const {
  MutexLock lock(&mutex_);
  return shares_->held(client);
}

void UnsentReplies::Ready(UnsentReply* reply, absl::string_view client, size_t bytes,
                          const StagingUse& staging) {
  const size_t share = options_.bytes.one;
  if (share > 0) bytes = std::min(bytes, share);  // a larger reply may be sent, but only alone
  const TimePoint now = clock_->Now();
  MutexLock lock(&mutex_);
  reply->ready_ = true;
  reply->since_ = now;
  shares_->Take(client, bytes, reply);
  if (staging.bytes > 0) {
    reply->staged_.reply = reply;
    reply->staged_.use = staging;
    staged_.Take("", staging.bytes, &reply->staged_);
    staging.pool->AddUnread(staging.bytes);
  }
  while (options_.bytes.all > 0 && shares_->held() > options_.bytes.all) {
    Condemn(Oldest(*shares_->MustGiveBack()), CutOff::kShare);
  }
}

CutOff UnsentReplies::Sent(UnsentReply* reply) {
  reply->ready_ = false;
  MutexLock lock(&mutex_);
  if (reply->cut_off_ == CutOff::kNo) {
    Give(reply);
    return CutOff::kNo;
  }
  condemned_.erase(reply);
  cut_off_.erase(reply);
  if (cutting_ == reply && cutter_ == std::this_thread::get_id()) cutting_ = nullptr;
  while (cutting_ == reply) changed_.Wait(&mutex_);
  return reply->cut_off_;
}

void UnsentReplies::Give(UnsentReply* reply) {
  shares_->Give(reply);
  UnsentReply::Staged& staged = reply->staged_;
  if (staged.use.bytes == 0) return;
  if (!staged.overdue) staged_.Give(&staged);
  staged.use.pool->RemoveUnread(staged.use.bytes, &staged);
}

void UnsentReplies::MarkOverdue(TimePoint since) {
  while (const Shares::Client* const client = staged_.Largest()) {
    auto* const staged = static_cast<UnsentReply::Staged*>(client->oldest);
    if (staged->reply->since_ > since) return;
    staged_.Give(staged);
    staged->overdue = true;
    staged->use.pool->AddOverdue(staged->reply->client->name, staged->use.bytes, staged);
  }
}

void UnsentReplies::Condemn(UnsentReply* reply, CutOff why) {
  Give(reply);
  reply->cut_off_ = why;
  condemned_.insert(reply);
  if (condemned_.size() == 1) thread_->CallSoon();
}

void UnsentReplies::CutOffAll() {
  MutexLock lock(&mutex_);
  CondemnOld(TimePoint::max(), 0, CutOff::kDrain);
}

void UnsentReplies::CondemnOld(TimePoint since, size_t keep, CutOff why) {
  const auto& clients = shares_->clients();
  for (auto client = clients.begin(); client != clients.end();) {
    UnsentReply* reply = Oldest((client++)->second);  // the client may go with its last reply
    while (reply != nullptr && reply->client->held > keep && reply->since_ <= since) {
      UnsentReply* const newer = static_cast<UnsentReply*>(reply->newer);
      Condemn(reply, why);
      reply = newer;
    }
  }
}

void UnsentReplies::CutOffCondemned() {
  MutexLock lock(&mutex_);
  cutter_ = std::this_thread::get_id();
  const TimePoint now = clock_->Now();
  for (const auto& [reply, since] : cut_off_) {
    if (now - since >= kEndsWithin) condemned_.insert(reply);
  }
  const Nanoseconds timeout = options_.timeout;
  if (timeout > Nanoseconds(0)) CondemnOld(now - timeout, 0, CutOff::kTimeout);
  const size_t share = options_.bytes.one;
  if (share > 0) CondemnOld(now - kCheckInterval, share, CutOff::kShare);
  MarkOverdue(now - kCheckInterval);
  for (StagingPool* pool : pools_) {
    while (Shares::Item* const overdue = pool->Debt()) {
      Condemn(static_cast<UnsentReply::Staged*>(overdue)->reply, CutOff::kStaging);
    }
  }
  while (!condemned_.empty()) {
    UnsentReply* const reply = *condemned_.begin();
    condemned_.erase(condemned_.begin());
    const bool again = !cut_off_.emplace(reply, now).second;
    // Copies: the reply may be destroyed within the call.
    const UnsentReply::OnCutOff on_cut_off = reply->on_cut_off_;
    const CutOff why = reply->cut_off_;
    cutting_ = reply;
    mutex_.unlock();
    on_cut_off(why, again);
    mutex_.lock();
    cutting_ = nullptr;
    changed_.NotifyAll();
  }
}

}  // namespace flashcore::server

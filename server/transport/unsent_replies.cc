#include "server/transport/unsent_replies.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

constexpr std::chrono::milliseconds kCheckInterval(250);  // for replies that wait too long

constexpr size_t kMaxIdleAccounts = 64;

absl::Status TooMuch(absl::string_view whose, size_t bytes, size_t limit, const char* flag) {
  return WithInfo(absl::ResourceExhaustedError(absl::StrCat(
                      "unread replies of ", whose, " take ", bytes, " bytes; the limit is ", limit,
                      " (", flag, "). Read replies before sending more")),
                  reason::kRepliesFull);
}

}  // namespace

void UnsentReply::Ready(absl::string_view client, size_t bytes) {
  all_->Ready(this, client, bytes);
}

CutOff UnsentReply::Sent() { return bytes_ == 0 ? cut_off_ : all_->Sent(this); }

void UnsentReplies::Start(const Options& options, const Clock* clock) {
  options_ = options;
  clock_ = clock;
  if (options.timeout > Nanoseconds(0)) {
    thread_.emplace(clock_, kCheckInterval, [this] { CutOffLate(); });
  }
}

absl::Status UnsentReplies::Check(absl::string_view client) const {
  MutexLock lock(&mutex_);
  const auto account = accounts_.find(client);
  const size_t own = account == accounts_.end() ? 0 : account->second;
  if (options_.client_bytes > 0 && own >= options_.client_bytes) {
    return TooMuch("this client", own, options_.client_bytes, "a quarter of --unsent_reply_bytes");
  }
  if (options_.total_bytes > 0 && bytes_ >= options_.total_bytes) {
    return TooMuch("all clients", bytes_, options_.total_bytes, "--unsent_reply_bytes");
  }
  return absl::OkStatus();
}

size_t UnsentReplies::bytes() const {
  MutexLock lock(&mutex_);
  return bytes_;
}

void UnsentReplies::Ready(UnsentReply* reply, absl::string_view client, size_t bytes) {
  const TimePoint deadline = clock_->Now() + options_.timeout;
  MutexLock lock(&mutex_);
  auto account = accounts_.find(client);
  if (account == accounts_.end()) account = accounts_.try_emplace(std::string(client), 0).first;
  account->second += bytes;
  bytes_ += bytes;
  reply->account_ = account;
  reply->bytes_ = bytes;
  reply->deadline_ = deadline;
  reply->previous_ = newest_;
  (newest_ == nullptr ? oldest_ : newest_->next_) = reply;
  newest_ = reply;
}

void UnsentReplies::Unlink(UnsentReply* reply) {
  (reply->previous_ == nullptr ? oldest_ : reply->previous_->next_) = reply->next_;
  (reply->next_ == nullptr ? newest_ : reply->next_->previous_) = reply->previous_;
}

CutOff UnsentReplies::Sent(UnsentReply* reply) {
  MutexLock lock(&mutex_);
  if (cutting_ == reply && cutter_ == std::this_thread::get_id()) cutting_ = nullptr;
  while (cutting_ == reply) changed_.Wait(&mutex_);
  if (reply->cut_off_ == CutOff::kNo) Unlink(reply);
  bytes_ -= reply->bytes_;
  reply->account_->second -= reply->bytes_;
  if (reply->account_->second == 0 && accounts_.size() > kMaxIdleAccounts) {
    accounts_.erase(reply->account_);
  }
  reply->bytes_ = 0;
  return reply->cut_off_;
}

void UnsentReplies::CutOffOldest(CutOff why) {
  UnsentReply* const reply = oldest_;
  Unlink(reply);
  reply->cut_off_ = why;
  cutting_ = reply;
  cutter_ = std::this_thread::get_id();
  mutex_.unlock();
  if (reply->context_ != nullptr)
    reply->context_->TryCancel();  // may call Sent, and delete the reply
  mutex_.lock();
  if (cutting_ == reply && cutter_ == std::this_thread::get_id()) cutting_ = nullptr;
  changed_.NotifyAll();
}

void UnsentReplies::CutOffAll() {
  MutexLock lock(&mutex_);
  while (cutting_ != nullptr) changed_.Wait(&mutex_);
  while (oldest_ != nullptr) CutOffOldest(CutOff::kDrain);
}

void UnsentReplies::CutOffLate() {
  MutexLock lock(&mutex_);
  const TimePoint now = clock_->Now();
  while (oldest_ != nullptr && oldest_->deadline_ <= now && cutting_ == nullptr) {
    CutOffOldest(CutOff::kTimeout);
  }
}

}  // namespace flashcore::server

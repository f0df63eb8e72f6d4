// Replies that are ready and not sent yet: their memory, and how long they wait.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_UNSENT_REPLIES_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_UNSENT_REPLIES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/base/periodic_thread.h"
#include "server/memory/staging_pool.h"
#include "server/sharing/shares.h"

namespace flashcore::server {

class UnsentReplies;

// The memory that gRPC and this server keep for an unsent reply, without its message: of an RPC,
// and of one answer of a stream (measured: 18 KB and 5 KB).
inline constexpr size_t kRpcBytes = 20480;
inline constexpr size_t kAnswerBytes = 6144;

// Why a reply did not reach its client: it was not read in time, its client left too much unread,
// another client needed its staging memory, or the server ended.
enum class CutOff : uint8_t { kNo, kTimeout, kShare, kStaging, kDrain };

// One reply, from Ready to Sent. The sender of the reply owns it. Not thread-safe.
class UnsentReply : private Shares::Item {
 public:
  // Ends the sending of the reply, from another thread. Sent waits for its return. It may call Sent
  // and destroy the reply. A reply that was not Sent soon after it was cut off is cut off `again`,
  // until it is.
  using OnCutOff = std::function<void(CutOff why, bool again)>;

  // `all` outlives it.
  UnsentReply(UnsentReplies* all, OnCutOff on_cut_off)
      : all_(all), on_cut_off_(std::move(on_cut_off)) {}
  ~UnsentReply() { Sent(); }
  UnsentReply(const UnsentReply&) = delete;
  UnsentReply& operator=(const UnsentReply&) = delete;

  // The reply is ready, and takes `bytes` of memory, which are charged to `client`, and besides
  // `staging`. Call it at most once, before the network has the reply.
  void Ready(absl::string_view client, size_t bytes, const StagingUse& staging = {});
  // The reply was sent or dropped. Returns whether it was cut off meanwhile. Waits while that
  // happens. Further calls have no effect.
  CutOff Sent();

 private:
  friend class UnsentReplies;
  struct Staged : Shares::Item {
    UnsentReply* reply = nullptr;
    StagingUse use;
    bool overdue = false;
  };

  UnsentReplies* const all_;
  const OnCutOff on_cut_off_;
  bool ready_ = false;  // and not Sent
  // Guarded by the mutex of `all_`, until Sent, as is the item.
  TimePoint since_;  // when it was ready
  Staged staged_;
  CutOff cut_off_ = CutOff::kNo;
};

// All unsent replies of a server. A reply that is not sent in time is cut off. A client that leaves
// too much unread is refused, before it has its whole share; beyond that, its oldest replies are
// cut off, which bounds refusals, too: soon, so that a burst that the client is reading passes. If
// all clients together leave too much unread, the oldest replies of the one that has the most are
// cut off at once. A reply that is not sent soon is overdue to its StagingPool, which may take the
// memory back. Thread-safe.
//
// Lock order: mutex_, then a pool's.
class UnsentReplies {
 public:
  struct Options {
    Shares::Limits bytes;
    Nanoseconds timeout{0};  // from Ready to Sent; 0: none
  };

  UnsentReplies() = default;
  ~UnsentReplies();
  UnsentReplies(const UnsentReplies&) = delete;
  UnsentReplies& operator=(const UnsentReplies&) = delete;

  // Call it once, before the first reply. `pools` have the staging memory of the replies. They and
  // `clock` outlive this.
  void Start(const Options& options, const Clock* clock, std::vector<StagingPool*> pools = {});

  // RESOURCE_EXHAUSTED if the client leaves too much unread for one more request.
  absl::Status Check(absl::string_view client) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Cuts off all replies, soon.
  void CutOffAll() ABSL_LOCKS_EXCLUDED(mutex_);

  const Options& options() const { return options_; }
  // Without replies that are cut off.
  size_t bytes() const ABSL_LOCKS_EXCLUDED(mutex_);
  size_t bytes(absl::string_view client) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class UnsentReply;

  static UnsentReply* Oldest(const Shares::Client& client) {
    return static_cast<UnsentReply*>(client.oldest);
  }
  void Ready(UnsentReply* reply, absl::string_view client, size_t bytes, const StagingUse& staging)
      ABSL_LOCKS_EXCLUDED(mutex_);
  CutOff Sent(UnsentReply* reply) ABSL_LOCKS_EXCLUDED(mutex_);
  // The reply is not charged any more.
  void Give(UnsentReply* reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same; the thread cuts it off.
  void Condemn(UnsentReply* reply, CutOff why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Condemns, for each client, replies that were ready by `since`, while it has more than `keep`
  // bytes.
  void CondemnOld(TimePoint since, size_t keep, CutOff why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Replies with staging memory that were ready by `since` are overdue.
  void MarkOverdue(TimePoint since) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // On the thread.
  void CutOffCondemned() ABSL_LOCKS_EXCLUDED(mutex_);

  Options options_;
  const Clock* clock_ = nullptr;
  std::vector<StagingPool*> pools_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::optional<Shares> shares_ ABSL_GUARDED_BY(mutex_);  // of bytes, by client
  // Staging memory of replies that are not overdue, under a single client for all clients.
  Shares staged_ ABSL_GUARDED_BY(mutex_){{}};
  std::unordered_set<UnsentReply*> condemned_ ABSL_GUARDED_BY(mutex_);
  // Replies that were cut off, and when first, until they are Sent.
  std::unordered_map<UnsentReply*, TimePoint> cut_off_ ABSL_GUARDED_BY(mutex_);
  // The reply that the thread cuts off. It may be Sent within that call, on that thread or on
  // another one.
  UnsentReply* cutting_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::thread::id cutter_ ABSL_GUARDED_BY(mutex_);
  // A thread of its own, since senders hold locks that OnCutOff takes. Last: it uses the others.
  std::optional<PeriodicThread> thread_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_UNSENT_REPLIES_H_

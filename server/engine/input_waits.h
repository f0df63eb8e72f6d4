// Requests that wait until a CUDA stream of their client has written their inputs.
#ifndef FLASHCORE_SERVER_ENGINE_INPUT_WAITS_H_
#define FLASHCORE_SERVER_ENGINE_INPUT_WAITS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/kv/operation.h"
#include "server/sharing/shares.h"

namespace flashcore::server {

// A GPU that writes a counter tells nobody, so a thread polls the counters. Its time for a pass
// grows with the number of waits, so clients have shares of them. Meanwhile an idle lane may borrow
// a wait, prepare its launch and poll its counter itself. Thread-safe, but one thread polls.
class InputWaits {
 public:
  using Ready = absl::AnyInvocable<void(absl::Status)>;

  struct Wait {
    AttendOperation* operation = nullptr;  // null: of RaiseWhenReady
    TimelinePoint inputs{};
    Ready ready{};
    std::string identity{};
    std::weak_ptr<const void> owner{};
    Shares::Client* client = nullptr;  // null: lent
    uint64_t number = 0;               // ascends in the order of Add
    bool staged = false;               // set by the borrower: it is not lent again

    // How the wait ends now; nullopt: it goes on.
    std::optional<absl::Status> EndAt(TimePoint now) const;
  };

  // For 32 layers of 512 models, and of 32 on one identity.
  static constexpr Shares::Limits kLimits{/*all=*/16384, /*one=*/1024};

  explicit InputWaits(const Clock* clock, Shares::Limits limits = kLimits)
      : clock_(clock), shares_(limits) {}
  InputWaits(const InputWaits&) = delete;
  InputWaits& operator=(const InputWaits&) = delete;

  // `wake` lets the thread that polls know that there is something to poll; null: nobody polls any
  // more. It must not block, nor call this.
  void SetWake(std::function<void()> wake) ABSL_LOCKS_EXCLUDED(mutex_);

  // Calls `ready` exactly once, in Poll, in EndAll, or after EndAll in Add or GiveBack: OK when the
  // operation's inputs_ready is reached, CANCELLED, DEADLINE_EXCEEDED, or RESOURCE_EXHAUSTED. A
  // client beyond its share loses its newest wait, and so does the client with the most when all
  // have too many: in Add or GiveBack, also of another one. The operation stays in place until
  // then.
  void Add(AttendOperation* operation, Ready ready) ABSL_LOCKS_EXCLUDED(mutex_);

  // Raises results_ready of `request`, which has failed, when its inputs_ready is reached: until
  // then, the client's stream may still await the results of the request before it, by the same
  // counter. Gives up once `owner` has expired. It counts as a wait of `client`.
  void RaiseWhenReady(const AttendRequest& request, const std::string& client,
                      std::weak_ptr<const void> owner) ABSL_LOCKS_EXCLUDED(mutex_);

  // Calls `ready` of a wait that is not among the others. It may Add.
  static void End(Wait wait, absl::Status status);

  // The oldest wait for an operation of `device` that is the next of its counter, and not `staged`;
  // nullopt: none. The borrower looks at EndAt until it gives the wait back, calls End, or runs the
  // operation.
  std::optional<Wait> Lend(size_t device) ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveBack(Wait wait) ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether a wait has ended. Those that end together end in the order of Add.
  bool Poll() ABSL_LOCKS_EXCLUDED(mutex_);
  bool empty() const { return empty_.load(std::memory_order_acquire); }
  // Ends all with `status`, also those that come later.
  void EndAll(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Insert(Wait wait) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes out the newest wait of the client that must give back; null: nobody must.
  Ready TakeExcess(absl::Status* why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Clock* const clock_;
  std::atomic<bool> empty_{true};  // as waits_
  Mutex mutex_;
  std::function<void()> wake_ ABSL_GUARDED_BY(mutex_);
  std::vector<Wait> waits_ ABSL_GUARDED_BY(mutex_);  // in the order of Add
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  Shares shares_ ABSL_GUARDED_BY(mutex_);
  absl::Status end_ ABSL_GUARDED_BY(mutex_);          // not OK after EndAll
  std::vector<std::pair<Wait, absl::Status>> ended_;  // of Poll; kept for its memory
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ENGINE_INPUT_WAITS_H_

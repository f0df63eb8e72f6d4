// The lease of a client with ClientOptions::lease. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LEASE_H_
#define FLASHCORE_CLIENT_CPP_LEASE_H_

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace flashcore::client {

class Connection;
class HeldLease;

// Over gRPC an open HoldLease, over the local socket that of the connection. Opened with the first
// use, and again with the first use after it has ended. Ends when it is destroyed. Thread-safe.
class Lease {
 public:
  // `connection` owns it.
  explicit Lease(const Connection* connection);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // Returns the affinity for a new sequence: `wanted`, or the lease's if empty. The first `wanted`
  // becomes the lease's.
  std::string Affinity(const std::string& wanted) ABSL_LOCKS_EXCLUDED(mutex_);

  // Its id. Opens it if there is none: blocks until then, at most until `deadline`.
  absl::StatusOr<std::string> Id(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  // The server does not know `id` any more.
  void Forget(const std::string& id) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const Connection& connection_;
  absl::Mutex mutex_;
  std::string affinity_ ABSL_GUARDED_BY(mutex_);
  bool opening_ ABSL_GUARDED_BY(mutex_) = false;             // by one thread, which others wait for
  std::unique_ptr<HeldLease> held_ ABSL_GUARDED_BY(mutex_);  // null: none
};

// Whether `status` is that of an operation that named a lease which the server does not know.
bool IsLeaseLost(const absl::Status& status);

}  // namespace flashcore::client

#endif  // FLASHCORE_CLIENT_CPP_LEASE_H_

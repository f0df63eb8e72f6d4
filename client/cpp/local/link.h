// The way to a server over its local socket, across its restarts. Internal to the client.
#ifndef FLASHCORE_CLIENT_CPP_LOCAL_LINK_H_
#define FLASHCORE_CLIENT_CPP_LOCAL_LINK_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/local/local_connection.h"
#include "client/cpp/memory.h"
#include "client/local/memory.h"
#include "client/local/timed_mutex.h"
#include "flashcore/attend.h"

namespace flashcore::client::local {

// Connects with the first call, and again with the first call after the connection has ended.
// Thread-safe.
class Link {
 public:
  // `client` is for the server's log. `regions` outlives it.
  Link(std::string path, std::string client, absl::Duration spin, RegionTable* regions);

  // The session, connected. UNAVAILABLE if there is no server.
  absl::StatusOr<std::shared_ptr<LocalConnection>> Connect(SteadyTime deadline)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // One attempt of a unary RPC of AttentionService, or of Attend.
  absl::StatusOr<std::string> Call(absl::string_view method, absl::string_view message,
                                   SteadyTime deadline);
  absl::Status Attend(const AttendRequest& request, SteadyTime deadline, AttendResult* result);

  // Registers memory of a SharedMemory: with this connection, and with each later one.
  absl::Status Add(const std::shared_ptr<Memory>& memory, bool read_only, SteadyTime deadline)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(const Memory* memory) ABSL_LOCKS_EXCLUDED(mutex_);
  bool Registered(const Memory* memory) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Shared {
    std::shared_ptr<Memory> memory;
    bool read_only;
    std::string id = {};       // of the last session that has it
    absl::Status status = {};  // of the last registration
  };

  // With the session. Maps and pins the memory: takes seconds for each GiB.
  static void Register(LocalConnection* session, SteadyTime deadline, Shared* shared);
  // Tensors in the region stay there from now on; or are copied, if the registration failed.
  void Publish(const Shared& shared) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string path_;
  const std::string client_;
  const absl::Duration spin_;
  RegionTable* const regions_;
  TimedMutex connect_mutex_;  // one attempt to connect at a time
  mutable absl::Mutex mutex_;
  std::shared_ptr<LocalConnection> session_ ABSL_GUARDED_BY(mutex_);  // null: not connected yet
  std::vector<Shared> shared_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_CPP_LOCAL_LINK_H_

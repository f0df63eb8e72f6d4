// A lease of a client: sequences that name it are deleted when it ends, as DeleteSequence would.
//
// It is no lease of a request on its sequences (kv/operation.h), which keeps them from eviction.
#ifndef FLASHCORE_SERVER_ENGINE_CLIENT_LEASE_H_
#define FLASHCORE_SERVER_ENGINE_CLIENT_LEASE_H_

#include <utility>

#include "server/request/sequence_id.h"

namespace flashcore::server {

class Fleet;

// Ends the lease when it is destroyed. The transport keeps it as long as the call or connection
// that holds the lease. Nothing bounds leases but the limits on those. Not thread-safe.
class ClientLease {
 public:
  ClientLease() = default;  // none
  ClientLease(Fleet* fleet, LeaseId id) : fleet_(fleet), id_(id) {}
  ~ClientLease() { End(); }
  ClientLease(ClientLease&& other) noexcept
      : fleet_(std::exchange(other.fleet_, nullptr)), id_(other.id_) {}
  ClientLease& operator=(ClientLease&& other) noexcept {
    if (this == &other) return *this;
    End();
    fleet_ = std::exchange(other.fleet_, nullptr);
    id_ = other.id_;
    return *this;
  }

  bool open() const { return fleet_ != nullptr; }
  LeaseId id() const { return id_; }
  // Takes little time, and leaves the rest to other threads.
  void End();
  // Leaves its sequences alone: they live until the server ends.
  void Abandon() { fleet_ = nullptr; }

 private:
  Fleet* fleet_ = nullptr;  // null: there is none
  LeaseId id_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ENGINE_CLIENT_LEASE_H_

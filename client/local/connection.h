// One connection of the local socket: calls, registered memory and rings, until either side ends
// it. Internal to the clients; proto/flashcore/v1/local.proto describes the protocol.
#ifndef FLASHCORE_CLIENT_LOCAL_CONNECTION_H_
#define FLASHCORE_CLIENT_LOCAL_CONNECTION_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "client/local/memory.h"
#include "client/local/ring.h"
#include "client/local/status.h"

namespace flashcore::client::local {

// INVALID_ARGUMENT unless `path` is absolute and short enough for a Unix socket.
Status CheckPath(std::string_view path);

// How long the server may take for a request that ends at `deadline`, at least 1; 0: no limit.
uint64_t TimeoutNs(SteadyTime deadline);

// Thread-safe. Everything that came through it ends with it: calls and requests in flight are then
// UNAVAILABLE, or end with the status that the server gave. A thread of its own reads replies, and
// sends what the socket did not take at once: so callers wait for their own reply alone.
class Connection {
 public:
  // UNAVAILABLE if nobody listens at `path`, PERMISSION_DENIED if this user may not connect.
  static Status Connect(const std::string& path, std::shared_ptr<Connection>* connection);
  // Takes a connected stream socket.
  static Status Start(File socket, std::shared_ptr<Connection>* connection);
  ~Connection();  // ends it
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Comes first. `client` is for the server's log.
  Status Hello(const std::string& client, SteadyTime deadline);
  const std::string& identity() const { return identity_; }
  // True once the connection has ended.
  const std::atomic<bool>& ended() const { return ended_; }
  Status end_status() const;  // not OK, once it has ended

  struct Reply {
    std::string result;  // the field of `result` in the LocalReply
    File file;           // that came with it, or none
  };
  // `reply` is empty unless the status is OK. Runs on the connection's thread: must not block.
  using Done = std::function<void(Status status, Reply reply)>;

  static constexpr uint32_t kAllocateDeviceMemory = 10;  // a field of LocalRequest
  static constexpr size_t kRegionIdBytes = 16;

  // Sends a LocalRequest with the message `action` in its field `field`, and `file` unless it is
  // -1, under a new id; does not wait for the server to read. OK means that `done` runs exactly
  // once, with DEADLINE_EXCEEDED if the server did not read by the deadline.
  Status Send(uint32_t field, std::string_view action, int file, SteadyTime deadline, Done done,
              uint64_t* id);
  // The same, and waits for the reply. After the deadline the reply is dropped, and a call is
  // cancelled.
  Status Exchange(uint32_t field, std::string_view action, int file, SteadyTime deadline,
                  Reply* reply);
  // Sends a request whose reply, if it has one, does not matter.
  void Tell(uint32_t field, std::string_view action);

  // One attempt of a unary RPC, by serialized messages.
  Status Call(std::string_view method, std::string_view message, SteadyTime deadline,
              std::string* response);
  // The same without waiting: `done` gets the response. `id` is for CancelCall. If the server has
  // not begun to read it at `send_by`, it is not sent: DEADLINE_EXCEEDED.
  Status StartCall(std::string_view method, std::string_view message, SteadyTime deadline,
                   SteadyTime send_by, Done done, uint64_t* id);
  void CancelCall(uint64_t id);

  Status Register(const Memory& memory, bool read_only, SteadyTime deadline,
                  std::string* region_id);
  void Unregister(const std::string& region_id);

  // `hook` runs when the connection ends, on any thread; at once, and once only, if it has. If it
  // returns true, it runs again a moment later, on the connection's thread. Until Remove returns,
  // which must be before the connection is destroyed. It only stores or wakes: locks may be held.
  using EndHook = std::function<bool()>;
  uint64_t AddEndHook(EndHook hook);
  void RemoveEndHook(uint64_t id);

  // Ends it with `status`, unless it has ended. Safe from any thread, and under locks of the
  // caller.
  void End(Status status);

 private:
  struct Frame {
    uint64_t id;
    std::string bytes;
    size_t sent;
    File file;
    SteadyTime deadline;  // to begin with it
  };

  Connection(File socket, File wake) : socket_(std::move(socket)), wake_(std::move(wake)) {}
  // With mutex_: these five.
  Status Queue(uint64_t id, uint32_t field, std::string_view action, int file, SteadyTime deadline);
  void SendSome();
  void TakeLate(std::vector<Done>* late);
  Done TakeDone(uint64_t id);  // null: nobody waits any more
  bool RunEndHooks();          // whether one shall run again

  void Run();
  bool Receive();  // false: the socket has ended
  void TakeReply(std::string_view message, File file);
  // A reply for which nobody waits any more: `field` of the LocalReply is `result`.
  void DropReply(uint64_t field, std::string_view result);

  const File socket_;
  const File wake_;       // an eventfd: the thread shall look at out_
  std::string identity_;  // set by Hello
  std::atomic<bool> ended_{false};
  mutable std::mutex mutex_;
  std::condition_variable answered_;
  uint64_t next_id_ = 1;
  std::map<uint64_t, Done> waiting_;       // by id
  std::map<uint64_t, EndHook> end_hooks_;  // that shall run, or run again
  std::deque<Frame> out_;
  Status end_status_;

  // Used by the thread: the frame that it reads.
  std::string in_;
  size_t received_ = 0;
  File in_file_;
  std::thread thread_;
};

// A ring of a connection. Does not own its memory.
class OpenRing {
 public:
  // `memory` is zeroed, in the registered region `region_id` at `offset`, and aligned to
  // kRingAlignment. It outlives the ring and the connection.
  static Status Open(std::shared_ptr<Connection> connection, std::byte* memory,
                     const std::string& region_id, size_t offset, uint32_t slots,
                     uint32_t slot_bytes, SteadyTime deadline, std::unique_ptr<OpenRing>* ring);
  // Closes it; the server cancels what is unanswered.
  ~OpenRing();
  OpenRing(const OpenRing&) = delete;
  OpenRing& operator=(const OpenRing&) = delete;

  Ring& ring() { return ring_; }
  // Submits what is in ring().NextSlot(), and wakes the server if it sleeps.
  void Submit(uint64_t tag, uint64_t timeout_ns, size_t bytes);
  void Cancel(uint64_t tag);

 private:
  OpenRing(std::shared_ptr<Connection> connection, uint64_t number, File doorbell,
           std::byte* memory, uint32_t slots, uint32_t slot_bytes)
      : connection_(std::move(connection)),
        number_(number),
        doorbell_(std::move(doorbell)),
        ring_(memory, slots, slot_bytes) {}

  const std::shared_ptr<Connection> connection_;
  const uint64_t number_;
  const File doorbell_;
  Ring ring_;
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_CONNECTION_H_

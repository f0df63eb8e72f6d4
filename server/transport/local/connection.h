// One client on the local socket: its requests there, and what it has registered and opened.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_CONNECTION_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_CONNECTION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "flashcore/v1/local.pb.h"
#include "server/base/clock.h"
#include "server/engine/client_lease.h"
#include "server/memory/regions.h"
#include "server/memory/shared_memory.h"
#include "server/sharing/door.h"
#include "server/sharing/fair_jobs.h"
#include "server/transport/local/calls.h"
#include "server/transport/local/frame_socket.h"
#include "server/transport/local/ring_poller.h"
#include "server/transport/local/ring_session.h"
#include "server/transport/rpc/passed_files.h"

namespace flashcore::server::local {

// Used by one thread, that of the connections. When it has ended, requests in flight keep the rings
// and regions that they use.
class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  static constexpr int kMaxRings = 16;

  struct Options {
    int max_calls = 256;  // unanswered ones
    Nanoseconds hello_within = std::chrono::seconds(10);
  };

  using Action = absl::AnyInvocable<void(Connection*)>;
  // Runs `action` on the thread of the connections, in the client's turn, unless the connection has
  // ended by then. From any thread.
  using Post = absl::AnyInvocable<void(absl::string_view client, std::weak_ptr<Connection>,
                                       Action action) const>;

  // Used by all connections. It outlives them and their requests, as does all that it points to.
  struct Services {
    CallServices calls;
    const MethodTable* methods = nullptr;
    Exchange::Origin attend;  // of requests in rings
    PassedFiles* passed_files = nullptr;
    FairJobs* slow = nullptr;  // by client; for work that takes long, such as to map memory
    RingPoller* poller = nullptr;
    Post post;
  };

  Connection(const Services* services, const Options& options, FileDescriptor socket,
             std::string client, TimePoint now);
  ~Connection();

  int fd() const { return socket_.fd(); }
  bool ended() const { return ended_; }
  uint32_t events() const;  // for epoll
  // Memory of messages: of frames that have not completely arrived, and of calls that wait.
  size_t received_bytes() const { return socket_.received_bytes(); }
  // The client's identity; empty before Hello.
  const std::string& client() const { return identity_.name; }
  bool too_many_files() const { return socket_.too_many_files(); }  // came at once

  // One turn: what `events` say, and some of the requests that have arrived.
  void OnEvents(uint32_t events);
  // It may take more of the requests that have arrived: it needs another turn.
  bool has_more() const { return has_more_ && !ended_ && !Paused(); }
  void CheckTime(TimePoint now);
  Door::State StateAt(TimePoint now) const;
  TimePoint last_use() const { return last_use_; }
  bool HasDeadline() const { return !greeted_; }
  // Ends the connection after a last reply.
  void Break(const absl::Status& why,
             RefusedLocalConnection reason = RefusedLocalConnection::kProtocol);
  void End();

 private:
  void Advance();
  bool MayTakeOneMore();
  void Handle(absl::string_view frame);
  void Dispatch(const v1::LocalRequest& request);
  void Hello(uint64_t id, const v1::LocalHello& hello);
  void RegisterMemory(uint64_t id, const v1::LocalRegisterMemory& request);
  void Registered(uint64_t id, absl::StatusOr<Regions::Region> region);
  void AllocateDeviceMemory(uint64_t id, const v1::LocalAllocateDeviceMemory& request);
  void Allocated(uint64_t id, absl::StatusOr<DeviceMemory::Allocation> memory);
  void UnregisterMemory(uint64_t id, const v1::LocalUnregisterMemory& request);
  void OpenRing(uint64_t id, const v1::LocalOpenRing& request);
  absl::StatusOr<uint32_t> AddRing(const v1::LocalOpenRing& request);
  void CloseRing(uint64_t id, const v1::LocalCloseRing& request);
  void RingGone(uint32_t number);
  void Call(uint64_t id, const v1::LocalCall& call);
  void Answer(uint64_t id, absl::StatusOr<std::string> message);  // of a PendingCall
  void Cancel(uint64_t id, const v1::LocalCancel& cancel);

  // Posts actions for this connection. From any thread.
  struct Mailbox {
    const Post& post;
    std::string client;
    std::weak_ptr<Connection> connection;

    void operator()(Action action) const { post(client, connection, std::move(action)); }
  };
  Mailbox mailbox() { return {services_.post, identity_.name, weak_from_this()}; }

  bool Paused() const;  // takes no requests now
  void Reply(uint64_t id, const absl::Status& status) { Send(id, status, {}); }
  void Send(uint64_t id, const absl::Status& status, v1::LocalReply reply,
            FrameSocket::SentFile file = nullptr);
  // The client does not read.
  void EndUnread(CutOff why);
  // Its memory is for clients that share less; `flag` limits it.
  void EndForMemory(absl::string_view memory, absl::string_view flag);

  const Services& services_;
  RpcContext* const context_;
  const Options options_;
  const TimePoint began_;
  TimePoint last_use_;  // when it began, or was last answered
  FrameSocket socket_;
  TimePoint read_at_;  // when the frames that have arrived were read
  Identity identity_;
  bool greeted_ = false;
  bool ended_ = false;
  bool has_more_ = false;        // frames that have arrived, or parts of one
  bool called_ = false;          // in this turn
  bool waits_for_room_ = false;  // for calls of this client
  uint64_t alone_ = 0;           // the request that is answered before the next is taken; 0: none
  std::shared_ptr<Regions> regions_ = std::make_shared<Regions>();
  ClientLease lease_;                                                 // opened by HoldLease
  std::unordered_map<uint64_t, std::shared_ptr<PendingCall>> calls_;  // by request
  struct RingEntry {
    std::shared_ptr<RingSession> session;  // null: it is being closed
    uint64_t closing = 0;                  // the request that waits for its end
  };
  std::unordered_map<uint32_t, RingEntry> rings_;
  uint32_t last_ring_ = 0;
  FrameSocket::SentFile doorbell_;  // of all rings; opened with the first
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_CONNECTION_H_

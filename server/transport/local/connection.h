// One client on the local socket: its requests there, and what it has registered and opened.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_CONNECTION_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_CONNECTION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "flashcore/v1/local.pb.h"
#include "server/base/clock.h"
#include "server/engine/client_lease.h"
#include "server/memory/regions.h"
#include "server/transport/local/calls.h"
#include "server/transport/local/context.h"
#include "server/transport/local/frame_socket.h"
#include "server/transport/local/session.h"

namespace flashcore::server::local {

// Used by one thread, that of the connections. When it has ended, requests in flight keep the rings
// and regions that they use.
class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  static constexpr int kMaxRings = 16;

  Connection(Context* context, const UnaryCalls* unary, const Options& options,
             FileDescriptor socket, TimePoint now);
  ~Connection();

  int fd() const { return socket_.fd(); }
  bool ended() const { return ended_; }
  uint32_t events() const;  // for epoll

  void OnEvents(uint32_t events);
  // Goes on with requests that have arrived, once it may.
  void Advance();
  void CheckTime(TimePoint now);
  bool HasDeadline() const { return !greeted_ || socket_.unsent_bytes() > 0; }

 private:
  void Handle(absl::string_view frame);
  void Dispatch(const v1::LocalRequest& request);
  void Hello(uint64_t id, const v1::LocalHello& hello);
  void RegisterMemory(uint64_t id, const v1::LocalRegisterMemory& request);
  void Registered(uint64_t id, absl::StatusOr<Regions::Region> region);
  void UnregisterMemory(uint64_t id, const v1::LocalUnregisterMemory& request);
  void OpenRing(uint64_t id, const v1::LocalOpenRing& request);
  absl::StatusOr<uint32_t> AddRing(const v1::LocalOpenRing& request);
  void CloseRing(uint64_t id, const v1::LocalCloseRing& request);
  void RingGone(uint32_t number);
  void Call(uint64_t id, const v1::LocalCall& call);
  void Cancel(uint64_t id, const v1::LocalCancel& cancel);

  bool Paused() const;  // takes no requests now
  void Reply(uint64_t id, const absl::Status& status) { Send(id, status, {}); }
  void Send(uint64_t id, const absl::Status& status, v1::LocalReply reply, int file = -1);
  // Ends the connection after a last reply.
  void Break(const absl::Status& why);
  void End();

  Context* const context_;
  const UnaryCalls* const unary_;
  const Options& options_;
  const TimePoint began_;
  FrameSocket socket_;
  Identity identity_;
  bool greeted_ = false;
  bool ended_ = false;
  uint64_t registering_ = 0;  // the request that waits for its memory; 0: none
  std::shared_ptr<Regions> regions_ = std::make_shared<Regions>();
  ClientLease lease_;                                                 // opened by HoldLease
  std::unordered_map<uint64_t, std::shared_ptr<PendingCall>> calls_;  // by request
  struct RingEntry {
    std::shared_ptr<Session> session;  // null: it is being closed
    uint64_t closing = 0;              // the request that waits for its end
  };
  std::unordered_map<uint32_t, RingEntry> rings_;
  uint32_t last_ring_ = 0;
  FileDescriptor doorbell_;  // of all rings; opened with the first
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_CONNECTION_H_

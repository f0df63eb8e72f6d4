// Bounds what the client of a gRPC connection begins, before gRPC 1.51 parses it.
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_INFLOW_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_INFLOW_H_

#include <sys/epoll.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/access/client_connections.h"
#include "server/base/mutex.h"
#include "server/transport/grpc/guard/frame_counter.h"

namespace flashcore::server {

// The resets of one client (door.h), on all its connections. Thread-safe.
class ClientInflow {
 public:
  explicit ClientInflow(uint64_t max_resets) : max_resets_(max_resets) {}
  // Its clients have reset calls. False: with those not forgiven they are too many, and do not
  // count.
  bool AddResets(uint64_t calls);
  void ForgiveResets(uint64_t calls);  // no more than there are
  uint64_t resets() const { return resets_; }
  uint64_t max_resets() const { return max_resets_; }

  void AddCutOff() { ++cut_offs_; }  // one of its connections was
  uint64_t TakeCutOffs() { return cut_offs_.exchange(0); }

 private:
  const uint64_t max_resets_;
  std::atomic<uint64_t> resets_{0};  // not forgiven
  std::atomic<uint64_t> cut_offs_{0};
};

// gRPC 1.51 reads and parses as long as a client sends, and only then runs the calls that have
// begun, or ends those that the client has reset meanwhile. It keeps all of them until then, which
// none of its limits counts, and other connections that its thread has to serve wait as long. It
// also keeps headers without a limit.
//
// So its reads pass through here: inflow.cc defines recvmsg, and SSL_read for connections with TLS.
// gRPC calls these instead of those of the C library and of OpenSSL, which they call in turn. They
// count the frames that were read. If a connection exceeds its limits, gRPC gets none of them, and
// is told that the client has reset the connection.
//
// Connections are read in turns: after some bytes gRPC is told that there are no more for now, and
// epoll, which it then waits for, tells it at once of this connection again, behind the others.
// For this inflow.cc defines epoll_ctl, from which it learns by which epoll gRPC waits.
//
// Over a Unix socket a client can pass files, which no client of gRPC does. The kernel drops them
// while gRPC reads; InterruptedWaits (passed_files.h) keeps that short, and the connection is cut
// off.
//
// One gRPC connection, by gRPC's descriptor. Lasts as long as the process, since gRPC may read from
// a descriptor at any time. Thread-safe.
class Inflow {
 public:
  struct Limits {
    // Open at a time, as gRPC tells the client. gRPC itself enforces it only after the client has
    // acknowledged it.
    uint64_t streams = 256;
    // Calls that have begun and not ended. A client that keeps to `streams` has more of them for a
    // moment, when it has reset all its calls, and begun others, before the server ended the first.
    uint64_t calls = 1024;
    // The number that all connections together may have beyond their `streams`.
    uint64_t excess_of_all = 1600;
    // Frames since gRPC last had read all that the client had sent, less one for each 256 bytes. A
    // client that waits for answers, or for room to send more, has no more than some hundred.
    uint64_t frames = 16384;
    // Those of type PING. gRPC takes 40 us for one that is too many, other frames 0.3 us.
    uint64_t pings = 256;
    // Size of the longest headers of a call, in frames.
    uint64_t header_bytes = 64 << 10;
    size_t turn_bytes = 256 << 10;
  };

  // Null if the descriptor is too large.
  static Inflow* Of(int descriptor);
  // Sets the number of calls beyond `streams` over all connections. Later calls add to it, so
  // refresh it regularly.
  static void SetExcessOfAll(uint64_t calls);

  // gRPC gets a new connection. `calls` counts the end of its calls.
  void Begin(int descriptor, bool tls, std::shared_ptr<const ClientConnection> calls,
             std::shared_ptr<ClientInflow> client, const Limits& limits)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The client is gone. gRPC does not get the rest of what it has sent, and could not answer.
  void HangUp() { hung_up_ = true; }

  // gRPC wants to read while it takes the connection over: not now, but once Resume is called.
  void Postpone() ABSL_LOCKS_EXCLUDED(mutex_);
  void Resume() ABSL_LOCKS_EXCLUDED(mutex_);

  // gRPC waits by `epoll` until it can read.
  void WaitBy(int epoll, const epoll_event& event) ABSL_LOCKS_EXCLUDED(mutex_);
  // How many bytes gRPC may read now, of those that are still encrypted if there is TLS. 0: the
  // turn is over, and the next one begins.
  size_t TurnBytes() ABSL_LOCKS_EXCLUDED(mutex_);
  // It has read so many, 0 if there were none. `all`: there were no more for now.
  void HasRead(size_t bytes, bool all) ABSL_LOCKS_EXCLUDED(mutex_);
  // The client has sent these bytes, without TLS. False: the connection is cut off.
  bool Receive(absl::Span<const absl::string_view> pieces) ABSL_LOCKS_EXCLUDED(mutex_);
  // The client has passed a file.
  void CutOff() ABSL_LOCKS_EXCLUDED(mutex_);

  bool tls() const { return tls_; }
  bool is_unix() const { return is_unix_; }
  bool hung_up() const { return hung_up_; }
  bool cut_off() const { return cut_off_; }

  // Calls that have begun and not ended, as far as is known: gRPC ends some without a word, those
  // that it answers itself, and those that were reset before they had a message.
  uint64_t calls() const ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t excess() const ABSL_LOCKS_EXCLUDED(mutex_);  // beyond `streams`
  // Up to so many of them count as ended.
  void ForgiveCalls(uint64_t calls) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  uint64_t Calls() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t Excess() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CutOffNow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes epoll report that there is something to read, again. False: gRPC does not wait by epoll.
  bool TellAgain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool ExceedsLimits() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::atomic<bool> tls_{false};
  std::atomic<bool> is_unix_{false};
  std::atomic<bool> hung_up_{false};
  std::atomic<bool> cut_off_{false};
  mutable Mutex mutex_;
  int descriptor_ ABSL_GUARDED_BY(mutex_) = -1;
  std::shared_ptr<const ClientConnection> ended_calls_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<ClientInflow> client_ ABSL_GUARDED_BY(mutex_);
  Limits limits_ ABSL_GUARDED_BY(mutex_);
  int epoll_ ABSL_GUARDED_BY(mutex_) = -1;  // -1: not known, and turns have no end
  epoll_event event_ ABSL_GUARDED_BY(mutex_) = {};
  bool postponed_ ABSL_GUARDED_BY(mutex_) = false;
  size_t turn_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // read in this turn
  FrameCounter frames_ ABSL_GUARDED_BY(mutex_);
  FrameCounter last_all_read_ ABSL_GUARDED_BY(mutex_);  // frames_ before gRPC read the last bytes
  uint64_t forgiven_calls_ ABSL_GUARDED_BY(mutex_) = 0;
};

// While it exists, gRPC takes over `inflow` on this thread: a TLS connection that it makes is that
// one, and it reads nothing of it on this thread.
class InflowOfThread {
 public:
  explicit InflowOfThread(Inflow* inflow);
  ~InflowOfThread();
  InflowOfThread(const InflowOfThread&) = delete;
  InflowOfThread& operator=(const InflowOfThread&) = delete;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_INFLOW_H_

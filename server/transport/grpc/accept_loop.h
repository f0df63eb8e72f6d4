// Accepts connections under limits and hands them to gRPC, which has no such limits in 1.51 and
// stops accepting for good when files run out (CVE-2023-4785).
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_ACCEPT_LOOP_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_ACCEPT_LOOP_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/base/mutex.h"
#include "server/base/socket.h"
#include "server/telemetry/metrics.h"
#include "server/transport/access/client_connections.h"
#include "server/transport/access/peer_user.h"
#include "server/transport/connection_count.h"

namespace flashcore::server {

// A connection is held until it has begun HTTP/2 or TLS. So connections that send nothing cost gRPC
// nothing, and they make room for new ones when a limit is reached. Owns one thread.
//
// gRPC says on which connection a call came only by a name. Without TLS that is the number of the
// descriptor that it got, and ClientConnections has the user at the other end. A connection with
// TLS has an address, which another connection may have soon after, so no user goes with it.
//
// The loop keeps a second descriptor of each connection, to learn that gRPC has closed it: gRPC
// shuts a socket down before it closes its own descriptor.
//
// HTTP/2 flow control makes gRPC send something for each window of DATA that it receives. So a
// connection that receives much more than a window, and sends nothing, gets a flood of frames that
// flow control does not hold back, such as CONTINUATION, which gRPC 1.51 keeps in memory. The loop
// cuts it off.
class AcceptLoop {
 public:
  struct Options {
    int max_connections_per_host = 256;  // per IPv4 address, IPv6 /64 network, or local user
    std::chrono::milliseconds first_bytes_within{10'000};
    // Most bytes that gRPC may receive while it sends nothing, on one TCP connection and on all
    // together.
    uint64_t max_unanswered_bytes = uint64_t{64} << 20;
    uint64_t max_unanswered_bytes_of_all = uint64_t{256} << 20;
    // A listener will never accept again. On the loop's thread.
    std::function<void(const std::string& address)> on_dead;
  };
  // Takes over a connection. Runs on a thread of its own, because gRPC may use it to read what the
  // client sends, for as long as the client keeps sending.
  using Serve = std::function<void(FileDescriptor connection)>;

  struct Listener {
    std::string address;  // for messages
    bool tls = false;
    FileDescriptor socket;
    Serve serve;
  };

  // Starts to accept. All but the first two outlive this.
  AcceptLoop(const Options& options, std::vector<Listener> listeners, ConnectionCount* count,
             ClientConnections* by_client, Metrics* metrics, const Clock* clock);
  // Closes the listening sockets and the connections that gRPC has not completely taken over.
  ~AcceptLoop();
  AcceptLoop(const AcceptLoop&) = delete;
  AcceptLoop& operator=(const AcceptLoop&) = delete;

 private:
  struct Connection {
    FileDescriptor socket;
    Peer peer;
    std::string host;
    std::string name;     // in ClientConnections, once it is handed over
    uint64_t number = 0;  // as above
    const Listener* listener = nullptr;
    TimePoint deadline;                // of the first bytes
    std::list<int>::iterator waiting;  // in silent_; its end once the connection is handed over
    TcpBytes when_last_sent;           // the connection's bytes when gRPC was last seen to send
    uint64_t unanswered_bytes = 0;     // received since then
  };

  void Loop();
  TimePoint NextLook() const;  // at connections
  void AcceptAll(const Listener& listener);
  void Admit(const Listener& listener, FileDescriptor socket, const SocketAddress& peer);
  // False if `host` may not open another connection even without those that have sent nothing.
  bool MakeRoom(const std::string& host);
  bool CloseOldestSilent(const std::string* host);  // null: of any host
  void OnEvent(int socket, uint32_t events);
  void HandOver(Connection* connection);
  void StartServing(const Serve& serve, FileDescriptor connection);
  void CloseExpired();
  void CutFloods();
  void Cut(Connection* connection);
  void Close(int socket);

  const Options options_;
  std::vector<Listener> listeners_;
  std::unordered_map<int, const Listener*> listener_of_;  // by socket
  ConnectionCount* const count_;
  ClientConnections* const by_client_;
  Metrics* const metrics_;
  const Clock* const clock_;
  const std::unique_ptr<Timer> timer_;
  const FileDescriptor epoll_;
  const FileDescriptor stop_;  // an eventfd

  // Of the loop's thread.
  TimePoint next_flood_check_;
  Acceptor acceptor_;
  const PeerUsers users_;
  std::unordered_map<int, Connection> connections_;  // by socket
  std::list<int> silent_;                            // sockets that have sent nothing, oldest first
  std::unordered_map<std::string, int> per_host_;

  Mutex mutex_;
  int serving_ ABSL_GUARDED_BY(mutex_) = 0;  // threads that run a Serve
  CondVar served_;
  std::thread thread_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_ACCEPT_LOOP_H_

// Accepts connections under limits and hands them to gRPC, which has no such limits in 1.51 and
// stops accepting for good when files run out (CVE-2023-4785).
#ifndef FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_ACCEPT_LOOP_H_
#define FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_ACCEPT_LOOP_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "server/access/client_connections.h"
#include "server/access/peer_user.h"
#include "server/base/clock.h"
#include "server/base/socket.h"
#include "server/sharing/door.h"
#include "server/telemetry/metrics.h"
#include "server/transport/grpc/guard/inflow.h"
#include "server/transport/rpc/passed_files.h"

namespace flashcore::server {

// A connection is held until it has begun HTTP/2 or TLS. So connections that send nothing cost gRPC
// nothing. When a limit is reached, connections make room for new ones (door.h): silent ones, idle
// ones, which gRPC clients open again with their next call, and busy ones of who has most. Owns one
// thread.
//
// gRPC says on which connection a call came only by a name. Without TLS that is the number of the
// descriptor that it got, and ClientConnections has the user at the other end. A connection with
// TLS has an address, which another connection may have soon after, so no user goes with it.
//
// The loop keeps a second descriptor of each connection, to learn that gRPC has closed it: gRPC
// shuts a socket down before it closes its own descriptor. PassedFiles closes that of a Unix
// socket and empties the socket first, so that gRPC never waits for files of its client.
//
// Bytes that gRPC then reads pass through Inflow, which cuts floods off. Then no new connection of
// the same client is let in for a while.
class AcceptLoop {
 public:
  struct Options {
    Shares::Limits connections{/*all=*/1024, /*one=*/256};  // of TCP, and of Unix sockets
    std::chrono::milliseconds first_bytes_within{10'000};
    // Limits of each connection; see Inflow.
    Inflow::Limits inflow;
    // Resets allowed per client (per connection for a proxy) each half second. Also the limit for
    // one connection until all its bytes are read.
    uint64_t resets = 1024;
    // gRPC's descriptors are not below this, so that no other file has the number of one: see
    // Inflow. More than there are other files and connections. Less if fewer files may be open.
    int first_descriptor = 1280;
    // Whether many clients may come from there, so that none of them is banned for a flood of
    // another. Null: from nowhere.
    std::function<bool(const Peer& peer)> is_proxy;
    // A listener will never accept again. On the loop's thread.
    std::function<void(const std::string& address)> on_dead;
  };
  // Takes over a connection, on the loop's thread. gRPC reads the bytes that arrive meanwhile
  // later, on a thread of its own (InflowOfThread): a client that keeps sending cannot hold up the
  // loop.
  using Serve = std::function<void(FileDescriptor connection)>;

  struct Listener {
    std::string address;  // for messages
    bool tls = false;
    FileDescriptor socket;
    Serve serve;
  };

  // Starts to accept. All but the first two outlive this.
  AcceptLoop(const Options& options, std::vector<Listener> listeners, ClientConnections* by_client,
             PassedFiles* passed_files, Metrics* metrics, const Clock* clock);
  // Closes the listening sockets, and shuts all connections down. Calls that gRPC has not answered
  // then end with their connection, which clients see as UNAVAILABLE. gRPC's own shutdown would
  // answer it with CANCELLED, which no client repeats.
  ~AcceptLoop();
  AcceptLoop(const AcceptLoop&) = delete;
  AcceptLoop& operator=(const AcceptLoop&) = delete;

 private:
  // Counts the connections of one client at a door. Each connection of a proxy has a Client of its
  // own.
  struct Client {
    Door* door = nullptr;
    std::string name;
    bool of_proxy = false;
    std::shared_ptr<ClientInflow> inflow;
  };
  struct Connection {
    FileDescriptor socket;
    Peer peer;
    Door* door = nullptr;
    Door::Client* client = nullptr;  // at the door
    bool of_proxy = false;
    std::shared_ptr<ClientConnection> calls;  // once it is handed over
    const Listener* listener = nullptr;
    TimePoint began;                   // when it came, then when it was handed over
    std::list<int>::iterator waiting;  // in silent_; its end once the connection is handed over
    Inflow* inflow = nullptr;          // once it is handed over, as is
    Client* counts_for = nullptr;
  };

  void Loop();
  TimePoint NextLook() const;  // at connections
  TimePoint DeadlineOf(const Connection& silent) const {
    return silent.began + options_.first_bytes_within;
  }
  void AcceptAll(const Listener& listener);
  void Admit(const Listener& listener, FileDescriptor socket, const SocketAddress& peer);
  // False if there is none for a new connection of `client`, which is counted already.
  bool MakeRoom(const Door& door, const Door::Client& client);
  Door::Connection AtDoor(const Connection& connection, TimePoint now) const;
  void OnEvent(int socket, uint32_t events);
  // Hands over, or closes, a connection that has sent what gRPC needs. False: it has not.
  bool HandOverIfBegun(Connection* connection);
  void HandOver(Connection* connection);
  void CloseExpired();
  void CountCalls();
  Client* ClientOf(const Connection& connection);
  void BanWhoFlooded(Client* client);
  void Close(int socket);
  // Closes a connection that is, or would be, at the door.
  void Drop(const Door& door, const std::string& client, FileDescriptor socket);

  const Options options_;
  std::vector<Listener> listeners_;
  std::unordered_map<int, const Listener*> listener_of_;  // by socket
  ClientConnections* const by_client_;
  PassedFiles* const passed_files_;
  Metrics* const metrics_;
  const Clock* const clock_;
  const std::unique_ptr<Timer> timer_;
  const int first_descriptor_;
  const FileDescriptor epoll_;
  const FileDescriptor stop_;  // an eventfd

  // Used by the loop's thread.
  Door tcp_, unix_;
  TimePoint last_count_;  // of calls
  TimePoint next_count_;
  Acceptor acceptor_;
  const PeerUsers users_;
  std::unordered_map<int, Connection> connections_;  // by socket
  std::list<int> silent_;                            // sockets that have sent nothing, oldest first
  std::vector<Inflow*> ended_;                       // connections with calls that have not
  // Clients of the connections that gRPC may still read, and those whose resets are not forgiven.
  std::map<std::string, Client> clients_;
  uint64_t proxy_connections_ = 0;

  std::thread thread_;  // last: it uses the others
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_GRPC_GUARD_ACCEPT_LOOP_H_

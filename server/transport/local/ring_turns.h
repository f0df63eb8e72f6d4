// In which order rings hand in their requests.
#ifndef FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_TURNS_H_
#define FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_TURNS_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "server/transport/local/ring_session.h"

namespace flashcore::server::local {

// Clients take turns, and the rings of a client within its turns: however many it has, one of them
// hands in some requests. Not thread-safe.
class RingTurns {
 public:
  void Add(std::shared_ptr<RingSession> session);
  void Remove(const std::shared_ptr<RingSession>& session);
  bool empty() const { return clients_.empty(); }

  // One turn of each client. Returns whether there was a request.
  bool Poll();
  // RingSession::Sleep of all. Returns whether there is a request that no doorbell tells of: do not
  // sleep.
  bool Sleep();

 private:
  struct Client {
    std::string name;
    std::vector<std::shared_ptr<RingSession>> sessions;  // at least one
    size_t next = 0;                                     // of them, the one whose turn is next
  };

  std::vector<Client>::iterator Find(const RingSession& session);
  static bool PollOne(Client* client);

  std::vector<Client> clients_;
};

}  // namespace flashcore::server::local

#endif  // FLASHCORE_SERVER_TRANSPORT_LOCAL_RING_TURNS_H_

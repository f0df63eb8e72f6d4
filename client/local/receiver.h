// Receives answers on a thread of its own, for event loops. Internal to the clients.
#ifndef FLASHCORE_CLIENT_LOCAL_RECEIVER_H_
#define FLASHCORE_CLIENT_LOCAL_RECEIVER_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "client/local/connection.h"
#include "client/local/ring.h"
#include "client/local/status.h"

namespace flashcore::client::local {

// Copies the next answer of the ring, so that its slot is free. False if there is none. A malformed
// one ends the connection.
bool TakeAnswer(Ring& ring, Connection& connection, uint64_t* tag, std::vector<uint8_t>* response);

class Receiver {
 public:
  // The thread spins for `spin` before it sleeps. Both pointers outlive the receiver.
  static Status Start(Connection* connection, Ring* ring, std::chrono::microseconds spin,
                      std::unique_ptr<Receiver>* receiver);
  // Waits for the end of the connection, which the caller has caused.
  ~Receiver();
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  // An eventfd: readable while Take has an answer, and once the connection has ended.
  int fd() const { return event_.get(); }

  // The next answer, in the order of arrival. False if there is none.
  bool Take(uint64_t* tag, std::vector<uint8_t>* response);

 private:
  Receiver(Connection* connection, Ring* ring, std::chrono::microseconds spin, File event)
      : connection_(connection), ring_(ring), spin_(spin), event_(std::move(event)) {}
  void Run();
  void Signal();

  Connection* const connection_;
  Ring* const ring_;
  const std::chrono::microseconds spin_;
  const File event_;
  std::mutex mutex_;  // of answers_ and ended_
  std::deque<std::pair<uint64_t, std::vector<uint8_t>>> answers_;
  bool ended_ = false;  // no more answers come
  std::thread thread_;  // uses the other members
};

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_RECEIVER_H_

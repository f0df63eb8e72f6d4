#include "client/local/receiver.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "proto/wire/start_thread.h"

namespace flashcore::client::local {

bool TakeAnswer(Ring& ring, Connection& connection, uint64_t* tag, std::vector<uint8_t>* response) {
  Ring::Answer answer;
  if (!ring.Poll(&answer)) return false;
  if (answer.malformed) {
    connection.End({kInternal, "reply: malformed completion", ""});
    return false;
  }
  const auto* const data = reinterpret_cast<const uint8_t*>(answer.data);
  response->assign(data, data + answer.bytes);
  *tag = answer.tag;
  ring.Pop();
  return true;
}

Status Receiver::Start(Connection* connection, Ring* ring, std::chrono::microseconds spin,
                       std::unique_ptr<Receiver>* receiver) {
  File event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (event.get() < 0) return SystemError(kResourceExhausted, "eventfd", errno);
  receiver->reset(new Receiver(connection, ring, spin, std::move(event)));
  Receiver* const running = receiver->get();
  const int error = StartThread(&running->thread_, [running] { running->Run(); });
  if (error == 0) return {};
  receiver->reset();
  return {kResourceExhausted, NoThreadMessage(error), ""};
}

Receiver::~Receiver() {
  if (thread_.joinable()) thread_.join();
}

void Receiver::Run() {
  bool ended = false;
  while (!ended) {
    ring_->Wait(connection_->ended(), std::chrono::steady_clock::now() + spin_, SteadyTime::max());
    ended = connection_->ended();  // before the last look at the ring
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool was_empty = answers_.empty();
    while (true) {
      std::pair<uint64_t, std::vector<uint8_t>> answer;
      if (!TakeAnswer(*ring_, *connection_, &answer.first, &answer.second)) break;
      answers_.push_back(std::move(answer));
    }
    ended_ = ended;
    if (ended || (was_empty && !answers_.empty())) Signal();
  }
}

void Receiver::Signal() {
  const uint64_t one = 1;
  while (write(event_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

bool Receiver::Take(uint64_t* tag, std::vector<uint8_t>* response) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (answers_.empty()) return false;
  *tag = answers_.front().first;
  *response = std::move(answers_.front().second);
  answers_.pop_front();
  uint64_t count = 0;
  if (answers_.empty() && !ended_) {
    while (read(event_.get(), &count, sizeof(count)) < 0 && errno == EINTR) {
    }
  }
  return true;
}

}  // namespace flashcore::client::local

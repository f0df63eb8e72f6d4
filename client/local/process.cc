#include "client/local/process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace flashcore::client::local {
namespace {

// Not process ids: that of a parent may come again in its children, and in another namespace.
std::atomic<uint64_t> forks{0};

uint64_t Forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);  // it fails without memory only
  return forks.load(std::memory_order_relaxed);
}

}  // namespace

Process::Process() : forks_(Forks()), pid_(getpid()) {}

bool Process::Here() const { return forks.load(std::memory_order_relaxed) == forks_; }

std::string Process::Refusal() const {
  return "this client belongs to process " + std::to_string(pid_) + ", from which process " +
         std::to_string(getpid()) + " was forked: connect after the fork";
}

}  // namespace flashcore::client::local

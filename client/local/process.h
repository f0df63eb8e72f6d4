// The process that owns a client. fork() leaves the child a copy of it, without its threads and
// with locks that nobody opens, on the sockets and the shared memory of the parent. Needs nothing
// but the C++ runtime. Internal to the clients.
#ifndef FLASHCORE_CLIENT_LOCAL_PROCESS_H_
#define FLASHCORE_CLIENT_LOCAL_PROCESS_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace flashcore::client::local {

// The process that makes this object. Objects that belong to it ask Here() before they take a lock.
class Process {
 public:
  Process();

  // False in a child that was forked later, and in the child's children. Costs one load.
  bool Here() const;
  pid_t pid() const { return pid_; }
  // Why a client of it refuses a call of another process.
  std::string Refusal() const;

 private:
  const uint64_t forks_;  // before this object was made, in its line of processes
  const pid_t pid_;
};

// Owns `object`, which a child of this process does not destroy: its destructor would use what is
// the parent's, or take a lock, which that of an absl::Mutex does, too.
template <typename T>
std::shared_ptr<T> OwnHere(T* object) {
  return {object, [process = Process()](T* owned) {
            if (process.Here()) delete owned;
          }};
}

}  // namespace flashcore::client::local

#endif  // FLASHCORE_CLIENT_LOCAL_PROCESS_H_

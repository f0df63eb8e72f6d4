// Starts a thread, where std::thread ends a program that does not expect an exception.
#ifndef FLASHCORE_PROTO_WIRE_START_THREAD_H_
#define FLASHCORE_PROTO_WIRE_START_THREAD_H_

#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace flashcore {

// Returns 0, or the error if a limit leaves no room for another thread.
template <typename Body>
int StartThread(std::thread* thread, Body body) {
  try {
    *thread = std::thread(std::move(body));
    return 0;
  } catch (const std::system_error& error) {
    return error.code().value();
  }
}

// For the error of StartThread.
inline std::string NoThreadMessage(int error) {
  return std::string("cannot make a thread: ") + std::strerror(error) +
         "; the limits are pids.max of the control group, and ulimit -u, -s and -v";
}

}  // namespace flashcore

#endif  // FLASHCORE_PROTO_WIRE_START_THREAD_H_

// Threads that are made at the start, for whoever makes a thread later.
//
// No limit on threads then ends a server that has started. gRPC makes threads while it serves, and
// where it cannot, it leaves work to a thread that does not exist, and its shutdown waits for it.
#ifndef FLASHCORE_SERVER_BASE_THREAD_RESERVE_H_
#define FLASHCORE_SERVER_BASE_THREAD_RESERVE_H_

#include "absl/status/status.h"

namespace flashcore::server {

// Makes `threads` threads, which wait. From then on, pthread_create of anybody in this process
// takes one of them, as long as there are some: thread_reserve.cc defines it, for std::thread and
// the libraries too. A detached thread comes back when it is done. RESOURCE_EXHAUSTED if there is
// no room for so many besides this thread: it names the limit and its size. Not in a build with a
// sanitizer, which has a pthread_create of its own; there it does nothing. Call it once.
absl::Status ReserveThreads(int threads);

// Threads that wait in the reserve.
int ReservedThreads();

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_THREAD_RESERVE_H_

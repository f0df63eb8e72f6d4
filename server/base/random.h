// Random bytes that nobody can guess.
#ifndef FLASHCORE_SERVER_BASE_RANDOM_H_
#define FLASHCORE_SERVER_BASE_RANDOM_H_

#include <sys/random.h>

#include <cstddef>
#include <cstdlib>

namespace flashcore::server {

// From the operating system. At most 256 bytes. Without them nothing is secret, so the process ends
// if there are none.
inline void FillRandom(void* bytes, size_t count) {
  if (getrandom(bytes, count, 0) != static_cast<ssize_t>(count)) std::abort();
}

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_BASE_RANDOM_H_

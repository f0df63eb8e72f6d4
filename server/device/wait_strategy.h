// How a thread waits for a GPU.
#ifndef FLASHCORE_SERVER_DEVICE_WAIT_STRATEGY_H_
#define FLASHCORE_SERVER_DEVICE_WAIT_STRATEGY_H_

#include <cstdint>

namespace flashcore::server {

enum class WaitStrategy : uint8_t {
  kSpin,   // asks again and again: the soonest to notice, and a core is busy all the while
  kYield,  // likewise, but lets other threads have the core in between
  kBlock,  // sleeps until the driver wakes it
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_DEVICE_WAIT_STRATEGY_H_

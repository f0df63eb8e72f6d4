// The launch of one operation, executed in parts of bounded time.
#ifndef FLASHCORE_SERVER_KV_CUT_LAUNCH_H_
#define FLASHCORE_SERVER_KV_CUT_LAUNCH_H_

#include <cstddef>
#include <vector>

#include "kernels/plan_cut.h"
#include "server/base/clock.h"
#include "server/kv/launch.h"
#include "server/kv/operation.h"

namespace flashcore::server {

// The launch is one transaction: the SequenceStore begins it before the first part and ends it
// after the last one, or after the one at which it stops. Between parts its operation waits in the
// Batcher; pages stay in place. Not thread-safe: whoever has the operation uses it.
struct CutLaunch {
  // Call it after each part that was executed. Sets launch.part to the next one, and the
  // operation's `work` to what is left; false after the last one. Adds up the operation's times.
  bool Next();

  Launch launch;
  std::vector<kernels::BatchPart> parts;
  size_t done = 0;           // parts
  Nanoseconds part_work{0};  // estimated time of a part
  PhaseTimes times;          // of the parts so far
  TimePoint queued{};        // when the operation returned to the queue
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_KV_CUT_LAUNCH_H_

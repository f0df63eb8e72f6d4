// The fixture of the Batcher's tests.
#ifndef FLASHCORE_TESTS_ENGINE_BATCHER_FIXTURE_H_
#define FLASHCORE_TESTS_ENGINE_BATCHER_FIXTURE_H_

#include <chrono>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/engine/batcher.h"
#include "server/kv/operation.h"
#include "server/request/order.h"
#include "tests/engine/fakes.h"

namespace flashcore::server {

using Operations = std::vector<AttendOperation*>;

inline constexpr bool kReads = false;
inline constexpr bool kAppends = true;

// One request per batch, so that the order of the batches shows the turns.
inline constexpr Batcher::Options kOneByOne{/*max_queue_requests=*/1000, /*max_batch_requests=*/1};

inline constexpr Batcher::Options kWithDelay{/*max_queue_requests=*/10, /*max_batch_requests=*/3,
                                             /*max_batch_tokens=*/10,
                                             /*max_queue_delay=*/std::chrono::milliseconds(5)};

class BatcherTest : public ::testing::Test {
 protected:
  // The work of one row of Make, of head_dim 64.
  static constexpr Nanoseconds kRowWork = std::chrono::microseconds(32);

  // An operation of `rows` tokens that is not queued yet.
  AttendOperation* Make(const std::string& client, uint32_t rows = 1, uint32_t head_dim = 64) {
    operations_.push_back(std::make_unique<AttendOperation>());
    operations_.back()->request = testing::MakeRequest(rows, 62500, 2, 1, head_dim);
    operations_.back()->identity.name = client;
    return operations_.back().get();
  }
  AttendOperation* Add(Batcher* batcher, AttendOperation* operation) {
    AttendOperation* displaced = nullptr;
    EXPECT_EQ(batcher->Enqueue(operation, &displaced), absl::OkStatus());
    EXPECT_EQ(displaced, nullptr);
    return operation;
  }
  AttendOperation* Add(Batcher* batcher, const std::string& client, uint32_t rows = 1,
                       uint32_t head_dim = 64) {
    return Add(batcher, Make(client, rows, head_dim));
  }
  AttendOperation* Add(Batcher* batcher, const std::string& client, std::vector<OrderedUse> order) {
    AttendOperation* operation = Make(client);
    operation->order = std::move(order);
    return Add(batcher, operation);
  }
  // The batch that can be taken now, without waiting; empty if none.
  Batch Take(Batcher* batcher) {
    Batch batch;
    MutexLock lock(&batcher->mutex_);
    batcher->TryTake(&batch, &retry_);
    return batch;
  }
  Operations TakeOperations(Batcher* batcher) { return Take(batcher).operations; }

  testing::FakeClock clock_;
  TimePoint retry_;  // of the last Take
  std::list<std::unique_ptr<AttendOperation>> operations_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_TESTS_ENGINE_BATCHER_FIXTURE_H_

// Shares of the host's memory.
#include "server/memory/budgets.h"

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

int64_t Total(const HostMemory& memory, const MemoryUse& use, const Budgets& budgets) {
  return BytesBesideKv(memory, use, budgets) + budgets.kv;
}

TEST(BudgetsTest, ALargeMachineHasTheDefaults) {
  const Budgets budgets = DivideMemory({65536 * kMiB, false}, {}, {});
  EXPECT_EQ(budgets.message, 64 * kMiB);
  EXPECT_EQ(budgets.staging, 1024 * kMiB);
  EXPECT_EQ(budgets.transport, 256 * kMiB);
  EXPECT_EQ(budgets.unsent_replies, 64 * kMiB);
  EXPECT_EQ(budgets.sequence_metadata, 256 * kMiB);
  EXPECT_EQ(budgets.shared, 1024 * kMiB);
  EXPECT_EQ(budgets.kv, 16384 * kMiB) << "a quarter";
}

TEST(BudgetsTest, AllFitInAContainer) {
  for (const bool local_socket : {false, true}) {
    for (const int devices : {1, 2, 8}) {
      for (int64_t size : {512, 700, 1024, 4096, 65536}) {
        const HostMemory memory{size * kMiB, true};
        const MemoryUse use{devices, devices > 1, local_socket};
        const Budgets budgets = DivideMemory(memory, use, {});
        if (devices == 1) {
          EXPECT_EQ(Total(memory, use, budgets), memory.bytes) << size;
        }
        EXPECT_GE(budgets.kv, kMinKvBytes);
        EXPECT_GE(budgets.transport, 2 * budgets.message);
        EXPECT_GE(budgets.staging, 2 * budgets.message) << "a request and its results";
      }
    }
  }
}

TEST(BudgetsTest, MostOfASmallContainerIsForKv) {
  EXPECT_EQ(DivideMemory({512 * kMiB, true}, {}, {}).kv, 256 * kMiB);
  EXPECT_EQ(DivideMemory({1024 * kMiB, true}, {}, {}).kv, 576 * kMiB);
}

TEST(BudgetsTest, WhatIsGivenStaysAndTheRestMakesRoom) {
  const HostMemory memory{2048 * kMiB, true};
  Budgets given;
  given.staging = 512 * kMiB;
  given.message = 128 * kMiB;
  const Budgets budgets = DivideMemory(memory, {}, given);
  EXPECT_EQ(budgets.staging, 512 * kMiB);
  EXPECT_EQ(budgets.message, 128 * kMiB);
  EXPECT_EQ(budgets.transport, 256 * kMiB);
  EXPECT_EQ(Total(memory, {}, budgets), memory.bytes);
  given.kv = 4096 * kMiB;
  EXPECT_EQ(DivideMemory(memory, {}, given).kv, 4096 * kMiB);
  given.kv = 0;
  given.staging = memory.bytes;
  EXPECT_EQ(DivideMemory(memory, {}, given).kv, kMinKvBytes);
}

TEST(BudgetsTest, ATinyContainerHasBudgetsAboveZero) {
  const Budgets budgets = DivideMemory({1, true}, {8, true, true}, {});
  for (const int64_t bytes : {budgets.message, budgets.staging, budgets.transport,
                              budgets.unsent_replies, budgets.sequence_metadata, budgets.shared}) {
    EXPECT_GE(bytes, kMiB);
  }
  EXPECT_EQ(budgets.kv, kMinKvBytes);
}

}  // namespace
}  // namespace flashcore::server

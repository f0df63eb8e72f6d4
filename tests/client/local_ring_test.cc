#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/local/memory.h"
#include "client/local/ring.h"
#include "gtest/gtest.h"
#include "proto/wire/ring.h"
#include "tests/base/test_seed.h"

namespace flashcore::client::local {
namespace {

using wire::CompletionSlot;
using wire::RingBytes;
using wire::RingHeader;
using wire::SubmissionSlot;

constexpr uint32_t kSlots = 4;
constexpr uint32_t kSlotBytes = 256;

// A ring and its memory; the server's side by hand.
class RingTest : public testing::Test {
 protected:
  void Answer(uint64_t tag, const std::string& message) {
    const uint64_t number = header().completed.load();
    std::byte* const at =
        memory_.data() + sizeof(RingHeader) + (kSlots + number % kSlots) * size_t{kSlotBytes};
    const CompletionSlot slot = {tag, static_cast<uint32_t>(message.size()), 0};
    std::memcpy(at, &slot, sizeof(slot));
    std::memcpy(at + sizeof(slot), message.data(), message.size());
    header().completed.store(number + 1);
  }
  RingHeader& header() { return *reinterpret_cast<RingHeader*>(memory_.data()); }
  SubmissionSlot Submitted(uint64_t number) {
    SubmissionSlot slot;
    std::memcpy(&slot, memory_.data() + sizeof(RingHeader) + number % kSlots * size_t{kSlotBytes},
                sizeof(slot));
    return slot;
  }

  static Memory Create() {
    Memory memory;
    EXPECT_TRUE(Memory::Create(RingBytes(kSlots, kSlotBytes), &memory).ok());
    return memory;
  }

  const Memory memory_ = Create();
  Ring ring_{memory_.data(), kSlots, kSlotBytes};
  std::atomic<bool> stop_{false};
};

TEST_F(RingTest, FillsAndWraps) {
  std::mt19937 random(TestSeed());
  uint64_t submitted = 0, answered = 0;
  for (int step = 0; step < 10'000; ++step) {
    if (random() % 2 == 0 && !ring_.Full()) {
      std::memcpy(ring_.NextSlot(), &submitted, sizeof(submitted));
      EXPECT_FALSE(ring_.Submit(submitted, 7, sizeof(submitted)));
      EXPECT_EQ(Submitted(submitted).tag, submitted);
      EXPECT_EQ(header().submitted, ++submitted);
    } else if (answered < submitted) {
      Answer(answered, std::string(answered % 200, 'x'));
      Ring::Answer answer;
      ASSERT_TRUE(ring_.Poll(&answer));
      EXPECT_FALSE(answer.malformed);
      EXPECT_EQ(answer.tag, answered);
      EXPECT_EQ(answer.bytes, answered % 200);
      ring_.Pop();
      EXPECT_FALSE(ring_.Poll(&answer));
      EXPECT_EQ(header().received, ++answered);
    }
    EXPECT_EQ(ring_.Full(), submitted - answered == kSlots);
  }
}

TEST_F(RingTest, TellsWhenTheServerSleeps) {
  header().server_sleeps = 1;
  EXPECT_TRUE(ring_.Submit(1, 0, 0));
}

TEST_F(RingTest, FindsMalformedCompletions) {
  Ring::Answer answer;
  Answer(1, "fine");
  header().completed = kSlots + 1;  // more than there are slots
  ASSERT_TRUE(ring_.Poll(&answer));
  EXPECT_TRUE(answer.malformed);
  header().completed = 1;
  const CompletionSlot slot = {1, kSlotBytes, 0};
  std::memcpy(memory_.data() + sizeof(RingHeader) + kSlots * size_t{kSlotBytes}, &slot,
              sizeof(slot));
  ASSERT_TRUE(ring_.Poll(&answer));
  EXPECT_TRUE(answer.malformed);
}

TEST_F(RingTest, WakesASleeper) {
  const auto wait = [this] { ring_.Wait(stop_, SteadyTime(), SteadyTime::max()); };
  for (const bool by_answer : {true, false}) {
    std::thread sleeper(wait);
    while (header().client_sleeps == 0) std::this_thread::yield();
    if (by_answer) {
      Answer(1, "");
    } else {
      stop_ = true;
    }
    ring_.Wake();
    sleeper.join();
    ring_.Pop();
  }
}

TEST_F(RingTest, WaitsUntilTheDeadline) {
  const SteadyTime deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  ring_.Wait(stop_, SteadyTime(), deadline);
  EXPECT_GE(std::chrono::steady_clock::now(), deadline);
  EXPECT_EQ(header().client_sleeps, 0u);
}

}  // namespace
}  // namespace flashcore::client::local

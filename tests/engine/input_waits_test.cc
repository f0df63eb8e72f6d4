#include "server/engine/input_waits.h"

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/base/fake_clock.h"
#include "tests/memory/memfd.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class InputWaitsTest : public ::testing::Test {
 protected:
  InputWaitsTest() {
    waits_.SetWake([this] { ++wakes_; });
  }

  // Waits for `value` of the first counter.
  std::unique_ptr<AttendOperation> Wait(uint64_t value, const std::string& name,
                                        const std::string& client = "alice") {
    auto operation = std::make_unique<AttendOperation>();
    operation->identity.name = client;
    operation->request.inputs_ready = {region_, 0, value};
    Add(operation.get(), name);
    return operation;
  }
  void Add(AttendOperation* operation, const std::string& name) {
    waits_.Add(operation, [this, name](const absl::Status& status) {
      ended_.push_back(name + ": " + std::string(absl::StatusCodeToString(status.code())));
    });
  }
  void SetCounter(uint64_t value) {
    reinterpret_cast<std::atomic<uint64_t>*>(memory_.data())->store(value);
  }
  std::vector<std::string> TakeEnded() { return std::exchange(ended_, {}); }

  testing::FakeClock clock_;
  const testing::Memfd memory_{4096};
  const std::shared_ptr<const SharedRegion> region_ = memory_.Map();
  int wakes_ = 0;
  InputWaits waits_{&clock_, {/*all=*/5, /*one=*/4}};
  std::vector<std::string> ended_;
};

TEST_F(InputWaitsTest, EndWhenTheCounterReachesTheValue) {
  EXPECT_FALSE(waits_.Poll());
  const auto first = Wait(2, "a"), second = Wait(1, "b"), third = Wait(3, "c");
  EXPECT_FALSE(waits_.empty());
  EXPECT_EQ(wakes_, 1) << "the poller polls until there is no wait";
  EXPECT_FALSE(waits_.Poll());
  SetCounter(1);
  EXPECT_TRUE(waits_.Poll());
  EXPECT_THAT(TakeEnded(), ElementsAre("b: OK"));
  SetCounter(5);
  EXPECT_TRUE(waits_.Poll());
  EXPECT_THAT(TakeEnded(), ElementsAre("a: OK", "c: OK")) << "in the order of Add";
  EXPECT_TRUE(waits_.empty());
  EXPECT_FALSE(waits_.Poll());
}

TEST_F(InputWaitsTest, CountersWrapAround) {
  SetCounter(~uint64_t{0} - 1);
  const auto before = Wait(~uint64_t{0}, "before"), after = Wait(1, "after");
  EXPECT_FALSE(waits_.Poll());
  SetCounter(~uint64_t{0});
  EXPECT_TRUE(waits_.Poll());
  EXPECT_THAT(TakeEnded(), ElementsAre("before: OK"));
  SetCounter(2);
  EXPECT_TRUE(waits_.Poll());
  EXPECT_THAT(TakeEnded(), ElementsAre("after: OK"));
}

TEST_F(InputWaitsTest, ACancelAndADeadlineEndThem) {
  const auto cancelled = Wait(1, "cancelled");
  auto late = std::make_unique<AttendOperation>();
  late->request.inputs_ready = {region_, 0, 1};
  late->deadline = clock_.Now() + std::chrono::seconds(1);
  Add(late.get(), "late");
  const auto patient = Wait(1, "patient");
  clock_.Advance(std::chrono::milliseconds(999));
  EXPECT_FALSE(waits_.Poll());
  cancelled->cancelled = true;
  EXPECT_TRUE(waits_.Poll());
  EXPECT_THAT(TakeEnded(), ElementsAre("cancelled: CANCELLED"));
  clock_.Advance(std::chrono::milliseconds(1));
  EXPECT_TRUE(waits_.Poll());
  EXPECT_THAT(TakeEnded(), ElementsAre("late: DEADLINE_EXCEEDED"));
  EXPECT_FALSE(waits_.Poll());
}

TEST_F(InputWaitsTest, EndAllEndsThemAndThoseThatComeLater) {
  const auto early = Wait(1, "early");
  waits_.EndAll(absl::UnavailableError("the end"));
  EXPECT_THAT(TakeEnded(), ElementsAre("early: UNAVAILABLE"));
  const auto later = Wait(1, "later");
  EXPECT_THAT(TakeEnded(), ElementsAre("later: UNAVAILABLE"));
  SetCounter(1);
  EXPECT_FALSE(waits_.Poll());
  EXPECT_THAT(TakeEnded(), IsEmpty());
}

TEST_F(InputWaitsTest, OneMayComeWhileAnotherEnds) {
  const auto next = std::make_unique<AttendOperation>();
  next->request.inputs_ready = {region_, 0, 2};
  const auto first = std::make_unique<AttendOperation>();
  first->request.inputs_ready = {region_, 0, 1};
  waits_.Add(first.get(), [&](const absl::Status&) { Add(next.get(), "next"); });
  SetCounter(1);
  EXPECT_TRUE(waits_.Poll());
  EXPECT_FALSE(waits_.empty());
  SetCounter(2);
  EXPECT_TRUE(waits_.Poll());
  EXPECT_THAT(TakeEnded(), ElementsAre("next: OK"));
}

TEST_F(InputWaitsTest, AFailedRequestRaisesItsResultsWhenItsInputsAreReady) {
  AttendRequest request;
  request.inputs_ready = {region_, 0, 1};
  request.results_ready = {region_, 8, 1};
  const auto* const results = reinterpret_cast<std::atomic<uint64_t>*>(memory_.data() + 8);
  auto owner = std::make_shared<int>();
  waits_.RaiseWhenReady(request, "alice", owner);
  EXPECT_FALSE(waits_.Poll());
  EXPECT_EQ(*results, 0u);
  SetCounter(1);
  EXPECT_TRUE(waits_.Poll());
  EXPECT_EQ(*results, 1u);
  EXPECT_TRUE(waits_.empty());
  request.inputs_ready.value = 2;
  waits_.RaiseWhenReady(request, "alice", owner);
  EXPECT_FALSE(waits_.Poll());
  owner.reset();
  EXPECT_TRUE(waits_.Poll());
  EXPECT_TRUE(waits_.empty()) << "its client is gone";
}

class LentWaitsTest : public InputWaitsTest {
 protected:
  static constexpr uint64_t kOther = 64;  // another counter

  std::unique_ptr<AttendOperation> WaitAt(uint64_t offset, uint64_t value, const std::string& name,
                                          size_t device = 0) {
    auto operation = std::make_unique<AttendOperation>();
    operation->identity.name = "alice";
    operation->device = device;
    operation->request.inputs_ready = {region_, offset, value};
    Add(operation.get(), name);
    return operation;
  }
  // The operation that is lent, and given back later.
  AttendOperation* Lend(size_t device = 0) {
    std::optional<InputWaits::Wait> wait = waits_.Lend(device);
    if (!wait.has_value()) return nullptr;
    lent_.push_back(*std::move(wait));
    return lent_.back().operation;
  }
  std::vector<InputWaits::Wait> lent_;
};

TEST_F(LentWaitsTest, TheNextOfACounterIsLentAndNoOther) {
  const auto first = WaitAt(0, 1, "first"), second = WaitAt(0, 2, "second"),
             other = WaitAt(kOther, 1, "other"), elsewhere = WaitAt(kOther + 64, 1, "elsewhere", 1);
  EXPECT_EQ(Lend(), first.get());
  waits_.GiveBack(std::move(lent_[0]));
  EXPECT_EQ(Lend(), first.get()) << "it has not been staged";
  lent_.back().staged = true;
  waits_.GiveBack(std::move(lent_.back()));
  EXPECT_EQ(Lend(), other.get()) << "`second` runs after `first`, which is not lent again";
  EXPECT_EQ(Lend(), nullptr);
  EXPECT_EQ(Lend(/*device=*/1), elsewhere.get());
}

TEST_F(LentWaitsTest, OneThatIsGivenBackEndsInItsPlace) {
  const auto first = WaitAt(0, 1, "first"), second = WaitAt(kOther, 1, "second");
  ASSERT_EQ(Lend(), first.get());
  EXPECT_EQ(lent_[0].EndAt(clock_.Now()), std::nullopt);
  reinterpret_cast<std::atomic<uint64_t>*>(memory_.data() + kOther)->store(1);
  SetCounter(1);
  EXPECT_EQ(lent_[0].EndAt(clock_.Now()), absl::OkStatus());
  waits_.GiveBack(std::move(lent_[0]));
  EXPECT_TRUE(waits_.Poll());
  EXPECT_THAT(TakeEnded(), ElementsAre("first: OK", "second: OK"));
}

TEST_F(LentWaitsTest, TheThreadThatPollsLearnsThatOneIsBack) {
  const auto only = WaitAt(0, 1, "only");
  ASSERT_EQ(Lend(), only.get());
  EXPECT_TRUE(waits_.empty());
  wakes_ = 0;
  waits_.GiveBack(std::move(lent_[0]));
  EXPECT_EQ(wakes_, 1);
  EXPECT_FALSE(waits_.empty());
}

TEST_F(LentWaitsTest, OneThatComesBackAfterTheEndEndsToo) {
  const auto only = WaitAt(0, 1, "only");
  ASSERT_EQ(Lend(), only.get());
  waits_.EndAll(absl::UnavailableError("the end"));
  EXPECT_THAT(TakeEnded(), IsEmpty()) << "a lane has it";
  waits_.GiveBack(std::move(lent_[0]));
  EXPECT_THAT(TakeEnded(), ElementsAre("only: UNAVAILABLE"));
}

TEST_F(LentWaitsTest, AFailedRequestIsNotLentAndKeepsTheOnesBehindIt) {
  AttendRequest request;
  request.inputs_ready = {region_, 0, 1};
  request.results_ready = {region_, 8, 1};
  const auto owner = std::make_shared<int>();
  waits_.RaiseWhenReady(request, "alice", owner);
  const auto behind = WaitAt(0, 2, "behind");
  EXPECT_EQ(Lend(), nullptr);
}

// The newest of the client that has too many is refused; others keep theirs.
TEST_F(InputWaitsTest, ClientsHaveSharesOfThem) {
  std::vector<std::unique_ptr<AttendOperation>> kept;
  for (const char* name : {"a1", "a2", "a3", "a4"}) kept.push_back(Wait(1, name));
  kept.push_back(Wait(1, "a5"));
  EXPECT_THAT(TakeEnded(), ElementsAre("a5: RESOURCE_EXHAUSTED")) << "over its share";
  kept.push_back(Wait(1, "b1", "bob"));
  EXPECT_THAT(TakeEnded(), IsEmpty());
  kept.push_back(Wait(1, "b2", "bob"));
  EXPECT_THAT(TakeEnded(), ElementsAre("a4: RESOURCE_EXHAUSTED")) << "all have too many";
  SetCounter(1);
  EXPECT_TRUE(waits_.Poll());
  EXPECT_THAT(TakeEnded(), ElementsAre("a1: OK", "a2: OK", "a3: OK", "b1: OK", "b2: OK"));
  for (const char* name : {"c1", "c2", "c3", "c4"}) kept.push_back(Wait(2, name, "carol"));
  EXPECT_THAT(TakeEnded(), IsEmpty()) << "those that ended count no more";
}

TEST(TimelinePointTest, RaiseNeverGoesBack) {
  const testing::Memfd memory(4096);
  const std::shared_ptr<const SharedRegion> region = memory.Map();
  auto* const counter = reinterpret_cast<std::atomic<uint64_t>*>(memory.data() + 8);
  TimelinePoint{region, 8, 5}.Raise();
  EXPECT_EQ(*counter, 5u);
  TimelinePoint{region, 8, 4}.Raise();
  EXPECT_EQ(*counter, 5u);
  *counter = ~uint64_t{0};
  EXPECT_FALSE((TimelinePoint{region, 8, 3}.reached()));
  TimelinePoint{region, 8, 3}.Raise();
  EXPECT_EQ(*counter, 3u) << "beyond 2^64 - 1";
}

}  // namespace
}  // namespace flashcore::server

// The meaning of a signal, by what came before it and when.
#include "server/base/signal_policy.h"

#include <csignal>

#include "gtest/gtest.h"
#include "tests/base/fake_clock.h"

namespace flashcore::server {
namespace {

using Action = SignalPolicy::Action;

class SignalPolicyTest : public ::testing::Test {
 protected:
  Action On(int signal) { return policy_.On(signal, clock_.Now()); }

  testing::FakeClock clock_;
  SignalPolicy policy_;
};

TEST_F(SignalPolicyTest, AStopSignalIsOneRequestForASecond) {
  for (const int first : {SIGTERM, SIGINT}) {
    policy_ = SignalPolicy();
    EXPECT_EQ(On(first), Action::kDrain);
    EXPECT_EQ(On(SIGTERM), Action::kNone);
    EXPECT_EQ(On(SIGINT), Action::kNone);
    clock_.Advance(SignalPolicy::kOneRequest);
    EXPECT_EQ(On(SIGTERM), Action::kNone);
    clock_.Advance(Nanoseconds(1));
    EXPECT_EQ(On(SIGTERM), Action::kExit);
    EXPECT_EQ(On(SIGINT), Action::kExit);
  }
}

TEST_F(SignalPolicyTest, OneOfTheSecondDoesNotMakeItLonger) {
  EXPECT_EQ(On(SIGTERM), Action::kDrain);
  clock_.Advance(SignalPolicy::kOneRequest);
  EXPECT_EQ(On(SIGTERM), Action::kNone);
  clock_.Advance(Nanoseconds(1));
  EXPECT_EQ(On(SIGTERM), Action::kExit);
}

TEST_F(SignalPolicyTest, SighupReadsCredentialsAtAnyTimeAndIsNoStopSignal) {
  EXPECT_EQ(On(SIGHUP), Action::kReload);
  EXPECT_EQ(On(SIGTERM), Action::kDrain);
  EXPECT_EQ(On(SIGHUP), Action::kReload);
  clock_.Advance(2 * SignalPolicy::kOneRequest);
  EXPECT_EQ(On(SIGHUP), Action::kReload);
  EXPECT_EQ(On(SIGTERM), Action::kExit);
}

TEST_F(SignalPolicyTest, SigxcpuDrainsOnceHoweverOftenItComes) {
  EXPECT_EQ(On(SIGXCPU), Action::kDrain);
  clock_.Advance(2 * SignalPolicy::kOneRequest);
  EXPECT_EQ(On(SIGXCPU), Action::kNone);
  EXPECT_EQ(On(SIGTERM), Action::kExit);
}

}  // namespace
}  // namespace flashcore::server

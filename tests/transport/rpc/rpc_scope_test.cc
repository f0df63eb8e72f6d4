// How a request counts whose answer did not reach the client.
#include "server/transport/rpc/rpc_scope.h"

#include <chrono>
#include <string>

#include "gtest/gtest.h"
#include "tests/base/fake_clock.h"
#include "tests/engine/fakes.h"

namespace flashcore::server {
namespace {

// The outcome of a request whose answer is lost after two seconds.
std::string OutcomeOfLost(CutOff why, std::chrono::seconds timeout) {
  testing::FakeClock clock;
  Metrics metrics(testing::FakeMetricsOptions({{"Service", "Attend", "unary", "grpc", true}}));
  ClientConnections connections(0);
  RpcContext context{&metrics, &clock, Authenticator({}, &metrics), &connections, nullptr};
  RequestScope request(&context, metrics.Rpc("Service", "Attend"));
  const TimePoint deadline = clock.Now() + timeout;
  request.Replying(absl::OkStatus());
  clock.Advance(std::chrono::seconds(2));
  request.Lost(why);
  request.Record("alice", "", deadline);
  for (const auto& family : metrics.Collect()) {
    if (family.name != "flashcore_request_duration_seconds") continue;
    for (const auto& metric : family.metric) {
      if (metric.histogram.sample_count == 0) continue;
      for (const auto& label : metric.label) {
        if (label.name == "outcome") return label.value;
      }
    }
  }
  return "none";
}

TEST(RequestScopeTest, OnlyAClientThatCancelledIsLate) {
  constexpr std::chrono::seconds kPassed(1), kNotPassed(3);
  EXPECT_EQ(OutcomeOfLost(CutOff::kNo, kPassed), "expired");
  EXPECT_EQ(OutcomeOfLost(CutOff::kNo, kNotPassed), "client_error");
  for (const auto timeout : {kPassed, kNotPassed}) {
    for (const CutOff why : {CutOff::kTimeout, CutOff::kShare, CutOff::kStaging}) {
      EXPECT_EQ(OutcomeOfLost(why, timeout), "client_error") << "it did not read";
    }
    EXPECT_EQ(OutcomeOfLost(CutOff::kDrain, timeout), "refused");
  }
}

}  // namespace
}  // namespace flashcore::server

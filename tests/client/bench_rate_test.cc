// Rates, turns and rounds of flashcore bench.
#include <algorithm>
#include <chrono>
#include <set>

#include "client/bench/bench_report.h"
#include "client/bench/load.h"
#include "client/cli/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/bench_fixture.h"

namespace flashcore::cli {
namespace {

using ::testing::HasSubstr;

// A load of one worker on a clock that only the server's handlers move: a decode step takes 5 ms, a
// step with K/V inline 93 ms, which is more than a turn of 50 ms, and a unary step beside a stream
// 7 ms. The truncation after every 64 steps takes 200 ms, which no latency covers.
class RateTest : public BenchTest {
 protected:
  static constexpr auto kWarmup = std::chrono::milliseconds(103);
  static constexpr auto kWindow = std::chrono::seconds(2);

  RateTest() {
    options_.clock = clock_.load_clock();
    options_.concurrency = 1;
    options_.resident.sequences = 1;
    options_.warmup = absl::FromChrono(kWarmup);
    options_.duration = absl::FromChrono(kWindow);
    auto attend = server_.on_attend;
    server_.on_attend = [this, attend](auto* context, const auto& request, auto* response) {
      const bool resident = !request.spans(0).sequence_id().empty();
      resident ? Take(options_.stream ? "unary" : "decode", options_.stream ? 7 : 5)
               : Take("inline", 93);
      return attend(context, request, response);
    };
    server_.on_stream = [this, attend](FakeServer::Stream* stream) {
      v1::AttendRequest request;
      while (stream->Read(&request)) {
        v1::AttendResponse response;
        request.spans(0).sequence_id().empty() ? Take("inline", 93) : Take("decode", 5);
        const grpc::Status status = attend(nullptr, request, &response);
        if (!status.ok()) return status;
        response.set_request_id(request.request_id());
        stream->Write(response);
      }
      return grpc::Status::OK;
    };
    auto truncate = server_.on_truncate;
    server_.on_truncate = [this, truncate](auto* context, const auto& request, auto* response) {
      clock_.Advance(std::chrono::milliseconds(200));
      return truncate(context, request, response);
    };
  }

  // Holds the rate of each kind against the calls that the server saw. The report.
  nlohmann::ordered_json RunAndCheck(const std::set<std::string>& kinds) {
    const SteadyTime begin = clock_.Now();
    const LoadResult result = Run();
    EXPECT_EQ(result.Failed(), 0u) << result.first_error;
    EXPECT_EQ(result.window_seconds, 2);
    const auto report = BenchJson(options_, "", result);
    double all_turns = 0;
    for (const std::string& kind : kinds) {
      const auto& of_kind = kind == "decode" ? report : report.at(kind);
      const auto [ended, seconds] = Expected(kind, begin);
      const double turn_seconds = of_kind.at("turn_seconds");
      EXPECT_NEAR(turn_seconds, seconds, 1e-9) << kind;
      EXPECT_NEAR(of_kind.at("requests_per_second"), static_cast<double>(ended) / seconds, 1e-6)
          << kind;
      EXPECT_GT(ended, 0) << kind;
      all_turns += turn_seconds;
    }
    ExpectKindsInTurn(kinds.size());
    EXPECT_NEAR(all_turns, 2, 1e-9);
    EXPECT_NEAR(report.at("latency_us").at("p50"), 5000, 1);
    return report;
  }

 private:
  struct Call {
    std::string kind;
    SteadyTime begin, end;  // begin: the end of the call before
  };

  void Take(const std::string& kind, int milliseconds) {
    clock_.Advance(std::chrono::milliseconds(milliseconds));
    absl::MutexLock lock(&mutex_);
    calls_.push_back({kind, calls_.empty() ? SteadyTime::min() : calls_.back().end, clock_.Now()});
  }

  // No kind is left out, and each turn but the last, which the load ends, has at least 50 ms.
  void ExpectKindsInTurn(size_t kinds) const {
    absl::MutexLock lock(&mutex_);
    std::vector<Call> turns;
    for (const Call& call : calls_) {
      if (turns.empty() || turns.back().kind != call.kind) turns.push_back(call);
      turns.back().end = call.end;
    }
    for (size_t i = kinds; i < turns.size(); ++i) {
      EXPECT_EQ(turns[i].kind, turns[i - kinds].kind) << i;
    }
    for (size_t i = 1; i + 1 < turns.size(); ++i) {
      EXPECT_GE(turns[i].end - turns[i].begin, std::chrono::milliseconds(50)) << turns[i].kind;
    }
    EXPECT_TRUE(kinds == 1 || turns.size() > 2 * kinds);
  }

  // For one kind: the calls that ended in the window, and the part of the window that they and what
  // came before them took.
  std::pair<int, double> Expected(const std::string& kind, SteadyTime begin) const {
    const SteadyTime start = begin + kWarmup, end = start + kWindow;
    absl::MutexLock lock(&mutex_);
    std::chrono::duration<double> time{};
    int ended = 0;
    for (const Call& call : calls_) {
      if (call.kind != kind) continue;
      ended += call.end >= start && call.end <= end;
      time += std::max(std::min(call.end, end) - std::max(call.begin, start),
                       SteadyTime::duration::zero());
    }
    return {ended, time.count()};
  }

  mutable absl::Mutex mutex_;
  std::vector<Call> calls_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(RateTest, OfOneKindIsOverTheWindow) {
  const auto report = RunAndCheck({"decode"});
  EXPECT_EQ(report.at("turn_seconds"), report.at("window_seconds"));
  EXPECT_LT(report.at("requests_per_second"), 0.8 / 5e-3) << "it is not over the sum of latencies";
}

TEST_F(RateTest, BesideRequestsLongerThanATurnIsOverTheKindsOwnTurns) {
  options_.resident.compare_inline = true;
  RunAndCheck({"decode", "inline"});
}

TEST_F(RateTest, OnAStreamIsOverTheKindsOwnTurns) {
  options_.stream = options_.compare_unary = true;
  RunAndCheck({"decode", "unary"});
}

TEST_F(RateTest, OfThreeKindsIsOverTheKindsOwnTurns) {
  options_.stream = options_.compare_unary = options_.resident.compare_inline = true;
  RunAndCheck({"decode", "unary", "inline"});
}

TEST_F(BenchTest, TurnsOfAllWorkersFillTheWindow) {
  options_.resident.compare_inline = true;
  const LoadResult result = Run();
  EXPECT_NEAR(result.series.at("decode").turn_seconds + result.series.at("inline").turn_seconds,
              result.window_seconds, 1e-6);
}

TEST_F(BenchTest, RoundsKeepTheSequences) {
  std::atomic<int> creates{0};
  auto create = server_.on_create;
  server_.on_create = [&](auto* context, const auto& request, auto* response) {
    ++creates;
    return create(context, request, response);
  };
  options_.duration = absl::Milliseconds(500);
  std::vector<LoadResult> results;
  const absl::Status status = RunRounds(
      options_, [&] { return results.size() < 3; },
      [&](const LoadResult& result) { results.push_back(result); });
  EXPECT_EQ(status, absl::OkStatus());
  ASSERT_EQ(results.size(), 3u);
  for (const LoadResult& result : results) {
    EXPECT_EQ(result.Failed(), 0u) << result.first_error;
    EXPECT_GT(result.Ok(), 0u);
    EXPECT_EQ(result.window_seconds, 0.5);
    EXPECT_EQ(result.series.at("decode").turn_seconds, 0.5);
    EXPECT_EQ(result.server, "fake");
  }
  EXPECT_EQ(creates, 3);
  EXPECT_EQ(sequences_.size(), 0u);
}

TEST_F(BenchTest, AllTargetsShareTheConnections) {
  FakeServer other;
  FakeSequences others_sequences;
  others_sequences.Install(&other);
  const std::vector<std::string> args = {"bench", "--mode=decode", "--shape=2x4/2x40x8",
                                         "--concurrency=4", "--all_targets"};
  const std::string target = "--target=" + server_.target() + "," + other.target();
  const auto with = [&](const char* connections) {
    std::vector<std::string> all = args;
    all.push_back(connections);
    return all;
  };
  const auto both = [&] { return server_.attend_calls() > 4 && other.attend_calls() > 0; };
  EXPECT_THAT(MainUntil(both, with("--connections=2"), target, kExitOk),
              HasSubstr("target " + server_.target() + "," + other.target()));
  EXPECT_THAT(Main(with("--connections=1"), target, kExitUsage),
              HasSubstr("one for each address of --all_targets"));
}

}  // namespace
}  // namespace flashcore::cli

// A load on a server that attends correctly.
#ifndef FLASHCORE_TESTS_CLIENT_BENCH_FIXTURE_H_
#define FLASHCORE_TESTS_CLIENT_BENCH_FIXTURE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/reflection.h"
#include "absl/synchronization/mutex.h"
#include "client/bench/commands.h"
#include "client/bench/load.h"
#include "gtest/gtest.h"
#include "tests/client/fake_sequences.h"
#include "tests/client/fake_server.h"

namespace flashcore::cli {

// Stands still but for Advance, sleeps and the ticks of a load. Thread-safe.
class FakeClock {
 public:
  // Each look of the load at its clock takes `tick`.
  LoadClock load_clock(std::chrono::nanoseconds tick = {}) {
    return {
        [this, tick] {
          Advance(tick);
          return Now();
        },
        [this](SteadyTime time) { Advance(std::max(time - Now(), SteadyTime::duration::zero())); }};
  }
  SteadyTime Now() const {
    absl::MutexLock lock(&mutex_);
    return now_;
  }
  void Advance(std::chrono::nanoseconds time) {
    absl::MutexLock lock(&mutex_);
    now_ += time;
  }

 private:
  mutable absl::Mutex mutex_;
  SteadyTime now_ ABSL_GUARDED_BY(mutex_) = SteadyTime(std::chrono::hours(1));
};

// Time passes with the requests: a duration is a number of them, however slow the machine is.
class BenchTest : public testing::Test {
 protected:
  static constexpr auto kTick = std::chrono::milliseconds(1);

  BenchTest() {
    sequences_.Install(&server_);
    options_.clock = clock_.load_clock(kTick);
    options_.client.timeout = absl::Minutes(1);
    options_.targets = {server_.target()};
    options_.shape.num_heads = 4;
    options_.shape.num_kv_heads = 2;
    options_.shape.head_dim = 8;
    options_.mode = BenchMode::kDecode;
    options_.concurrency = 2;
    options_.resident.sequences = 3;
    options_.resident.context = 70;
    options_.warmup = absl::ZeroDuration();
    options_.duration = absl::Milliseconds(300);
  }

  LoadResult Run() {
    absl::StatusOr<LoadResult> result = RunLoad(options_);
    EXPECT_EQ(result.status(), absl::OkStatus());
    EXPECT_EQ(sequences_.size(), 0u) << "not deleted";
    return result.ok() ? *std::move(result) : LoadResult();
  }

  // Runs until the server has seen that many requests.
  LoadResult RunCalls(int calls) {
    const int before = server_.attend_calls();
    return RunUntil([&] { return server_.attend_calls() >= before + calls; });
  }

  // Interrupts the load when it looks at its clock, as it does before each request, and `enough`.
  LoadResult RunUntil(const std::function<bool()>& enough) {
    options_.duration = absl::Minutes(10);
    const LoadClock clock = options_.clock;
    std::atomic<bool> interrupted{false};
    options_.clock.now = [&] {
      if (enough() && !interrupted.exchange(true)) raise(SIGINT);
      return clock.now();
    };
    LoadResult result = Run();
    options_.clock = clock;
    EXPECT_TRUE(result.interrupted);
    EXPECT_GT(result.window_seconds, 0);
    EXPECT_LT(result.window_seconds, 300) << "not the whole --duration";  // gate: of the fake clock
    return result;
  }

  // The output of the command.
  std::string Main(std::vector<std::string> args, int exit_code) {
    return Main(std::move(args), "--target=" + server_.target(), exit_code);
  }
  std::string Main(std::vector<std::string> args, const std::string& target, int exit_code) {
    absl::FlagSaver saver;
    args.push_back(target);
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    EXPECT_EQ(cli::Main({BenchCommand(), InfoCommand(), SequencesCommand()}, args), exit_code);
    const std::string errors = testing::internal::GetCapturedStderr();
    return testing::internal::GetCapturedStdout() + errors;
  }

  // The same of a load, which is interrupted at a request that finds `enough`.
  std::string MainUntil(const std::function<bool()>& enough, std::vector<std::string> args,
                        int exit_code) {
    return MainUntil(enough, std::move(args), "--target=" + server_.target(), exit_code);
  }
  std::string MainUntil(const std::function<bool()>& enough, std::vector<std::string> args,
                        const std::string& target, int exit_code) {
    std::atomic<bool> interrupted{false};
    sequences_.fault = [&](FakeSequences::Attention*) {
      if (enough() && !interrupted.exchange(true)) raise(SIGINT);
    };
    args.insert(args.end(), {"--warmup=0", "--duration=10m", "--timeout=60s"});
    std::string output = Main(std::move(args), target, exit_code);
    sequences_.fault = nullptr;
    EXPECT_TRUE(interrupted);
    return output;
  }

  // Answers correctly when `answer` is OK, else with that status.
  void FailSometimes(std::function<grpc::Status(int call)> answer) {
    auto right = server_.on_attend;
    server_.on_attend = [this, right, answer](auto* context, const auto& request, auto* response) {
      const grpc::Status status = answer(calls_++);
      return status.ok() ? right(context, request, response) : status;
    };
  }

  // Counts the Attends that come.
  void CountKinds(std::atomic<int>* resident, std::atomic<int>* inline_kv) {
    auto right = server_.on_attend;
    server_.on_attend = [=](auto* context, const v1::AttendRequest& request, auto* response) {
      ++*(request.spans(0).sequence_id().empty() ? inline_kv : resident);
      return right(context, request, response);
    };
  }

  FakeClock clock_;
  FakeSequences sequences_;
  FakeServer server_;
  LoadOptions options_;
  std::atomic<int> calls_{0};
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_TESTS_CLIENT_BENCH_FIXTURE_H_

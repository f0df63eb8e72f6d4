// A load on a server that attends correctly.
#ifndef FLASHCORE_TESTS_CLIENT_BENCH_FIXTURE_H_
#define FLASHCORE_TESTS_CLIENT_BENCH_FIXTURE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/reflection.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/command.h"
#include "client/cli/load.h"
#include "gtest/gtest.h"
#include "tests/client/fake_sequences.h"
#include "tests/client/fake_server.h"

namespace flashcore::cli {

// Stands still but for Advance and sleeps. Thread-safe.
class FakeClock {
 public:
  LoadClock load_clock() {
    return {
        [this] { return Now(); },
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

class BenchTest : public testing::Test {
 protected:
  BenchTest() {
    sequences_.Install(&server_);
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

  LoadResult RunUntil(const std::function<bool()>& enough) {
    options_.duration = absl::Minutes(10);
    std::thread interrupter([&] {
      while (!enough()) absl::SleepFor(absl::Milliseconds(1));
      raise(SIGINT);
    });
    LoadResult result = Run();
    interrupter.join();
    EXPECT_TRUE(result.interrupted);
    EXPECT_GT(result.window_seconds, 0);
    EXPECT_LT(result.window_seconds, 300) << "not the whole --duration";
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
    EXPECT_EQ(cli::Main(args), exit_code);
    const std::string errors = testing::internal::GetCapturedStderr();
    return testing::internal::GetCapturedStdout() + errors;
  }

  // Answers correctly when `answer` is OK, else with that status.
  void FailSometimes(std::function<grpc::Status(int call)> answer) {
    auto right = server_.on_attend;
    server_.on_attend = [this, right, answer](auto* context, const auto& request, auto* response) {
      const grpc::Status status = answer(calls_++);
      return status.ok() ? right(context, request, response) : status;
    };
  }

  FakeSequences sequences_;
  FakeServer server_;
  LoadOptions options_;
  std::atomic<int> calls_{0};
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_TESTS_CLIENT_BENCH_FIXTURE_H_

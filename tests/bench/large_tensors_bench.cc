// How fast large tensors reach a server, over one connection or several: for large_over_tcp.py.
//
//   flashcore-large-tensors-bench --target=127.0.0.1:7070 --workers=4 --megabytes=160 [--share]
//
// Each worker is a thread that sends its part of the megabytes, on a connection of its own or, with
// --share, on the one of all. Kinds take turns: "load" appends to a sequence in a LoadSequence
// stream, "attend" is one Attend with inline K/V. Prints the median of the rounds as JSON.
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"
#include "absl/time/clock.h"
#include "flashcore/client.h"

ABSL_FLAG(std::string, target, "127.0.0.1:7070", "address of the server");
ABSL_FLAG(int, workers, 1, "threads that send");
ABSL_FLAG(bool, share, false, "all workers share one connection");
ABSL_FLAG(int, megabytes, 160, "of K/V in each round, by all workers together");
ABSL_FLAG(int, rounds, 9, "of each kind, after one to warm up");

namespace flashcore {
namespace {

constexpr uint32_t kHeads = 8, kHeadDim = 128;
constexpr size_t kRowBytes = size_t{kHeads} * kHeadDim * kElementBytes;

void OrDie(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

class Worker {
 public:
  Worker(std::shared_ptr<Client> client, size_t bytes)
      : client_(std::move(client)),
        rows_(std::max<size_t>(1, bytes / 2 / kRowBytes)),
        tensor_(rows_ * kRowBytes),
        output_(kRowBytes),
        sequence_(client_->CreateSequence({1, kHeads, kHeadDim}).value()) {}
  ~Worker() { OrDie(sequence_.Delete()); }
  Worker(const Worker&) = delete;

  size_t bytes() const { return 2 * tensor_.size(); }
  void Load() { OrDie(sequence_.Append(0, tensor_, tensor_, Layout::kNHD).status()); }
  void Empty() { OrDie(sequence_.Truncate(0).status()); }
  const Timing& timing() const { return result_.timing; }  // of the last Attend
  void Attend() {
    AttendRequest request;
    request.spans = {{1, static_cast<uint32_t>(rows_)}};
    request.num_heads = request.num_kv_heads = kHeads;
    request.head_dim = kHeadDim;
    request.query = absl::MakeConstSpan(tensor_).first(kRowBytes);
    request.key = request.value = tensor_;
    request.output = absl::MakeSpan(output_);
    OrDie(client_->Attend(request, &result_));
  }

 private:
  const std::shared_ptr<Client> client_;
  const size_t rows_;
  const std::vector<std::byte> tensor_;  // zeros
  std::vector<std::byte> output_;
  AttendResult result_;
  const Sequence sequence_;
};

// Seconds from the start of all threads until the last one is done.
double Round(const std::vector<std::unique_ptr<Worker>>& workers, void (Worker::*send)()) {
  const int count = static_cast<int>(workers.size()) + 1;
  auto* const begin = new absl::Barrier(count);
  std::vector<std::thread> threads;
  for (const auto& worker : workers) {
    threads.emplace_back([&, raw = worker.get()] {
      if (begin->Block()) delete begin;
      (raw->*send)();
    });
  }
  if (begin->Block()) delete begin;
  const absl::Time start = absl::Now();
  for (std::thread& thread : threads) thread.join();
  return absl::ToDoubleSeconds(absl::Now() - start);
}

double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void Measure(const char* kind, const std::vector<std::unique_ptr<Worker>>& workers,
             void (Worker::*send)(), void (Worker::*after)()) {
  const int rounds = absl::GetFlag(FLAGS_rounds);
  std::vector<double> seconds;
  double cpu = 0;
  for (int i = 0; i <= rounds; ++i) {
    const double before = CpuSeconds();
    const double took = Round(workers, send);
    if (i > 0) cpu += CpuSeconds() - before;
    if (i > 0) seconds.push_back(took);
    if (after == nullptr) continue;
    for (const auto& worker : workers) (worker.get()->*after)();
  }
  std::sort(seconds.begin(), seconds.end());
  const double megabytes =
      1e-6 * static_cast<double>(workers.size()) * static_cast<double>(workers[0]->bytes());
  const Timing& timing = workers[0]->timing();
  const double median = seconds[seconds.size() / 2];
  std::printf(
      "{\"kind\": \"%s\", \"workers\": %zu, \"share\": %s, \"mb_per_s\": %.0f, \"ms\": %.1f, "
      "\"best_ms\": %.1f, \"client_cpu_ms\": %.1f, \"receive_ms\": %.1f, \"kernel_ms\": %.1f}\n",
      kind, workers.size(), absl::GetFlag(FLAGS_share) ? "true" : "false", megabytes / median,
      1e3 * median, 1e3 * seconds[0], 1e3 * cpu / rounds, 1e-6 * timing.receive_ns,
      1e-6 * timing.kernel_ns);
  std::fflush(stdout);
}

void Run() {
  const int count = std::max(1, absl::GetFlag(FLAGS_workers));
  const size_t bytes = size_t{1'000'000} * static_cast<size_t>(absl::GetFlag(FLAGS_megabytes)) /
                       static_cast<size_t>(count);
  std::vector<std::unique_ptr<Worker>> workers;
  std::shared_ptr<Client> client;
  for (int i = 0; i < count; ++i) {
    if (client == nullptr || !absl::GetFlag(FLAGS_share)) {
      client = Client::Create(absl::GetFlag(FLAGS_target)).value();
    }
    workers.push_back(std::make_unique<Worker>(client, bytes));
  }
  Measure("load", workers, &Worker::Load, &Worker::Empty);
  Measure("attend", workers, &Worker::Attend, nullptr);
}

}  // namespace
}  // namespace flashcore

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  flashcore::Run();
}

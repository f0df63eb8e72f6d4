// reload_client TARGET: decodes on 24 sequences of the C++ client from 4 threads until stdin ends,
// and reloads those that are lost. Prints a JSON object: steps that were answered rightly, reloads,
// and the first of the failures.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "flashcore/client.h"
#include "kernels/half.h"

namespace flashcore {
namespace {

constexpr int kThreads = 4;
constexpr int kSequencesPerThread = 6;
constexpr uint64_t kPromptRows = 8;
constexpr uint32_t kHeadDim = 32;

struct Counts {
  std::atomic<int> steps{0}, reloads{0}, failures{0};
  absl::Mutex mutex;
  absl::Status first_failure ABSL_GUARDED_BY(mutex);
};

// A sequence all of whose K and V elements are one number, so that it is what attention gives.
class Decoder {
 public:
  Decoder(Client* client, int number, Counts* counts)
      : client_(client),
        element_(kernels::FromFloat(kernels::DType::kFloat16, static_cast<float>(number))),
        counts_(counts) {}

  absl::Status Start() {
    SequenceOptions options;
    options.num_kv_heads = 1;
    options.head_dim = kHeadDim;
    absl::StatusOr<Sequence> made = Make(options);
    if (!made.ok()) return made.status();
    sequence_ = *std::move(made);
    sequence_->OnLost([this](const SequenceOptions& lost) {
      ++counts_->reloads;
      absl::StatusOr<Sequence> again = Make(lost);
      // A proxy may change its mind on where the lost server's sequences go: after an error at
      // first, and then after its health check.
      for (int i = 0; i < 3 && !again.ok(); ++i) again = Make(lost);
      return again;
    });
    return absl::OkStatus();
  }

  absl::Status Step() {
    const std::vector<uint16_t> row(kHeadDim, element_);
    std::vector<uint16_t> output(kHeadDim);
    AttendRequest request;
    request.spans = {{1, 1, {}, rows_}};
    request.num_heads = 1;
    request.query = request.key = request.value = Bytes(row);
    request.output = {reinterpret_cast<std::byte*>(output.data()), output.size() * 2};
    AttendResult result;
    const absl::Status status = sequence_->Attend(request, &result);
    if (!status.ok()) return status;
    if (result.sequence_lengths != std::vector<uint64_t>{rows_ + 1} || output != row) {
      return absl::DataLossError("the answer is of another sequence");
    }
    ++rows_;
    return status;
  }

 private:
  static absl::Span<const std::byte> Bytes(const std::vector<uint16_t>& elements) {
    return {reinterpret_cast<const std::byte*>(elements.data()), elements.size() * 2};
  }

  // With the rows that were there after the last step that succeeded.
  absl::StatusOr<Sequence> Make(const SequenceOptions& options) {
    absl::StatusOr<Sequence> made = client_->CreateSequence(options);
    if (!made.ok()) return made;
    const std::vector<uint16_t> rows(rows_ * kHeadDim, element_);
    const auto info = made->Append(0, Bytes(rows), Bytes(rows), Layout::kNHD, 0);
    return info.ok() ? made : info.status();
  }

  Client* const client_;
  const uint16_t element_;
  Counts* const counts_;
  uint64_t rows_ = kPromptRows;
  std::optional<Sequence> sequence_;
};

void Decode(Client* client, int thread, const std::atomic<bool>& stop, Counts* counts) {
  const auto count = [&](const absl::Status& status) {
    if (status.ok()) return;
    absl::MutexLock lock(&counts->mutex);
    if (counts->failures++ == 0) counts->first_failure = status;
  };
  std::vector<std::unique_ptr<Decoder>> decoders;
  for (int i = 0; i < kSequencesPerThread; ++i) {
    const int number = thread * kSequencesPerThread + i;
    decoders.push_back(std::make_unique<Decoder>(client, number, counts));
    count(decoders.back()->Start());
  }
  while (!stop && counts->failures == 0) {
    for (const auto& decoder : decoders) {
      const absl::Status status = decoder->Step();
      if (status.ok()) ++counts->steps;
      count(status);
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
}

int Run(const char* target) {
  ClientOptions options;
  options.retry.max_attempts = 12;  // a proxy needs two health checks to see that a server is gone
  const auto client = Client::Create(target, options);
  if (!client.ok()) return 2;
  Counts counts;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { Decode(client->get(), i, stop, &counts); });
  }
  char ignored = 0;
  while (read(STDIN_FILENO, &ignored, 1) > 0) {
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  absl::MutexLock lock(&counts.mutex);
  std::printf("{\"steps\": %d, \"reloads\": %d, \"failures\": %d, \"first_failure\": \"%s\"}\n",
              counts.steps.load(), counts.reloads.load(), counts.failures.load(),
              std::string(counts.first_failure.message()).c_str());
  return 0;
}

}  // namespace
}  // namespace flashcore

int main(int argc, char** argv) { return argc == 2 ? flashcore::Run(argv[1]) : 2; }

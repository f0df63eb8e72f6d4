// local_client compare LOCAL GRPC [SEED]   the same requests over both targets: equal bits?
// local_client decode TARGET    decodes on 4 threads until stdin ends, and reloads what is lost
// local_client patient TARGET   deadline and cancellation of requests of a minute's work
//
// Prints a JSON object; exits with 0 if everything was right.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "flashcore/client.h"
#include "kernels/half.h"

namespace flashcore {
namespace {

constexpr uint64_t kPromptRows = 8;

using Bytes = std::vector<std::byte>;

// A request with its memory.
struct Call {
  AttendRequest request;
  Bytes query, key, value, output;
  std::vector<float> lse;
};

void Fill(std::mt19937* random, Bytes* bytes) {
  std::uniform_real_distribution<float> element(-1, 1);
  for (size_t i = 0; i < bytes->size(); i += 2) {
    const uint16_t half = kernels::FromFloat(kernels::DType::kFloat16, element(*random));
    std::memcpy(&(*bytes)[i], &half, 2);
  }
}

// Zeros if `random` is null.
void Allocate(std::mt19937* random, Call* call) {
  AttendRequest& request = call->request;
  call->query.resize(request.QueryBytes());
  call->key.resize(request.KvBytes());
  call->value.resize(request.KvBytes());
  call->output.assign(request.QueryBytes(), std::byte{0xff});
  call->lse.assign(request.LseElements(), -7);
  if (random != nullptr) {
    for (Bytes* tensor : {&call->query, &call->key, &call->value}) Fill(random, tensor);
  }
  request.query = call->query;
  request.key = call->key;
  request.value = call->value;
  request.output = absl::MakeSpan(call->output);
  request.lse = absl::MakeSpan(call->lse);
}

AttendRequest Shape(uint32_t heads, uint32_t kv_heads, uint32_t head_dim) {
  AttendRequest request;
  request.num_heads = heads;
  request.num_kv_heads = kv_heads;
  request.head_dim = head_dim;
  return request;
}

// The outputs of a fixed list of requests, from the seed alone.
class Script {
 public:
  Script(Client* client, uint64_t seed) : client_(client), random_(seed) {}

  absl::Status Run() {
    for (const Mask& mask : {Mask::None(), Mask::Causal(), Mask::SlidingWindow(5, 2)}) {
      for (const Layout layout : {Layout::kNHD, Layout::kHND}) {
        AttendRequest request = Shape(4, 2, 64);
        request.spans = {{7, 33}, {1, 200}, {64, 64}};
        request.mask = mask;
        request.layout = layout;
        if (absl::Status status = Attend(request); !status.ok()) return status;
      }
    }
    AttendRequest large = Shape(8, 8, 64);
    large.spans = {{512, 512}};
    absl::Status status = Attend(large);
    if (status.ok()) status = Resident();
    return status;
  }

  const std::vector<Bytes>& outputs() const { return outputs_; }
  const std::vector<std::vector<float>>& lses() const { return lses_; }

 private:
  absl::Status Attend(const AttendRequest& shape) {
    Call call;
    call.request = shape;
    Allocate(&random_, &call);
    AttendResult result;
    absl::Status status = client_->Attend(call.request, &result);
    outputs_.push_back(call.output);
    lses_.push_back(call.lse);
    if (!status.ok()) return status;
    // The same from a callback and a stream.
    for (const bool stream : {false, true}) {
      bool resident = false;
      for (const SpanShape& span : shape.spans) resident |= !span.sequence_id.empty();
      if (resident) break;
      call.output.assign(call.output.size(), std::byte{0xff});
      call.request.request_id = "again";
      absl::Notification done;
      const auto callback = [&](const absl::Status& answer, AttendResult) {
        status = answer;
        done.Notify();
      };
      if (stream) {
        const auto opened = client_->OpenStream();
        status = opened->Send(call.request, callback);
        if (!status.ok()) return status;
        done.WaitForNotification();
        status.Update(opened->Finish());
      } else {
        client_->AttendAsync(call.request, callback);
        done.WaitForNotification();
      }
      if (!status.ok()) return status;
      if (call.output != outputs_.back()) return absl::DataLossError("other bits from a callback");
    }
    return status;
  }

  absl::Status Resident() {
    SequenceOptions options;
    options.num_layers = 2;
    options.num_kv_heads = 2;
    options.head_dim = 64;
    absl::StatusOr<Sequence> sequence = client_->CreateSequence(options);
    if (!sequence.ok()) return sequence.status();
    Bytes key(700 * sequence->RowBytes()), value(key.size());
    for (uint32_t layer = 0; layer < 2; ++layer) {
      Fill(&random_, &key);
      Fill(&random_, &value);
      const auto layout = layer == 0 ? Layout::kNHD : Layout::kHND;
      const auto info = sequence->Append(layer, key, value, layout, 0);
      if (!info.ok()) return info.status();
    }
    absl::StatusOr<Sequence> fork = sequence->Fork(300);
    if (!fork.ok()) return fork.status();
    AttendRequest request = Shape(8, 2, 64);
    request.mask = Mask::Causal();
    for (uint64_t step = 0; step < 5; ++step) {
      request.layer = step % 2;
      const uint64_t grown = step / 2;
      request.spans = {{1, 1, sequence->id(), 700 + grown}, {3, 1, fork->id(), 300 + grown}};
      if (absl::Status status = Attend(request); !status.ok()) return status;
    }
    request.spans = {{1, 1, sequence->id(), 5}};
    request.layer = 0;
    if (Attend(request).code() != absl::StatusCode::kFailedPrecondition) {
      return absl::DataLossError("expected_length was not checked");
    }
    auto info = sequence->Truncate(64);
    if (!info.ok()) return info.status();
    auto listed = client_->ListSequences();
    if (!listed.ok()) return listed.status();
    using Op = SequenceOperation;
    const auto deleted = client_->ManageSequences({Op::Delete(*fork), Op::Delete(*sequence)});
    absl::Status status = deleted.status();
    for (const SequenceResult& result : deleted.value_or(std::vector<SequenceResult>())) {
      status.Update(result.sequence.status());
    }
    if (sequence->Info().status().code() != absl::StatusCode::kNotFound) {
      return absl::DataLossError("a deleted sequence is there");
    }
    return status;
  }

  Client* const client_;
  std::mt19937 random_;
  std::vector<Bytes> outputs_;
  std::vector<std::vector<float>> lses_;
};

int Report(const absl::Status& status, absl::string_view more = "") {
  std::printf("{\"ok\": %s, \"status\": \"%s\"%s%s}\n", status.ok() ? "true" : "false",
              std::string(status.message()).c_str(), more.empty() ? "" : ", ",
              std::string(more).c_str());
  return status.ok() ? 0 : 1;
}

int Compare(const char* local_target, const char* grpc_target, uint64_t seed) {
  const auto local = Client::Create(local_target);
  const auto grpc = Client::Create(grpc_target);
  if (!local.ok() || !grpc.ok()) return Report(absl::InvalidArgumentError("targets"));
  Script over_local(local->get(), seed), over_grpc(grpc->get(), seed);
  absl::Status status = over_local.Run();
  status.Update(over_grpc.Run());
  if (status.ok() &&
      (over_local.outputs() != over_grpc.outputs() || over_local.lses() != over_grpc.lses())) {
    status = absl::DataLossError("the outputs differ");
  }
  return Report(status, absl::StrCat("\"requests\": ", over_local.outputs().size()));
}

// Decodes on one sequence whose K and V elements are all one number, so that it is the output.
absl::Status DecodeOn(Client* client, int number, const std::atomic<bool>& stop,
                      std::atomic<int>* ready, std::atomic<int>* steps, std::atomic<int>* reloads) {
  const uint16_t element =
      kernels::FromFloat(kernels::DType::kFloat16, static_cast<float>(number + 1));
  uint64_t rows = kPromptRows;
  const auto make = [&](const SequenceOptions& how) -> absl::StatusOr<Sequence> {
    absl::StatusOr<Sequence> made = client->CreateSequence(how);
    if (!made.ok()) return made;
    const std::vector<uint16_t> all(rows * 32, element);
    const absl::Span<const std::byte> bytes = {reinterpret_cast<const std::byte*>(all.data()),
                                               all.size() * 2};
    const auto info = made->Append(0, bytes, bytes, Layout::kNHD, 0);
    return info.ok() ? made : info.status();
  };
  SequenceOptions options;
  options.num_kv_heads = 1;
  options.head_dim = 32;
  absl::StatusOr<Sequence> sequence = make(options);
  if (!sequence.ok()) return sequence.status();
  sequence->OnLost([&](const SequenceOptions& lost) {
    ++*reloads;
    return make(lost);
  });
  const std::vector<uint16_t> row(32, element);
  std::vector<uint16_t> output(32);
  AttendResult result;
  while (!stop) {
    AttendRequest request;
    request.spans = {{1, 1, {}, rows}};
    request.num_heads = 1;
    request.query = request.key =
        request.value = {reinterpret_cast<const std::byte*>(row.data()), row.size() * 2};
    output.assign(32, 0);
    request.output = {reinterpret_cast<std::byte*>(output.data()), output.size() * 2};
    const absl::Status status = sequence->Attend(request, &result);
    if (!status.ok()) return status;
    if (output != row || result.sequence_lengths != std::vector<uint64_t>{rows + 1}) {
      return absl::DataLossError("the answer is of another sequence");
    }
    if (rows++ == kPromptRows) ++*ready;
    ++*steps;
  }
  return sequence->Delete();
}

int Decode(const char* target) {
  ClientOptions options;
  options.timeout = absl::Minutes(1);
  options.retry.max_attempts = 1000;  // a restart of the server takes a while
  options.retry.max_backoff = absl::Milliseconds(50);
  const auto client = Client::Create(target, options);
  if (!client.ok()) return Report(client.status());
  std::atomic<bool> stop{false};
  std::atomic<int> ready{0}, steps{0}, reloads{0};
  absl::Mutex mutex;
  absl::Status first;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const absl::Status status = DecodeOn(client->get(), i, stop, &ready, &steps, &reloads);
      absl::MutexLock lock(&mutex);
      first.Update(status);
    });
  }
  std::thread reporter([&] {
    int printed = 0;
    while (!stop) {
      if (ready == 4 && steps >= printed + 20) {  // every thread has made a step
        printed = steps;
        std::printf("{\"steps\": %d}\n", printed);
        std::fflush(stdout);
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
  });
  char ignored = 0;
  while (read(STDIN_FILENO, &ignored, 1) > 0) {
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  reporter.join();
  return Report(first,
                absl::StrCat("\"steps\": ", steps.load(), ", \"reloads\": ", reloads.load()));
}

// Requests of a minute's work, for a server that has no limit for it.
int Patient(const char* target) {
  const auto client = Client::Create(target);
  if (!client.ok()) return Report(client.status());
  const auto run_small = [&] {
    std::mt19937 random(1);
    Call small;
    small.request = Shape(1, 1, 64);
    small.request.spans = {{1, 1}};
    Allocate(&random, &small);
    return (*client)->Attend(small.request, nullptr);
  };
  if (absl::Status status = run_small(); !status.ok()) return Report(status);  // it is connected
  Call first, second;
  for (Call* call : {&first, &second}) {
    call->request = Shape(1, 1, 32);
    call->request.spans = {{192 << 10, 192 << 10}};
    Allocate(/*random=*/nullptr, call);
  }
  CallOptions options;
  options.deadline = absl::Now() + absl::Milliseconds(50);
  if ((*client)->Attend(first.request, nullptr, options).code() !=
      absl::StatusCode::kDeadlineExceeded) {
    return Report(absl::DataLossError("no deadline"));
  }
  absl::Notification done;
  absl::Status status;
  CallHandle handle =
      (*client)->AttendAsync(second.request, [&](const absl::Status& s, AttendResult) {
        status = s;
        done.Notify();
      });
  handle.Cancel();
  done.WaitForNotification();
  if (status.code() != absl::StatusCode::kCancelled) {
    return Report(absl::DataLossError(absl::StrCat("not cancelled: ", status.ToString())));
  }
  return Report(run_small());
}

// Makes three sequences under a lease, says so, and waits.
int Lease(const char* target) {
  ClientOptions options;
  options.lease = true;
  const auto client = Client::Create(target, options);
  if (!client.ok()) return Report(client.status());
  SequenceOptions shape;
  shape.num_kv_heads = 1;
  shape.head_dim = 32;
  const absl::StatusOr<Sequence> sequence = (*client)->CreateSequence(shape);
  if (!sequence.ok()) return Report(sequence.status());
  const std::vector<std::byte> rows(100 * sequence->RowBytes());
  absl::Status status = sequence->Append(0, rows, rows, Layout::kNHD).status();
  if (!status.ok()) return Report(status);
  const absl::StatusOr<Sequence> fork = sequence->Fork();
  if (!fork.ok()) return Report(fork.status());
  const auto results = (*client)->ManageSequences({SequenceOperation::Fork(*fork)});
  if (!results.ok()) return Report(results.status());
  if (!results->front().sequence.ok()) return Report(results->front().sequence.status());
  std::puts("ready");
  std::fflush(stdout);
  char ignored = 0;
  while (read(STDIN_FILENO, &ignored, 1) > 0) {
  }
  return Report(fork->Info().status());
}

}  // namespace
}  // namespace flashcore

int main(int argc, char** argv) {
  const std::string command = argc > 2 ? argv[1] : "";
  uint64_t seed = 1;
  if (argc > 4 && !absl::SimpleAtoi(argv[4], &seed)) return 2;
  if (command == "compare" && argc > 3) return flashcore::Compare(argv[2], argv[3], seed);
  if (command == "decode") return flashcore::Decode(argv[2]);
  if (command == "patient") return flashcore::Patient(argv[2]);
  if (command == "lease") return flashcore::Lease(argv[2]);
  return 2;
}

// Where a host's time for a decode step goes, without a transport and without a device: the median
// of each step over many requests, and its allocations on the heap.
//
//   flashcore-host-step-bench [--spans=64] [--rows=4096] [--layers=1] [--steps=2000]
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "flashcore/v1/attention.pb.h"
#include "kernels/cuda/work_list.h"
#include "kernels/plan_cache.h"
#include "kernels/sm80/tiles.h"
#include "proto/grpc/message_view.h"
#include "server/engine/batcher.h"
#include "server/engine/work.h"
#include "server/kv/operation.h"
#include "server/kv/sequence_store.h"
#include "server/request/validate.h"
#include "server/telemetry/metrics.h"
#include "server/transport/grpc/adapters.h"
#include "server/transport/rpc/message.h"

ABSL_FLAG(uint32_t, spans, 64, "sequences that one request decodes");
ABSL_FLAG(uint32_t, rows, 4096, "rows of each sequence before the first step");
ABSL_FLAG(uint32_t, layers, 1, "layers, which take turns");
ABSL_FLAG(int, steps, 2000, "measured steps");

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes); memory != nullptr) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*bytes*/) noexcept { std::free(memory); }

namespace flashcore::server {
namespace {

constexpr uint32_t kHeads = 32, kKvHeads = 8, kHeadDim = 128;
constexpr size_t kRowBytes = kKvHeads * kHeadDim * 2;
constexpr int kWorkers = 132;  // multiprocessors

// The steps of a request, in the order in which they first ended.
class StepTimes {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void Begin() {
    next_ = 0;
    count_ = allocations;
    last_ = std::chrono::steady_clock::now();
  }
  // The step `name` has ended; the next one begins.
  void End(const char* name) {
    const Time now = std::chrono::steady_clock::now();
    const int64_t count = allocations;
    if (next_ == steps_.size()) steps_.push_back({name, {}, 0});
    Step& step = steps_[next_++];
    step.us.push_back(std::chrono::duration<double, std::micro>(now - last_).count());
    step.allocations = count - count_;
    count_ = allocations;
    last_ = std::chrono::steady_clock::now();
  }
  void Clear() {
    for (Step& step : steps_) step.us.clear();
  }

  void Print(uint32_t spans) {
    double total = 0;
    std::printf("%-34s %10s %12s %12s\n", "step", "us", "us a span", "allocations");
    for (Step& step : steps_) {
      const auto middle = step.us.begin() + static_cast<std::ptrdiff_t>(step.us.size() / 2);
      std::nth_element(step.us.begin(), middle, step.us.end());
      std::printf("%-34s %10.2f %12.3f %12lld\n", step.name, *middle, *middle / spans,
                  static_cast<long long>(step.allocations));
      total += *middle;
    }
    std::printf("%-34s %10.2f %12.3f\n", "all", total, total / spans);
  }

 private:
  struct Step {
    const char* name;
    std::vector<double> us;
    int64_t allocations;
  };
  std::vector<Step> steps_;
  size_t next_ = 0;
  int64_t count_ = 0;
  Time last_;
};

// A store, a queue and staging memory, as an Engine has them. K/V memory is only address space.
struct Host {
  Host() : sequences(Options(), Memory(), &clock, &metrics.device(0)), batcher({}, &clock) {}

  static SequenceStore::Options Options() {
    SequenceStore::Options options;
    options.dtypes = {kernels::DType::kFloat16};
    options.head_dims[kernels::KvDType::kSameAsQuery] = {kHeadDim};
    options.idle_timeout = std::chrono::hours(1);
    return options;
  }
  static KvMemory Memory() {
    constexpr size_t kBytes = size_t{256} << 30;
    void* const memory =
        mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return {static_cast<std::byte*>(memory), kBytes, size_t{32} << 20};
  }

  SteadyClock clock;
  Metrics metrics{{"bench", {{"cpu", "cpu", "cpu"}}, {}}};
  StagingPool staging{size_t{1} << 30, StagingPool::HeapAllocator()};
  SequenceStore sequences;
  Batcher batcher;
};

const Identity kCaller = {"bench", {}};

v1::AttendRequest Message(const std::vector<std::string>& ids, uint32_t layer, uint64_t length) {
  v1::AttendRequest message;
  message.set_request_id("0-123");
  message.set_dtype(v1::DTYPE_FLOAT16);
  message.set_layout(v1::LAYOUT_NHD);
  message.set_num_heads(kHeads);
  message.set_num_kv_heads(kKvHeads);
  message.set_head_dim(kHeadDim);
  message.set_layer(layer);
  message.mutable_mask()->set_kind(v1::Mask::KIND_CAUSAL);
  for (const std::string& id : ids) {
    v1::Span* span = message.add_spans();
    span->set_query_rows(1);
    span->set_kv_rows(1);
    span->set_sequence_id(id);
    span->set_expected_length(length);
  }
  message.set_query(std::string(ids.size() * kHeads * kHeadDim * 2, 'q'));
  message.set_key(std::string(ids.size() * kRowBytes, 'k'));
  message.set_value(std::string(ids.size() * kRowBytes, 'v'));
  return message;
}

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

// A lane's lists, which it reuses.
struct Lane {
  Batch batch;
  Launch launch;
  std::vector<kernels::Span> spans;
  kernels::PlanCache plans;
  std::vector<std::byte> lists = std::vector<std::byte>(size_t{16} << 20);
};

void Step(Host* host, const std::string& bytes, Lane* lane, StepTimes* times) {
  const RequestLimits limits = {4096, 1024, {kernels::DType::kFloat16}, {kHeadDim}, 1e18};
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer message(&slice, 1);
  auto operation = std::make_unique<AttendOperation>();
  operation->identity = kCaller;
  TensorFields tensors;
  bool well_formed = false;
  times->Begin();
  Check(ParseAttend(wire::ViewOf(message), nullptr, operation.get(), &tensors, &well_formed));
  times->End("receive: parse");
  Check(ValidateAttend(operation->request, limits));
  times->End("receive: validate");
  Check(host->sequences.Lease(operation.get()));
  times->End("receive: lease");
  operation->tensors.claim()->client = operation->identity.name;
  Check(operation->tensors.Allocate(operation->request, &host->staging));
  times->End("receive: staging memory");
  AttendOperation* displaced = nullptr;
  Check(host->batcher.Enqueue(operation.get(), &displaced));
  times->End("queue: enqueue");
  host->batcher.Take(&lane->batch);
  times->End("queue: take");
  host->sequences.BeginLaunch(
      lane->batch.operations, [](AttendOperation*) { return true; }, &lane->launch);
  times->End("launch: begin");
  for (const auto& [refused, status] : lane->launch.refused) Check(status);
  operation->work = EstimateWork(*operation, true, {});
  times->End("launch: estimate of its work");
  lane->spans.clear();
  AppendSpans(lane->launch, nullptr, lane->launch.pages.data(), &lane->spans);
  times->End("launch: spans");
  const kernels::AttentionBatch batch = {lane->launch.geometry(), lane->spans.data(),
                                         static_cast<int32_t>(lane->spans.size())};
  const kernels::Plan& plan = lane->plans.Get(batch, kernels::sm80::PlanFor(kHeadDim), kWorkers);
  times->End("device: plan (sm80)");
  const kernels::WorkListLayout layout(batch, plan);
  kernels::PackWorkList(batch, plan, layout,
                        lane->lists.data());  // its launch does, if it is small
  times->End("device: work list (sm80)");
  host->sequences.EndLaunch(lane->launch, true);
  times->End("complete: end of the launch");
  host->batcher.Release(lane->batch);
  times->End("complete: release the queue's slots");
  operation->sequences.Reset();
  times->End("complete: end of the lease");
  { const grpc::ByteBuffer reply = ToByteBuffer(EncodeReply(operation.get())); }
  times->End("reply: encode");
  operation.reset();
  times->End("reply: destroy the operation");
}

void Load(Host* host, const std::string& id, uint32_t layers, uint32_t rows) {
  for (uint32_t layer = 0; layer < layers; ++layer) {
    AttendOperation operation;
    AttendRequest& request = operation.request;
    request.num_heads = kHeads;
    request.num_kv_heads = kKvHeads;
    request.head_dim = kHeadDim;
    request.layer = layer;
    request.append_only = true;
    operation.identity = kCaller;
    for (uint32_t done = 0; done < rows;) {
      const uint32_t count = std::min<uint32_t>(rows - done, 512);
      request.spans.resize(1);
      request.spans[0].kv_rows = count;
      request.spans[0].sequence_id = id;
      Check(host->sequences.Lease(&operation));
      Launch launch;
      AttendOperation* const operations[] = {&operation};
      host->sequences.BeginLaunch(
          operations, [](AttendOperation*) { return true; }, &launch);
      for (const auto& [refused, status] : launch.refused) Check(status);
      host->sequences.EndLaunch(launch, true);
      operation.sequences.Reset();
      done += count;
    }
  }
}

void Run(uint32_t spans, uint32_t rows, uint32_t layers, int steps) {
  Host host;
  std::vector<std::string> ids;
  for (uint32_t i = 0; i < spans; ++i) {
    const auto info =
        host.sequences.Create({layers, kKvHeads, kHeadDim, kernels::DType::kFloat16}, {}, kCaller);
    Check(info.status());
    ids.push_back(info->id.ToBytes());
  }
  for (const std::string& id : ids) Load(&host, id, layers, rows);
  Lane lane;
  StepTimes times;
  const int warmup = std::max(steps / 10, 2 * static_cast<int>(layers));
  for (int i = 0; i < warmup + steps; ++i) {
    if (i == warmup) times.Clear();
    const uint32_t layer = static_cast<uint32_t>(i) % layers;
    const uint64_t length = rows + static_cast<uint32_t>(i) / layers;
    Step(&host, Message(ids, layer, length).SerializeAsString(), &lane, &times);
  }
  std::printf("%u spans of %u rows, %u layers\n", spans, rows, layers);
  times.Print(spans);
}

}  // namespace
}  // namespace flashcore::server

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  flashcore::server::Run(absl::GetFlag(FLAGS_spans), absl::GetFlag(FLAGS_rows),
                         absl::GetFlag(FLAGS_layers), absl::GetFlag(FLAGS_steps));
}

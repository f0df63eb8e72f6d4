#include "client/local/timeline.h"

#include <utility>

namespace flashcore::client::local {
namespace {

// Whether a counter has reached `value`: they wrap.
bool Reached(uint64_t counter, uint64_t value) {
  return static_cast<int64_t>(counter - value) >= 0;
}

}  // namespace

Timelines::~Timelines() {
  if (!open_.load()) return;
  pinned_ = PinnedMemory();  // waits; meanwhile the hook releases streams
  connection_->RemoveEndHook(end_hook_);
}

Status Timelines::Open(CuStream stream, SteadyTime deadline) {
  if (open_.load(std::memory_order_acquire)) return {};
  const TimedMutex::Lock lock(&open_mutex_, deadline);
  if (!lock.status().ok() || open_.load(std::memory_order_relaxed)) return lock.status();
  Status status = Make(stream, deadline);
  if (!status.ok()) return status;
  end_hook_ = connection_->AddEndHook([this] { return ReleaseStreams(); });
  open_.store(true, std::memory_order_release);
  return {};
}

Status Timelines::Make(CuStream stream, SteadyTime deadline) {
  Status status = CudaDriver::Get(&driver_);
  if (!status.ok()) return status;
  CuContext context = nullptr;
  status = driver_->Check(driver_->cuStreamGetCtx(stream, &context), "cuStreamGetCtx");
  if (!status.ok()) return status;
  Memory memory;
  PinnedMemory pinned;
  status = Memory::Create(kMaxStreams * sizeof(Counters), &memory);
  if (status.ok()) {
    status = PinnedMemory::Pin(*driver_, context, memory.data(), memory.bytes(), &pinned);
  }
  if (status.ok()) {
    status = connection_->Register(memory, /*read_only=*/false, deadline, &region_id_);
  }
  if (!status.ok()) return status;
  memory_ = std::move(memory);
  pinned_ = std::move(pinned);
  return {};
}

Status Timelines::Order(CuStream stream, std::string_view* fields) {
  constexpr uint32_t kWait = 4, kWrite = 5;    // CU_STREAM_MEM_OP_{WAIT,WRITE}_VALUE_64
  constexpr uint32_t kWaitGreaterOrEqual = 0;  // CU_STREAM_WAIT_VALUE_GEQ
  constexpr uint32_t kInputsReady = 39, kResultsReady = 40;  // of AttendRequest
  constexpr uint32_t kRegion = 1, kOffset = 2, kValue = 3;   // of TimelinePoint
  size_t index = 0;
  const Status status = Find(stream, &index);
  if (!status.ok()) return status;
  const uint64_t inputs = index * sizeof(Counters) + offsetof(Counters, inputs);
  const uint64_t results = index * sizeof(Counters) + offsetof(Counters, results);
  // Taken even if the rest fails: the stream may have written it.
  const uint64_t request = ++streams_[index].last;
  CuMemOp operations[] = {{kWrite, pinned_.address() + inputs, request, 0, 0, 0},
                          {kWait, pinned_.address() + results, request, kWaitGreaterOrEqual, 0, 0}};
  // Both in one call: it takes half as long, and the request is not sent unless it is awaited.
  const int result = driver_->cuStreamBatchMemOp(stream, 2, operations, 0);
  if (result != 0) return driver_->Check(result, "cuStreamBatchMemOp");
  streams_[index].awaited.store(request);
  fields_.Clear();
  const auto add = [&](uint32_t field, uint64_t offset) {
    point_.Clear().Bytes(kRegion, region_id_).Number(kOffset, offset).Number(kValue, request);
    fields_.Bytes(field, point_.message());
  };
  add(kInputsReady, inputs);
  add(kResultsReady, results);
  *fields = fields_.message();
  return {};
}

Status Timelines::Find(CuStream stream, size_t* index) {
  int capturing = 0;
  Status status =
      driver_->Check(driver_->cuStreamIsCapturing(stream, &capturing), "cuStreamIsCapturing");
  if (!status.ok()) return status;
  if (capturing != 0) {
    return {kFailedPrecondition,
            "stream: it is being captured into a CUDA graph, which would submit nothing when it "
            "runs; submit outside of the capture",
            ""};
  }
  uint64_t id = 0;  // handles are used again
  status = driver_->Check(driver_->cuStreamGetId(stream, &id), "cuStreamGetId");
  if (!status.ok()) return status;
  for (*index = 0; *index < used_; ++*index) {
    if (streams_[*index].id == id) return {};
  }
  if (used_ < kMaxStreams) {
    ++used_;
  } else {
    for (*index = 0; *index < kMaxStreams && !Idle(*index);) ++*index;
  }
  if (*index == kMaxStreams) {
    return {kResourceExhausted,
            "stream: " + std::to_string(kMaxStreams) +
                " other streams of this client have unfinished requests; use fewer streams",
            ""};
  }
  streams_[*index].id = id;
  return {};
}

bool Timelines::Idle(size_t index) const {
  const Counters& shared = counters()[index];
  const Stream& stream = streams_[index];
  return Reached(shared.inputs.value.load(), stream.last) &&
         Reached(shared.results.value.load(), stream.awaited.load());
}

// The server's GPU may still write results of requests that had begun, which sets a counter back.
// So this runs again and again.
bool Timelines::ReleaseStreams() {
  for (size_t i = 0; i < kMaxStreams; ++i) {
    std::atomic<uint64_t>& results = counters()[i].results.value;
    const uint64_t awaited = streams_[i].awaited.load();
    uint64_t value = results.load();
    while (!Reached(value, awaited) && !results.compare_exchange_weak(value, awaited)) {
    }
  }
  return true;
}

}  // namespace flashcore::client::local

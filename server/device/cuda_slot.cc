#include "server/device/cuda_slot.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "kernels/smxx/work_list.h"
#include "server/base/align.h"
#include "server/device/cuda_status.h"
#include "server/request/spans.h"

namespace flashcore::server {
namespace {

size_t AlignUp(size_t bytes) { return server::AlignUp(bytes, StagingPool::kAlignment); }

// Where what lies at `at` in a tensor that starts at `from` lies in its copy at `to`.
template <class T, class From, class To>
void Move(T** at, const From* from, To* to) {
  if (*at != nullptr) *at = to + (*at - from);
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSlot>> CudaSlot::Create(const Options& options) {
  auto slot = absl::WrapUnique(new CudaSlot(options));
  if (absl::Status status = slot->Allocate(); !status.ok()) return status;
  return slot;
}

absl::Status CudaSlot::Allocate() {
  absl::Status status = Store(MakeStream(), &stream_);
  const bool blocks = options_.wait == WaitStrategy::kBlock;
  for (CudaEvent& mark : marks_) {
    if (status.ok()) {
      status = Store(MakeEvent(blocks ? cudaEventBlockingSync : cudaEventDefault), &mark);
    }
  }
  if (status.ok()) {
    status = Store(AllocateDevice(options_.tensor_bytes, "a lane's tensors"), &tensors_);
  }
  if (status.ok()) {
    status = Store(AllocateDevice(options_.workspace_bytes, "a lane's workspace"), &workspace_);
  }
  if (status.ok()) {
    status = Store(AllocatePinned(options_.list_bytes, "a lane's lists"), &pinned_lists_);
  }
  if (status.ok()) {
    status = Store(AllocateDevice(options_.list_bytes, "a lane's lists"), &device_lists_);
  }
  lists_ = UploadBlock(pinned_lists_.get(), device_lists_.get(), options_.list_bytes);
  return status;
}

absl::Status CudaSlot::Start(const kernels::Kernel& kernel, const std::byte* arena,
                             const Launch& launch) {
  launch_ = &launch;
  spans_.clear();
  AppendSpans(launch, arena, launch.pages.data(), &spans_);
  is_direct_ = IsDirect(kernel, launch);
  unsent_appends_ = {};
  times_ = {};
  const absl::Status status = EnqueueGroups(kernel, launch);
  // Before staging memory goes back to its pool, nothing may be copying from it or to it.
  if (!status.ok()) (void)Drain();
  return status;
}

absl::Status CudaSlot::Wait() {
  if (absl::Status status = WaitAndAddTimes(); !status.ok()) {
    (void)Drain();
    return status;
  }
  for (AttendOperation* operation : launch_->operations) {
    operation->times.copy_in = times_.copy_in;
    operation->times.kernel = times_.kernel;
    operation->times.copy_out = times_.copy_out;
  }
  return absl::OkStatus();
}

absl::Status CudaSlot::CopyPages(int64_t page_bytes, absl::Span<const kernels::PageCopy> copies) {
  const absl::Status status = EnqueueCopies(page_bytes, copies);
  const absl::Status drained = Drain();
  return status.ok() ? drained : status;
}

// Q, O, LSE and rows to append are read or written once. Inline K/V is read once for each tile of
// packed rows, and only a span with so few rows that they fit the smallest tile surely has one.
bool CudaSlot::IsDirect(const kernels::Kernel& kernel, const Launch& launch) const {
  size_t bytes = 0;
  for (const AttendOperation* operation : launch.operations) {
    if (!operation->tensors.in_reach()) return false;
    bytes += operation->tensors.input_bytes() + operation->tensors.result_bytes();
  }
  const kernels::PlanOptions& plan = kernel.plan_options;
  const int32_t tile_rows = plan.min_tile_rows > 0 ? plan.min_tile_rows : plan.tile_rows;
  const int32_t group = launch.geometry().group();
  const auto reads_once = [&](const kernels::Span& span) {
    return span.kv.pages != nullptr || int64_t{span.query_rows} * group <= tile_rows;
  };
  return bytes <= options_.direct_bytes && std::all_of(spans_.begin(), spans_.end(), reads_once);
}

absl::Status CudaSlot::EnqueueGroups(const kernels::Kernel& kernel, const Launch& launch) {
  Remaining remaining = {launch.operations, launch.appends, absl::MakeSpan(spans_)};
  absl::Status status = Record(kStart);
  if (status.ok()) status = EnqueueCopies(launch.page_layout().page_bytes(), launch.copies);
  while (status.ok()) {
    const auto spans = PlaceGroup(&remaining);
    if (!spans.ok()) return spans.status();
    status = EnqueueGroup(kernel, launch, *spans);
    if (!status.ok() || remaining.operations.empty()) break;
    status = WaitAndAddTimes();
    if (status.ok()) status = Record(kStart);
  }
  return status;
}

absl::StatusOr<absl::Span<kernels::Span>> CudaSlot::PlaceGroup(Remaining* remaining) {
  group_.clear();
  appends_.clear();
  kernels::Span* const first_span = remaining->spans.data();
  size_t used = 0;
  while (!remaining->operations.empty()) {
    const AttendOperation& operation = *remaining->operations.front();
    const AttendTensors& tensors = operation.tensors;
    const size_t input_bytes = AlignUp(tensors.input_bytes());
    const size_t bytes = is_direct_ ? 0 : input_bytes + AlignUp(tensors.result_bytes());
    if (bytes > options_.tensor_bytes - used) {
      if (!group_.empty()) break;
      return absl::ResourceExhaustedError(absl::StrCat("the request's tensors need ", bytes,
                                                       " bytes of device memory; a lane has ",
                                                       options_.tensor_bytes));
    }
    auto* const at = static_cast<std::byte*>(tensors_.get()) + used;
    group_.push_back({&operation, at, at + input_bytes});
    const AttendRequest& request = operation.request;
    PlaceOne(group_.back(), request.append_only ? 0 : request.spans.size(), remaining);
    remaining->operations.remove_prefix(1);
    used += bytes;
  }
  return absl::MakeSpan(first_span, remaining->spans.data());
}

void CudaSlot::PlaceOne(const Placed& placed, size_t num_spans, Remaining* remaining) {
  const AttendTensors& tensors = placed.operation->tensors;
  const TensorAddresses from = tensors.addresses();
  const TensorAddresses to = is_direct_ ? from : tensors.InBlocks(placed.inputs, placed.results);
  for (kernels::Span& span : remaining->spans.first(num_spans)) {
    Move(&span.query, from.query, to.query);
    Move(&span.output, from.output, to.output);
    Move(&span.lse, from.lse, to.lse);
    if (span.kv.pages != nullptr) continue;
    Move(&span.kv.key, from.key, to.key);
    Move(&span.kv.value, from.value, to.value);
  }
  remaining->spans.remove_prefix(num_spans);
  // Appends are in the order of the operations, and of each as many as its rows.
  int64_t rows = 0;
  for (const SpanShape& span : placed.operation->request.spans) {
    if (!span.sequence_id.empty()) rows += span.kv_rows;
  }
  while (rows > 0) {
    kernels::RowAppend append = remaining->appends.front();
    Move(&append.key, from.key, to.key);
    Move(&append.value, from.value, to.value);
    appends_.push_back(append);
    rows -= append.rows;
    remaining->appends.remove_prefix(1);
  }
}

absl::Status CudaSlot::EnqueueGroup(const kernels::Kernel& kernel, const Launch& launch,
                                    absl::Span<kernels::Span> spans) {
  absl::Status status = CopyIn();
  if (status.ok()) status = EnqueueAppends();
  if (status.ok()) status = Attend(kernel, launch.geometry(), spans);
  if (status.ok()) status = CopyOut();
  return status;
}

absl::Status CudaSlot::CopyIn() {
  if (is_direct_) return absl::OkStatus();
  for (const Placed& placed : group_) {
    for (const AttendTensors::Piece& piece : placed.operation->tensors.inputs()) {
      const cudaError_t error = cudaMemcpyAsync(placed.inputs + piece.offset, piece.host,
                                                piece.bytes, cudaMemcpyHostToDevice, stream());
      if (error != cudaSuccess) return CudaStatus(error, "cudaMemcpyAsync of inputs");
    }
  }
  return absl::OkStatus();
}

absl::Status CudaSlot::CopyOut() {
  if (is_direct_) return Record(kDone);
  for (const Placed& placed : group_) {
    for (const AttendTensors::Piece& piece : placed.operation->tensors.results()) {
      const cudaError_t error = cudaMemcpyAsync(piece.host, placed.results + piece.offset,
                                                piece.bytes, cudaMemcpyDeviceToHost, stream());
      if (error != cudaSuccess) return CudaStatus(error, "cudaMemcpyAsync of results");
    }
  }
  return Record(kDone);
}

absl::Status CudaSlot::EnqueueCopies(int64_t page_bytes,
                                     absl::Span<const kernels::PageCopy> copies) {
  absl::Status status;
  while (status.ok() && !copies.empty()) {
    const auto list = TakeList(&copies);
    if (!list.ok()) return list.status();
    status = Send();
    if (!status.ok()) break;
    const auto count = static_cast<int32_t>(list->size());
    status = CudaStatus(kernels::CopyPagesCuda(page_bytes, list->data(), count, stream()),
                        "CopyPagesCuda");
  }
  return status;
}

// The last of them travel with the lists of the first piece.
absl::Status CudaSlot::EnqueueAppends() {
  absl::Span<const kernels::RowAppend> appends = appends_;
  absl::Status status;
  while (status.ok() && !appends.empty()) {
    const auto list = TakeList(&appends);
    if (!list.ok()) return list.status();
    unsent_appends_ = *list;
    if (!appends.empty()) status = Send();
  }
  return status;
}

// Moves as many of `*items`, of which there are some, to lists_ as there is room for, after waiting
// for room if there is none. Returns where they will be on the device. All else has been sent.
template <class Item>
absl::StatusOr<absl::Span<const Item>> CudaSlot::TakeList(absl::Span<const Item>* items) {
  if (lists_.room() < sizeof(Item)) {
    if (absl::Status status = Drain(); !status.ok()) return status;
  }
  const size_t count = std::min(items->size(), lists_.room() / sizeof(Item));
  std::byte* const list = lists_.Take(count * sizeof(Item));
  std::memcpy(list, items->data(), count * sizeof(Item));
  items->remove_prefix(count);
  return absl::MakeConstSpan(reinterpret_cast<const Item*>(lists_.OnDevice(list)), count);
}

absl::Status CudaSlot::Attend(const kernels::Kernel& kernel, const kernels::Geometry& geometry,
                              absl::Span<const kernels::Span> spans) {
  const size_t num_spans = spans.size();
  size_t count = num_spans;  // of the next piece
  absl::Status status;
  if (spans.empty()) {
    status = Send();
    if (status.ok()) status = Record(kCopied);
  }
  while (status.ok() && !spans.empty()) {
    count = std::min(count, spans.size());
    std::byte* const work_list = PackPiece(kernel, geometry, spans.first(count));
    if (work_list == nullptr) {
      status = MakeRoom(&count);
      continue;
    }
    status = Send();
    if (status.ok() && spans.size() == num_spans) status = Record(kCopied);
    if (!status.ok()) break;
    const kernels::LaunchContext context = {workspace_.get(), nullptr, stream(),
                                            lists_.OnDevice(work_list)};
    const kernels::AttentionBatch piece = {geometry, piece_.data(), static_cast<int32_t>(count)};
    status = CudaStatus(kernel.launch(piece, plan_, context), "the attention kernel");
    spans.remove_prefix(count);
  }
  return status.ok() ? Record(kAttended) : status;
}

std::byte* CudaSlot::PackPiece(const kernels::Kernel& kernel, const kernels::Geometry& geometry,
                               absl::Span<const kernels::Span> spans) {
  piece_.assign(spans.begin(), spans.end());
  const kernels::AttentionBatch batch = {geometry, piece_.data(),
                                         static_cast<int32_t>(piece_.size())};
  // While the page tables are still on the host.
  kernels::MakePlan(batch, kernel.plan_options, options_.multiprocessors, &plan_);
  if (plan_.workspace_bytes > options_.workspace_bytes) return nullptr;
  const size_t used = lists_.used();
  std::byte* const work_list = lists_.Take(kernels::WorkListBytes(plan_));
  if (work_list == nullptr || !PackPageTables()) {
    lists_.Rewind(used);
    return nullptr;
  }
  kernels::PackWorkList(batch, plan_, work_list);
  return work_list;
}

bool CudaSlot::PackPageTables() {
  for (kernels::Span& span : piece_) {
    if (span.kv.pages == nullptr) continue;
    const size_t bytes = kernels::PagesFor(span.kv.rows) * sizeof(int32_t);
    std::byte* const table = lists_.Take(bytes);
    if (table == nullptr) return false;
    std::memcpy(table, span.kv.pages, bytes);
    span.kv.pages = reinterpret_cast<const int32_t*>(lists_.OnDevice(table));
  }
  return true;
}

absl::Status CudaSlot::MakeRoom(size_t* count) {
  if (lists_.used() > 0) {
    const absl::Status status = Send();
    return status.ok() ? Drain() : status;
  }
  if (*count == 1) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a span's partial results need ", plan_.workspace_bytes, " bytes; a lane has ",
                     options_.workspace_bytes, ", and ", options_.list_bytes,
                     " for page tables and work lists"));
  }
  *count = (*count + 1) / 2;
  return absl::OkStatus();
}

absl::Status CudaSlot::Send() {
  const UploadBlock::Unsent unsent = lists_.TakeUnsent();
  if (unsent.bytes == 0) return absl::OkStatus();
  const absl::Status status = CudaStatus(
      cudaMemcpyAsync(unsent.device, unsent.host, unsent.bytes, cudaMemcpyHostToDevice, stream()),
      "cudaMemcpyAsync of lists");
  if (!status.ok() || unsent_appends_.empty()) return status;
  const auto appends = std::exchange(unsent_appends_, {});
  return CudaStatus(kernels::AppendRowsCuda(launch_->page_layout(), appends.data(),
                                            static_cast<int32_t>(appends.size()), stream()),
                    "AppendRowsCuda");
}

// Waits for all that is enqueued.
absl::Status CudaSlot::Drain() {
  lists_.Clear();
  return CudaStatus(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
}

absl::Status CudaSlot::Record(Mark mark) {
  return CudaStatus(cudaEventRecord(marks_[mark].get(), stream()), "cudaEventRecord");
}

absl::Status CudaSlot::AwaitDone() const {
  const cudaEvent_t done = marks_[kDone].get();
  if (options_.wait == WaitStrategy::kBlock) {
    return CudaStatus(cudaEventSynchronize(done), "cudaEventSynchronize");
  }
  cudaError_t error;
  while ((error = cudaEventQuery(done)) == cudaErrorNotReady) {
    if (options_.wait == WaitStrategy::kYield) std::this_thread::yield();
  }
  return CudaStatus(error, "cudaEventQuery");
}

absl::Status CudaSlot::WaitAndAddTimes() {
  absl::Status status = AwaitDone();
  lists_.Clear();
  const auto add = [&](Mark from, Mark to, Nanoseconds* time) {
    float ms = 0;
    if (!status.ok()) return;
    status = CudaStatus(cudaEventElapsedTime(&ms, marks_[from].get(), marks_[to].get()),
                        "cudaEventElapsedTime");
    *time += std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<float, std::milli>(ms));
  };
  add(kStart, kCopied, &times_.copy_in);
  add(kCopied, kAttended, &times_.kernel);
  add(kAttended, kDone, &times_.copy_out);
  return status;
}

}  // namespace flashcore::server

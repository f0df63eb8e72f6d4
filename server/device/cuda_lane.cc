#include "server/device/cuda_lane.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "kernels/cuda/work_list.h"
#include "server/base/error_info.h"
#include "server/device/l2_window.h"
#include "server/request/tensors.h"

namespace flashcore::server {
namespace {

size_t AlignUp(size_t bytes) { return server::AlignUp(bytes, StagingPool::kAlignment); }

// Device memory for the tensors of any one request: Q, K and V; O, as large as Q; LSE, at most 1/16
// of Q (head_dim 32); and padding for their alignment.
size_t TensorBytes(size_t max_request_bytes) {
  constexpr size_t kPadding = 8 * StagingPool::kAlignment;
  return 2 * max_request_bytes + max_request_bytes / 16 + kPadding;
}

// Most row tiles that a pass may split over K/V, counted for each KV head.
constexpr size_t kMaxCombines = size_t{64} << 10;

// Moves `*at`, an address in a tensor at `from`, to the same element of the tensor's copy at `to`.
template <class T, class From, class To>
void Move(T** at, const From* from, To* to) {
  if (*at != nullptr) *at = to + (*at - from);
}

// Null if the streams of this GPU cannot write 64-bit values.
const CudaDriver* DriverWithMemOps(int ordinal) {
  const CudaDriver* const driver = CudaDriver::Get().value_or(nullptr);
  if (driver == nullptr) return nullptr;
  CUdevice device = 0;
  int has = 0;
  const bool known = driver->get_device(&device, ordinal) == CUDA_SUCCESS &&
                     driver->get_attribute(&has, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
                                           device) == CUDA_SUCCESS;
  return known && has != 0 ? driver : nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaLane>> CudaLane::Create(const CudaDevice::Options& options,
                                                           int multiprocessors) {
  auto lane = absl::WrapUnique(new CudaLane(options, multiprocessors));
  CudaAllocator take;
  take.Stream(StreamPriority::kHigh, &lane->stream_);
  take.Branches(StreamPriority::kHigh, &lane->branches_);
  for (CudaEvent& mark : lane->marks_) take.Event(cudaEventDefault, &mark);
  take.Memory(lane->tensor_bytes_, "a lane's tensors", &lane->tensors_);
  take.Memory(options.workspace_bytes, "a lane's workspace", &lane->workspace_);
  take.ZeroedMemory(kMaxCombines * sizeof(int32_t), "a lane's counters", &lane->finished_);
  take.Memory(options.list_bytes, "a lane's lists", &lane->pinned_lists_);
  take.Memory(options.list_bytes, "a lane's lists", &lane->device_lists_);
  if (!take.status().ok()) return take.status();
  lane->lists_ =
      UploadBlock(lane->pinned_lists_.get(), lane->device_lists_.get(), options.list_bytes);
  return lane;
}

CudaLane::CudaLane(const CudaDevice::Options& options, int multiprocessors)
    : options_(options),
      multiprocessors_(multiprocessors),
      tensor_bytes_(TensorBytes(options.max_request_bytes)),
      driver_(DriverWithMemOps(options.ordinal)) {}

absl::Status CudaLane::SetL2Window(std::byte* base, size_t bytes) const {
  absl::Status status = server::SetL2Window(stream(), base, bytes);
  for (int i = 0; i < kernels::Branches::kMost && status.ok(); ++i) {
    status = server::SetL2Window(branches_.stream(i), base, bytes);
  }
  return status;
}

absl::Status CudaLane::Stage(const kernels::Kernel& kernel, const std::byte* arena,
                             const Launch& launch) {
  if (!can_stage_) return absl::UnimplementedError("the driver captures no launches");
  Begin(kernel, arena, launch);
  absl::Status status = PlaceOperations();
  if (status.ok()) status = PackLists();
  if (status.ok() && !(pending_.empty() && unplaced_.operations.empty())) {
    status = absl::UnimplementedError("the launch has several passes");
  }
  if (status.ok()) status = UploadLists();
  if (!status.ok()) return status;
  captures_ = true;
  status = graph_.Make(stream(), [this] {
    absl::Status enqueued = Record(kStart);
    if (enqueued.ok()) enqueued = CopyInputs();
    return enqueued.ok() ? EnqueueWork() : enqueued;
  });
  captures_ = false;
  can_stage_ = status.ok();
  return status;
}

void CudaLane::Begin(const kernels::Kernel& kernel, const std::byte* arena, const Launch& launch) {
  lists_.Rewind(0);  // of a launch that was staged, and not dispatched
  for (AttendOperation* operation : launch.operations) operation->raised_by_device = false;
  kernel_ = &kernel;
  launch_ = &launch;
  spans_.clear();
  AppendSpans(launch, arena, launch.pages.data(), &spans_);
  is_direct_ = IsDirect();
  unplaced_ = {launch.operations, launch.appends, absl::MakeSpan(spans_)};
  placed_.clear();
  pending_ = {launch.copies, {}, {}};
  times_ = {};
}

absl::Status CudaLane::Dispatch(const kernels::Kernel& kernel, const std::byte* arena,
                                const Launch& launch) {
  absl::Status status;
  if (launch.staged) {
    status = graph_.Launch(stream());
    if (status.ok()) status = Record(kDone);
  } else {
    Begin(kernel, arena, launch);
    status = EnqueuePass();
  }
  while (status.ok() && !(placed_.empty() && unplaced_.operations.empty())) {
    status = CompletePass();
    if (status.ok()) status = EnqueuePass();
  }
  // The staging memory of a failed launch returns to its pool, so no copy of it may be under way.
  if (!status.ok()) (void)Drain();
  return status;
}

absl::Status CudaLane::Complete() {
  if (absl::Status status = CompletePass(); !status.ok()) {
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

absl::Status CudaLane::CopyPages(int64_t page_bytes, absl::Span<const kernels::PageCopy> copies) {
  absl::Status status;
  while (status.ok() && !copies.empty()) {
    pass_.copies = Pack(&copies);
    status = UploadLists();
    if (status.ok()) status = LaunchCopies(page_bytes);
    const absl::Status drained = Drain();
    if (status.ok()) status = drained;
  }
  return status;
}

// Kernels read or write Q, O, LSE and rows to append once. They read inline K/V once per tile of
// packed rows; only a span whose rows fit the smallest tile is sure to have one tile.
bool CudaLane::IsDirect() const {
  size_t bytes = 0;
  for (const AttendOperation* operation : launch_->operations) {
    if (!operation->tensors.in_reach()) return false;
    bytes += operation->tensors.input_bytes() + operation->tensors.result_bytes();
  }
  const int32_t tile_rows = kernel_->plan_options.least_tile_rows();
  const int32_t group = launch_->geometry().group();
  const auto reads_once = [&](const kernels::Span& span) {
    return span.kv.pages != nullptr || int64_t{span.query_rows} * group <= tile_rows;
  };
  return bytes <= options_.direct_io_bytes && std::all_of(spans_.begin(), spans_.end(), reads_once);
}

absl::Status CudaLane::EnqueuePass() {
  absl::Status status = Record(kStart);
  if (status.ok() && placed_.empty()) {
    status = PlaceOperations();
    if (status.ok()) status = CopyInputs();
  }
  if (status.ok()) status = PackLists();
  if (status.ok()) status = UploadLists();
  if (status.ok()) status = EnqueueWork();
  return status.ok() ? Record(kDone) : status;
}

absl::Status CudaLane::EnqueueWork() {
  absl::Status status = LaunchCopies(launch_->page_layout().page_bytes());
  if (status.ok()) status = LaunchAppends();
  if (status.ok()) status = Record(kCopied);
  if (status.ok()) status = LaunchAttention();
  if (status.ok()) status = Record(kAttended);
  if (status.ok() && pending_.empty()) {
    status = CopyResults();
    if (status.ok()) status = RaiseResultsReady();
    placed_.clear();
  }
  return status;
}

absl::Status CudaLane::CompletePass() {
  absl::Status status = WaitForDone();
  lists_.Rewind(0);
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

// Places as many operations as have room for their tensors.
absl::Status CudaLane::PlaceOperations() {
  placed_appends_.clear();
  kernels::Span* const first_span = unplaced_.spans.data();
  size_t used = 0;
  while (!unplaced_.operations.empty()) {
    AttendOperation& operation = *unplaced_.operations.front();
    const size_t input_bytes = AlignUp(operation.tensors.input_bytes());
    const size_t bytes = is_direct_ ? 0 : input_bytes + AlignUp(operation.tensors.result_bytes());
    if (bytes > tensor_bytes_ - used) {
      if (!placed_.empty()) break;
      return WithTooLarge(absl::ResourceExhaustedError(
                              absl::StrCat("the request's tensors need ", bytes,
                                           " bytes of device memory; a lane has ", tensor_bytes_)),
                          bytes, tensor_bytes_);
    }
    auto* const at = static_cast<std::byte*>(tensors_.get()) + used;
    placed_.push_back({&operation, at, at + input_bytes});
    PlaceTensors(placed_.back());
    unplaced_.operations.remove_prefix(1);
    used += bytes;
  }
  pending_.appends = placed_appends_;
  pending_.spans = absl::MakeSpan(first_span, unplaced_.spans.data());
  max_spans_ = pending_.spans.size();
  return absl::OkStatus();
}

// Gives the operation's appends and spans the device addresses of its tensors.
void CudaLane::PlaceTensors(const PlacedOperation& placed) {
  const AttendTensors& tensors = placed.operation->tensors;
  const AttendRequest& request = placed.operation->request;
  const TensorAddresses from = tensors.addresses();
  const TensorAddresses to = is_direct_ ? from : tensors.InBlocks(placed.inputs, placed.results);
  const size_t num_spans = request.append_only ? 0 : request.spans.size();
  for (kernels::Span& span : unplaced_.spans.first(num_spans)) {
    Move(&span.query, from.query, to.query);
    Move(&span.output, from.output, to.output);
    Move(&span.lse, from.lse, to.lse);
    if (span.kv.pages != nullptr || span.kv.rows == 0) continue;
    Move(&span.kv.key, from.key, to.key);
    Move(&span.kv.value, from.value, to.value);
  }
  unplaced_.spans.remove_prefix(num_spans);
  int64_t rows = 0;  // that the operation appends: its appends are next and have as many
  for (const SpanShape& span : request.spans) {
    if (!span.sequence_id.empty()) rows += span.kv_rows;
  }
  while (rows > 0 && !unplaced_.appends.empty()) {  // later parts append nothing
    kernels::RowAppend append = unplaced_.appends.front();
    Move(&append.key, from.key, to.key);
    Move(&append.value, from.value, to.value);
    placed_appends_.push_back(append);
    rows -= append.rows;
    unplaced_.appends.remove_prefix(1);
  }
}

absl::Status CudaLane::CopyInputs() {
  if (is_direct_) return absl::OkStatus();
  CopyQueue copies(cudaMemcpyHostToDevice, stream());
  for (const PlacedOperation& placed : placed_) {
    if (launch_->in_parts) {
      AddInputsOfPart(placed, &copies);
      continue;
    }
    for (const AttendTensors::Piece& piece : placed.operation->tensors.inputs()) {
      copies.Add(piece.region, placed.inputs + piece.offset, piece.host, piece.bytes);
    }
  }
  return CudaStatus(copies.Flush(), "cudaMemcpyAsync of inputs");
}

// Adds the query rows of the part, and K/V if the part appends or if any span reads inline K/V.
void CudaLane::AddInputsOfPart(const PlacedOperation& placed, CopyQueue* copies) const {
  const AttendTensors& tensors = placed.operation->tensors;
  const AttendRequest& request = placed.operation->request;
  const TensorAddresses to = tensors.InBlocks(placed.inputs, placed.results);
  const auto in_block = [&](const std::byte* at) { return placed.inputs + (at - placed.inputs); };
  for (const kernels::Span& span : spans_) {
    copies->Add(tensors.region(kQuery), RowsOfPart(span, span.row_stride, span.head_stride),
                in_block(span.query), tensors.query() + (span.query - to.query));
  }
  const auto reads_inline = [](const kernels::Span& span) {
    return span.kv.pages == nullptr && span.kv.rows > 0;
  };
  if (launch_->appends.empty() && std::none_of(spans_.begin(), spans_.end(), reads_inline)) return;
  copies->Add(tensors.region(kKey), in_block(to.key), tensors.key(), request.key_bytes);
  copies->Add(tensors.region(kValue), in_block(to.value), tensors.value(), request.value_bytes);
}

// The query rows of a span that the part computes.
RowBlock CudaLane::RowsOfPart(const kernels::Span& span, int64_t row_stride,
                              int64_t head_stride) const {
  const kernels::Geometry geometry = launch_->geometry();
  return RowBlock::Of(kernels::QueryRowsOf(geometry, kernel_->plan_options, span), span.query_rows,
                      geometry.num_heads, row_stride, head_stride);
}

// Takes what fits of the pending work, in order: all copies run before any append, and all appends
// before any span.
absl::Status CudaLane::PackLists() {
  pass_.spans.clear();
  pass_.copies = Pack(&pending_.copies);
  pass_.appends = {};
  if (pending_.copies.empty()) pass_.appends = PackAppends();
  if (!pending_.copies.empty() || !pending_.appends.empty()) return absl::OkStatus();
  return PackSpans();
}

// Moves as many of `*items` to lists_ as there is room for. Returns their place in device memory.
template <class Item>
absl::Span<const Item> CudaLane::Pack(absl::Span<const Item>* items) {
  const size_t count = std::min(items->size(), lists_.room() / sizeof(Item));
  if (count == 0) return {};
  std::byte* const list = lists_.Take(count * sizeof(Item));
  std::memcpy(list, items->data(), count * sizeof(Item));
  items->remove_prefix(count);
  return absl::MakeConstSpan(reinterpret_cast<const Item*>(lists_.OnDevice(list)), count);
}

// Few appends travel in the kernel's parameters.
absl::Span<const kernels::RowAppend> CudaLane::PackAppends() {
  absl::Span<const kernels::RowAppend>& pending = pending_.appends;
  constexpr size_t kFew = kernels::kAppendsInParameters;
  if (std::min(pending.size(), lists_.room() / sizeof(kernels::RowAppend)) > kFew) {
    return Pack(&pending);
  }
  const absl::Span<const kernels::RowAppend> few = pending.first(std::min(pending.size(), kFew));
  pending.remove_prefix(few.size());
  return few;
}

absl::Status CudaLane::PackSpans() {
  while (!pending_.spans.empty()) {
    const size_t count = std::min(max_spans_, pending_.spans.size());
    if (TryPackSpans(pending_.spans.first(count))) {
      pending_.spans.remove_prefix(count);
      break;
    }
    if (lists_.used() > 0)
      break;  // copies or appends have taken the room: the next pass has it all
    if (count == 1) {
      return WithTooLarge(absl::ResourceExhaustedError(absl::StrCat(
                              "a span's partial results need ", pass_.plan->workspace_bytes,
                              " bytes; a lane has ", options_.workspace_bytes, ", and ",
                              options_.list_bytes, " for page tables and work lists")),
                          pass_.plan->workspace_bytes, options_.workspace_bytes);
    }
    max_spans_ = (count + 1) / 2;
  }
  return absl::OkStatus();
}

// Plans `spans`, and packs what the kernel reads besides tensors. False if that does not fit.
bool CudaLane::TryPackSpans(absl::Span<const kernels::Span> spans) {
  const size_t used = lists_.used();
  pass_.spans.assign(spans.begin(), spans.end());
  kernels::PlanOptions plan_options = kernel_->plan_options;
  if (!options_.share_prefixes) plan_options.cascade_rows = 0;
  pass_.plan = &plans_.Get(PassBatch(), plan_options, multiprocessors_);
  if (pass_.plan->workspace_bytes <= options_.workspace_bytes &&
      pass_.plan->combines.size() <= kMaxCombines) {
    const kernels::WorkListLayout layout(PassBatch(), *pass_.plan);
    pass_.work_list = lists_.Take(layout.BytesInMemory());
    if (pass_.work_list != nullptr) {
      if (layout.BytesInMemory() > 0) {
        kernels::PackWorkList(PassBatch(), *pass_.plan, layout, pass_.work_list);
      }
      return true;
    }
  }
  lists_.Rewind(used);
  pass_.spans.clear();
  return false;
}

kernels::AttentionBatch CudaLane::PassBatch() const {
  return {launch_->geometry(), pass_.spans.data(), static_cast<int32_t>(pass_.spans.size())};
}

absl::Status CudaLane::UploadLists() {
  if (lists_.used() == 0) return absl::OkStatus();
  return CudaStatus(cudaMemcpyAsync(device_lists_.get(), pinned_lists_.get(), lists_.used(),
                                    cudaMemcpyHostToDevice, stream()),
                    "cudaMemcpyAsync of lists");
}

absl::Status CudaLane::LaunchCopies(int64_t page_bytes) {
  if (pass_.copies.empty()) return absl::OkStatus();
  const auto count = static_cast<int32_t>(pass_.copies.size());
  return CudaStatus(kernels::CopyPagesCuda(page_bytes, pass_.copies.data(), count, stream()),
                    "CopyPagesCuda");
}

absl::Status CudaLane::LaunchAppends() {
  if (pass_.appends.empty()) return absl::OkStatus();
  const auto count = static_cast<int32_t>(pass_.appends.size());
  return CudaStatus(
      kernels::AppendRowsCuda(launch_->page_layout(), pass_.appends.data(), count, stream()),
      "AppendRowsCuda");
}

absl::Status CudaLane::LaunchAttention() {
  if (pass_.spans.empty()) return absl::OkStatus();
  const kernels::LaunchContext context = {workspace_.get(),
                                          nullptr,
                                          {stream(), lists_.OnDevice(pass_.work_list),
                                           static_cast<int32_t*>(finished_.get()), &branches_}};
  return CudaStatus(kernel_->launch(PassBatch(), *pass_.plan, context), "the attention kernel");
}

absl::Status CudaLane::CopyResults() {
  if (is_direct_) return absl::OkStatus();
  CopyQueue copies(cudaMemcpyDeviceToHost, stream());
  for (const PlacedOperation& placed : placed_) {
    if (launch_->in_parts) {
      AddResultsOfPart(placed, &copies);
      continue;
    }
    for (const AttendTensors::Piece& piece : placed.operation->tensors.results()) {
      copies.Add(piece.region, piece.host, placed.results + piece.offset, piece.bytes);
    }
  }
  return CudaStatus(copies.Flush(), "cudaMemcpyAsync of results");
}

// Adds only what the part has written: other parts wrote the rest.
void CudaLane::AddResultsOfPart(const PlacedOperation& placed, CopyQueue* copies) const {
  const AttendTensors& tensors = placed.operation->tensors;
  const TensorAddresses from = tensors.InBlocks(placed.inputs, placed.results);
  for (const kernels::Span& span : spans_) {
    copies->Add(tensors.region(kOutput), RowsOfPart(span, span.row_stride, span.head_stride),
                tensors.output() + (span.output - from.output), span.output);
  }
  constexpr int64_t kBytes = sizeof(float);
  for (const kernels::Span& span : spans_) {
    if (span.lse == nullptr) continue;
    copies->Add(tensors.region(kLse),
                RowsOfPart(span, kBytes * span.lse_row_stride, kBytes * span.lse_head_stride),
                reinterpret_cast<std::byte*>(tensors.lse() + (span.lse - from.lse)),
                reinterpret_cast<const std::byte*>(span.lse));
  }
}

bool CudaLane::EndsWithThisPart() const { return !launch_->in_parts || launch_->is_last_part; }

// Raises the counters of the placed operations. The host raises them a moment later if the driver
// cannot, or they are out of reach.
absl::Status CudaLane::RaiseResultsReady() {
  if (driver_ == nullptr || !EndsWithThisPart()) return absl::OkStatus();
  raises_.clear();
  for (const PlacedOperation& placed : placed_) {
    const TimelinePoint& results = placed.operation->request.results_ready;
    if (results.region == nullptr || !results.region->in_reach()) continue;
    CUstreamBatchMemOpParams raise = {};
    raise.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    raise.writeValue.address = reinterpret_cast<CUdeviceptr>(results.counter());
    raise.writeValue.value64 = results.value;
    raises_.push_back(raise);
    placed.operation->raised_by_device = true;
  }
  constexpr size_t kMost = 256;  // of one call
  for (size_t first = 0; first < raises_.size(); first += kMost) {
    const auto count = static_cast<unsigned>(std::min(kMost, raises_.size() - first));
    absl::Status status = driver_->StatusOf(
        driver_->batch_mem_op(stream(), count, &raises_[first], 0), "cuStreamBatchMemOp");
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CudaLane::Record(Mark mark) {
  const unsigned flags = captures_ ? cudaEventRecordExternal : cudaEventRecordDefault;
  return CudaStatus(cudaEventRecordWithFlags(marks_[mark].get(), stream(), flags),
                    "cudaEventRecord");
}

// Polls, and lets other threads use the core in between: on an H100, a decode step took 1.16 times
// as long with polls without a break, and 1.25 times with a thread that the driver wakes.
absl::Status CudaLane::WaitForDone() const {
  const cudaEvent_t done = marks_[kDone].get();
  cudaError_t error;
  while ((error = cudaEventQuery(done)) == cudaErrorNotReady) std::this_thread::yield();
  return CudaStatus(error, "cudaEventQuery");
}

// Waits for everything that is enqueued.
absl::Status CudaLane::Drain() {
  lists_.Rewind(0);
  return CudaStatus(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
}

}  // namespace flashcore::server

#include "client/bench/workload.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "client/bench/reply_check.h"

namespace flashcore::cli {
namespace {

constexpr Tensor kInputs[] = {Tensor::kQuery, Tensor::kKey, Tensor::kValue};
constexpr size_t kAlignment = 64;                // of a tensor
constexpr size_t kPieceBytes = size_t{1} << 19;  // of K, and of V, in one append
constexpr size_t kSpotCheckSpans = 4;            // of the first reply; one KV head of each

// The finaliser of SplitMix64: a bijection that mixes well.
uint64_t Mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

SequenceOptions SequenceOf(const LoadOptions& options) {
  SequenceOptions sequence;
  sequence.num_kv_heads = options.shape.num_kv_heads;
  sequence.head_dim = options.shape.head_dim;
  sequence.dtype = options.shape.dtype;
  sequence.kv_dtype = options.resident.kv_dtype;
  sequence.pin = options.resident.pin;
  sequence.idle_timeout = options.resident.idle_timeout;
  return sequence;
}

// Appends rows [first, last) of `source` to a sequence that has `first` rows.
absl::Status AppendRows(const Sequence& sequence, const RowSource& source, Layout layout,
                        uint64_t first, uint64_t last) {
  const uint32_t heads = sequence.options().num_kv_heads;
  const uint64_t piece_rows = std::max<uint64_t>(1, kPieceBytes / sequence.RowBytes());
  std::vector<uint16_t> key, value;
  while (first < last) {
    const uint64_t rows = std::min(piece_rows, last - first);
    key.resize(rows * heads * source.head_dim);
    value.resize(key.size());
    source.Fill(Tensor::kKey, first, rows, 0, heads, layout, absl::MakeSpan(key));
    source.Fill(Tensor::kValue, first, rows, 0, heads, layout, absl::MakeSpan(value));
    const absl::Status status =
        sequence.Append(/*layer=*/0, Bytes(key), Bytes(value), layout, first).status();
    if (!status.ok()) return status;
    first += rows;
  }
  return absl::OkStatus();
}

}  // namespace

void RowSource::Fill(Tensor tensor, uint64_t first_row, uint64_t rows, uint32_t first_head,
                     uint32_t heads, Layout layout, absl::Span<uint16_t> out) const {
  const bool half = dtype == DType::kFloat16;
  const uint16_t random_bits = half ? 0x83ff : 0x807f;  // sign and mantissa
  const uint16_t exponent = half ? 0x3800 : 0x3f00;     // of the numbers from 1/2 to 1
  for (uint64_t i = 0; i < rows; ++i) {
    const uint64_t row = first_row + i;
    const uint64_t row_seed = Mix(row < prefix_rows ? 0 : seed) + (row << 20);
    for (uint32_t j = 0; j < heads; ++j) {
      uint16_t* const to = &out[(layout == Layout::kNHD ? i * heads + j : j * rows + i) * head_dim];
      uint64_t state =
          Mix(row_seed + (uint64_t{first_head + j} << 2 | static_cast<uint64_t>(tensor)));
      for (uint32_t d = 0; d < head_dim; d += 4) {
        uint64_t bits = Mix(state += 0x9e3779b97f4a7c15);
        for (uint32_t k = d; k < std::min(d + 4, head_dim); ++k, bits >>= 16) {
          to[k] = static_cast<uint16_t>((bits & random_bits) | exponent);
        }
      }
    }
  }
}

absl::StatusOr<Sequence> CreatePrefix(const LoadOptions& options, Client* client) {
  const RowSource source{options.shape.dtype, options.shape.head_dim};
  const auto create = [=, layout = options.shape.layout, rows = options.resident.fork_from_prefix](
                          const SequenceOptions& how) -> absl::StatusOr<Sequence> {
    absl::StatusOr<Sequence> sequence = client->CreateSequence(how);
    if (!sequence.ok()) return sequence;
    absl::Status status = AppendRows(*sequence, source, layout, 0, rows);
    if (status.ok()) return sequence;
    sequence->Delete().IgnoreError();  // `status` says what went wrong
    return status;
  };
  SequenceOptions prefix = SequenceOf(options);
  prefix.shared = true;  // over another address, the server takes this process for another client
  absl::StatusOr<Sequence> sequence = create(prefix);
  if (sequence.ok()) sequence->OnLost(create);
  return sequence;
}

Workload::Workload(const LoadOptions& options, Client* client)
    : client_(client), request_(options.shape), share_memory_(options.shared_memory) {}

std::unique_ptr<Workload> Workload::Inline(const LoadOptions& options, int index, Client* client) {
  auto workload = absl::WrapUnique(new Workload(options, client));
  workload->seed_ = static_cast<uint64_t>(index) + 1;
  if (options.mode != BenchMode::kAttend) {  // a decode step
    const int share = ShareOf(options.resident.sequences, index, options.concurrency);
    workload->request_.mask = Mask::Causal();
    workload->request_.spans.assign(static_cast<size_t>(share), {1, options.resident.context});
  }
  return workload;
}

std::unique_ptr<Workload> Workload::Resident(const LoadOptions& options, int index, Client* client,
                                             const Sequence* prefix) {
  auto workload = absl::WrapUnique(new Workload(options, client));
  const ResidentOptions& resident = options.resident;
  const int share = ShareOf(resident.sequences, index, options.concurrency);
  if (Prefills(options.mode, index, options.concurrency)) {
    workload->start_ = resident.fork_from_prefix;
    workload->end_ = resident.context;
    workload->step_rows_ = resident.prefill_rows;
  } else {
    workload->start_ = resident.context;
    workload->end_ = workload->start_ + kDecodeGrowth;
    workload->group_ = static_cast<size_t>(share);
  }
  workload->prefix_ = prefix;
  workload->sequence_options_ = SequenceOf(options);
  workload->request_.mask = Mask::Causal();
  for (int i = 0; i < share; ++i) {  // a seed of its own for every sequence, and not 0
    const uint64_t seed = (static_cast<uint64_t>(index) + 1) << 32 | static_cast<uint64_t>(i);
    workload->contexts_.push_back(
        {{options.shape.dtype, options.shape.head_dim, seed, resident.fork_from_prefix}});
  }
  return workload;
}

absl::Status Workload::Setup() {
  if (contexts_.empty()) return FillInline();
  for (Context& context : contexts_) {
    if (absl::Status status = Load(&context); !status.ok()) return status;
    sequence_options_.device_id = context.sequence->options().device_id;
  }
  first_in_group_ = 0;
  length_ = start_;
  restore_ = false;
  return absl::OkStatus();
}

absl::Status Workload::Prepare() {
  absl::Status status;
  if (restore_) {
    status = Setup();
  } else if (!contexts_.empty() && length_ == end_) {
    status = NextGroup();
  }
  if (status.ok() && !contexts_.empty()) status = FillStep();
  if (!status.ok()) return status;
  // Shows an output that was not written.
  for (size_t i = 0; i < kProbes; ++i) Probe(i) = kNanBits;
  return status;
}

bool Workload::Accept(const AttendResult& result) {
  bool correct = true;
  if (!contexts_.empty()) {
    correct = result.sequence_lengths == std::vector<uint64_t>(group_, length_ + rows_);
  }
  if (correct && first_replies_.empty()) {
    correct = contexts_.empty() ? SpotCheck(ToKernelBatch(request_)) : SpotCheckStep();
  }
  if (correct) {
    std::array<uint16_t, kProbes> got;
    for (size_t i = 0; i < kProbes; ++i) got[i] = Probe(i);
    const uint64_t step = first_in_group_ * end_ + length_;
    correct = first_replies_.try_emplace(step, got).first->second == got;
  }
  length_ += rows_;
  restore_ = !correct && !contexts_.empty();
  return correct;
}

void Workload::OnError(const absl::Status& status) {
  // A full queue changes nothing: the same request can be sent again.
  restore_ = !contexts_.empty() && !absl::IsResourceExhausted(status);
}

absl::Status Workload::Teardown() {
  absl::Status first;
  for (Context& context : contexts_) {
    if (!context.sequence.has_value()) continue;
    const absl::Status status = context.sequence->Delete();
    context.sequence.reset();
    if (!absl::IsNotFound(status)) first.Update(status);
    // Do not wait for a timeout of each of them.
    if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) break;
  }
  return first;
}

double Workload::RequestFlop() const {
  double flop = 0;
  for (const SpanShape& span : request_.spans) {
    const uint64_t kv_rows = span.expected_length.value_or(0) + span.kv_rows;
    flop += AttentionFlop(request_, span.query_rows, kv_rows);
  }
  return flop;
}

absl::Span<Workload::Context> Workload::Group() {
  return absl::MakeSpan(contexts_).subspan(first_in_group_, group_);
}

// Makes the sequence anew, with `start_` rows.
absl::Status Workload::Load(Context* context) {
  if (context->sequence.has_value()) context->sequence->Delete().IgnoreError();  // or it expires
  ForkOptions fork;
  fork.length = context->rows.prefix_rows;
  fork.pin = sequence_options_.pin;
  fork.idle_timeout = sequence_options_.idle_timeout;
  absl::StatusOr<Sequence> sequence =
      prefix_ == nullptr ? client_->CreateSequence(sequence_options_) : prefix_->Fork(fork);
  if (!sequence.ok()) return sequence.status();
  context->sequence = *sequence;
  return AppendRows(*sequence, context->rows, request_.layout, context->rows.prefix_rows, start_);
}

absl::Status Workload::NextGroup() {
  for (Context& context : Group()) {
    absl::Status status = context.sequence->Truncate(start_, end_).status();
    restore_ = !status.ok();
    if (!status.ok()) return status;
  }
  first_in_group_ = (first_in_group_ + group_) % contexts_.size();
  length_ = start_;
  return absl::OkStatus();
}

absl::Status Workload::FillInline() {
  const absl::Status status = AllocateTensors();
  if (!status.ok()) return status;
  const RowSource source{request_.dtype, request_.head_dim, seed_};
  for (const Tensor tensor : kInputs) {
    const absl::Span<uint16_t> out = Input(tensor);
    const size_t rows = out.size() / Heads(tensor) / request_.head_dim;
    source.Fill(tensor, 0, rows, 0, Heads(tensor), Layout::kNHD, out);
  }
  return status;
}

absl::Status Workload::FillStep() {
  rows_ = static_cast<uint32_t>(std::min<uint64_t>(step_rows_, end_ - length_));
  request_.spans.clear();
  for (const Context& context : Group()) {
    request_.spans.push_back({rows_, rows_, context.sequence->id(), length_});
  }
  const absl::Status status = AllocateTensors();
  if (!status.ok()) return status;
  for (const Tensor tensor : kInputs) {
    absl::Span<uint16_t> out = Input(tensor);
    const size_t elements = out.size() / group_;
    for (const Context& context : Group()) {
      context.rows.Fill(tensor, length_, rows_, 0, Heads(tensor), request_.layout,
                        out.first(elements));
      out.remove_prefix(elements);
    }
  }
  return status;
}

// Compares some rows of some spans with the reference, over K/V of one head computed again.
bool Workload::SpotCheckStep() {
  const uint64_t kv_rows = length_ + rows_;
  std::vector<uint16_t> key(kv_rows * request_.head_dim), value(key.size());
  for (size_t i = 0; i < std::min(kSpotCheckSpans, group_); ++i) {
    const uint32_t kv_head = static_cast<uint32_t>(i) % request_.num_kv_heads;
    const RowSource& rows = Group()[i].rows;
    rows.Fill(Tensor::kKey, 0, kv_rows, kv_head, 1, Layout::kNHD, absl::MakeSpan(key));
    rows.Fill(Tensor::kValue, 0, kv_rows, kv_head, 1, Layout::kNHD, absl::MakeSpan(value));
    const KernelBatch one_head =
        OneKvHead(ToKernelBatch(request_), i, static_cast<int32_t>(kv_head), key, value);
    const KernelBatch stored = AsStored(one_head, sequence_options_.kv_dtype, request_.precision);
    if (!SpotCheck(stored)) return false;
  }
  return true;
}

absl::Status Workload::AllocateTensors() {
  const auto align = [](size_t size) { return (size + kAlignment - 1) & ~(kAlignment - 1); };
  const size_t query_bytes = request_.QueryBytes(), kv_bytes = request_.KvBytes();
  const size_t bytes = 2 * align(query_bytes) + 2 * align(kv_bytes);
  if (!share_memory_) {
    host_.resize(std::max(host_.size(), bytes));
  } else if (shared_ == nullptr || !shared_->registered() || shared_->bytes() < bytes) {
    shared_.reset();
    absl::StatusOr<std::unique_ptr<SharedMemory>> memory = client_->CreateSharedMemory(bytes);
    if (!memory.ok()) return memory.status();
    shared_ = *std::move(memory);
  }
  tensors_ = share_memory_ ? shared_->data() : host_.data();
  std::byte* at = tensors_;
  request_.query = {at, query_bytes};
  request_.output = {at += align(query_bytes), query_bytes};
  request_.key = {at += align(query_bytes), kv_bytes};
  request_.value = {at + align(kv_bytes), kv_bytes};
  return absl::OkStatus();
}

absl::Span<uint16_t> Workload::Input(Tensor tensor) {
  const auto bytes = tensor == Tensor::kQuery ? request_.query
                     : tensor == Tensor::kKey ? request_.key
                                              : request_.value;
  std::byte* const data = tensors_ + (bytes.data() - request_.query.data());
  return {reinterpret_cast<uint16_t*>(data), bytes.size() / sizeof(uint16_t)};
}

uint32_t Workload::Heads(Tensor tensor) const {
  return tensor == Tensor::kQuery ? request_.num_heads : request_.num_kv_heads;
}

uint16_t& Workload::Probe(size_t i) const {
  const size_t elements = request_.output.size() / sizeof(uint16_t);
  auto* const output = reinterpret_cast<uint16_t*>(request_.output.data());
  return output[i * (elements - 1) / (kProbes - 1)];
}

}  // namespace flashcore::cli

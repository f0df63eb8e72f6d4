// SequenceStore: what a launch takes and gives back.
#include <algorithm>
#include <cassert>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/plan.h"
#include "server/kv/sequence_store.h"
#include "server/request/spans.h"

namespace flashcore::server {
namespace {

// Row numbers are int32 in the kernels; half of that leaves room for every sum.
constexpr uint64_t kMaxRows = std::numeric_limits<int32_t>::max() / 2;

uint64_t LengthOf(const SequenceLayer& layer) {
  return layer.pending != nullptr ? layer.pending->length : layer.length;
}

}  // namespace

void SequenceStore::Begin(absl::Span<AttendOperation* const> operations, Launch* launch) {
  launch->Clear();
  const auto resident = [](const AttendOperation* op) { return !op->sequences.empty(); };
  if (std::none_of(operations.begin(), operations.end(), resident)) {
    launch->operations.assign(operations.begin(), operations.end());
    return;
  }
  MutexLock lock(&mutex_);
  launch->id = ++last_launch_;
  running_.insert(launch->id);
  for (AttendOperation* operation : operations) {
    absl::Status status =
        resident(operation) ? BeginOperation(operation, launch) : absl::OkStatus();
    if (status.ok()) {
      launch->operations.push_back(operation);
    } else {
      launch->refused.emplace_back(operation, std::move(status));
    }
  }
}

absl::Status SequenceStore::BeginOperation(AttendOperation* operation, Launch* launch) {
  const AttendRequest& request = operation->request;
  const auto& sequences = operation->sequences.sequences();
  const size_t copies = launch->copies.size(), appends = launch->appends.size();
  begun_.clear();
  SpanCursor cursor(request, operation->tensors.addresses());
  for (size_t i = 0; i < sequences.size(); ++i, cursor.Advance()) {
    if (sequences[i] == nullptr) continue;
    absl::Status status = BeginSpan(request, i, cursor.tensors(), sequences[i].get(), launch);
    if (!status.ok()) {
      UndoAppends();
      launch->copies.resize(copies);
      launch->appends.resize(appends);
      return status;
    }
    operation->sequence_lengths[i] = LengthOf(sequences[i]->layers[request.layer]);
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i] == nullptr) continue;
    ++sequences[i]->launches;
    if (!request.append_only) {
      AddRead(*operation, i, &sequences[i]->layers[request.layer], sequences[i].get(), launch);
    }
  }
  return absl::OkStatus();
}

absl::Status SequenceStore::BeginSpan(const AttendRequest& request, size_t index,
                                      const SpanTensors& tensors, Sequence* sequence,
                                      Launch* launch) {
  const SpanShape& span = request.spans[index];
  SequenceLayer& layer = sequence->layers[request.layer];
  const uint64_t length = LengthOf(layer);
  if (sequence->deleted) {
    return absl::NotFoundError(absl::StrCat(
        "spans[", index, "].sequence_id: the sequence was deleted while the request was queued"));
  }
  if (span.expected_length.value_or(length) != length) {
    return absl::FailedPreconditionError(
        absl::StrCat("spans[", index, "].expected_length: ", *span.expected_length,
                     "; the sequence has ", length, " rows in layer ", request.layer));
  }
  if (span.kv_rows == 0) return absl::OkStatus();
  if (absl::Status status = BeginAppend(*sequence, &layer, span.kv_rows, launch); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat("spans[", index, "]: ", status.message()));
  }
  AddRowAppends(tensors, span.kv_rows, length, layer, launch);
  return absl::OkStatus();
}

absl::Status SequenceStore::BeginAppend(const Sequence& sequence, SequenceLayer* layer,
                                        uint32_t rows, Launch* launch) {
  const uint64_t length = LengthOf(*layer);
  if (length + rows > kMaxRows) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the sequence would have ", length + rows, " rows; at most ", kMaxRows));
  }
  begun_.push_back({layer, layer->pending == nullptr, 0, length});
  if (layer->pending == nullptr) {
    layer->pending = std::make_unique<PendingAppend>();
    layer->pending->first_page = layer->pages.size();
    layer->pending->length = length;
    layer->pending->launch = launch->id;
  }
  PendingAppend& pending = *layer->pending;
  assert(pending.launch == launch->id);  // the Batcher's order
  begun_.back().pending_pages = pending.pages.size();

  const bool writes_to_last_page = length % kernels::kPageTokens != 0;
  const bool last_page_is_old = pending.first_page == layer->pages.size() && pending.pages.empty();
  if (writes_to_last_page && last_page_is_old && arena_.refs(layer->pages.back()) > 1) {
    absl::StatusOr<PageId> copy = TakePage(sequence);
    if (!copy.ok()) return copy.status();
    --pending.first_page;
    pending.pages.push_back(*copy);
    launch->copies.push_back({arena_.address(layer->pages.back()), arena_.address(*copy)});
  }
  const auto pages = static_cast<size_t>(kernels::PagesFor(static_cast<int32_t>(length + rows)));
  while (pending.first_page + pending.pages.size() < pages) {
    absl::StatusOr<PageId> page = TakePage(sequence);
    if (!page.ok()) return page.status();
    pending.pages.push_back(*page);
  }
  pending.length = length + rows;
  return absl::OkStatus();
}

void SequenceStore::AddRowAppends(const SpanTensors& source, uint32_t rows, uint64_t length,
                                  const SequenceLayer& layer, Launch* launch) {
  for (uint64_t done = 0; done < rows;) {
    const uint64_t at = length + done;
    const uint64_t count = std::min(rows - done, kernels::kPageTokens - at % kernels::kPageTokens);
    const auto offset = static_cast<int64_t>(done) * source.kv_strides.row;
    kernels::RowAppend& append = launch->appends.emplace_back();
    append.key = source.key + offset;
    append.value = source.value + offset;
    append.row_stride = source.kv_strides.row;
    append.head_stride = source.kv_strides.head;
    append.page = arena_.address(PageAt(layer, static_cast<size_t>(at / kernels::kPageTokens)));
    append.row = static_cast<int32_t>(at % kernels::kPageTokens);
    append.rows = static_cast<int32_t>(count);
    done += count;
  }
}

void SequenceStore::UndoAppends() {
  for (auto it = begun_.rbegin(); it != begun_.rend(); ++it) {
    PendingAppend& pending = *it->layer->pending;
    for (size_t i = it->pending_pages; i < pending.pages.size(); ++i) Unref(pending.pages[i]);
    pending.pages.resize(it->pending_pages);
    pending.length = it->length;
    if (it->created) it->layer->pending.reset();
  }
}

absl::StatusOr<PageId> SequenceStore::TakePage(const Sequence& sequence) {
  const size_t bytes = sequence.shape.page_bytes();
  ClientAccounts::Account& account = accounts_[sequence.client];
  if (options_.client_kv_bytes > 0 && account.kv_bytes + bytes > options_.client_kv_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("client quota: the sequences of this client hold ", account.kv_bytes, " of ",
                     options_.client_kv_bytes, " bytes of K/V"));
  }
  const PageId page = AllocateOrEvict(sequence);
  if (page == kNoPage) {
    const size_t used = arena_.used_bytes(Segment::kHot) + arena_.used_bytes(Segment::kCold);
    return absl::ResourceExhaustedError(
        absl::StrCat("K/V memory is full: ", used, " of ", memory_.bytes,
                     " bytes are in use, and no page of ", bytes, " is free"));
  }
  account.kv_bytes += bytes;
  return page;
}

PageId SequenceStore::AllocateOrEvict(const Sequence& sequence) {
  const size_t bytes = sequence.shape.page_bytes();
  const Segment first = sequence.pin ? Segment::kHot : Segment::kCold;
  const Segment second = sequence.pin ? Segment::kCold : Segment::kHot;
  do {
    for (const Segment segment : {first, second}) {
      const PageId page = arena_.Allocate(bytes, segment, sequence.client);
      if (page != kNoPage) return page;
    }
  } while (options_.evict == Eviction::kLru && EvictOne());
  return kNoPage;
}

bool SequenceStore::EvictOne() {
  const auto victim = std::find_if(by_use_.begin(), by_use_.end(),
                                   [](const SequencePtr& s) { return s->users == 0; });
  if (victim == by_use_.end()) return false;
  Remove(SequencePtr(*victim));
  metrics_->sequences_evicted.Increment();
  return true;
}

PageId SequenceStore::PageAt(const SequenceLayer& layer, size_t index) const {
  const PendingAppend* pending = layer.pending.get();
  if (pending == nullptr || index < pending->first_page) return layer.pages[index];
  return pending->pages[index - pending->first_page];
}

void SequenceStore::AddRead(const AttendOperation& operation, size_t span, SequenceLayer* layer,
                            Sequence* sequence, Launch* launch) {
  const auto rows = static_cast<int32_t>(operation.sequence_lengths[span]);
  const auto query_rows = static_cast<int32_t>(operation.request.spans[span].query_rows);
  const auto num_pages = static_cast<size_t>(kernels::PagesFor(rows));
  launch->resident.push_back({launch->pages.size(), rows});
  const kernels::KvRange seen =
      kernels::VisibleKv(operation.request.mask, query_rows, rows, 0, query_rows);
  const size_t page_bytes = sequence->shape.page_bytes();
  size_t hot = 0;  // bytes read there
  size_t cold = 0;
  for (size_t t = 0; t < num_pages; ++t) {
    const PageId page = PageAt(*layer, t);
    launch->pages.push_back(arena_.place(page));
    const auto row = static_cast<int32_t>(t) * kernels::kPageTokens;
    if (row + kernels::kPageTokens <= seen.begin || row >= seen.end) continue;
    const bool is_hot = arena_.segment(page) == Segment::kHot;
    (is_hot ? hot : cold) += page_bytes;
  }
  metrics_->kv_read_hot_bytes.Increment(hot);
  metrics_->kv_read_cold_bytes.Increment(cold);
  sequence->read_rate.Add(static_cast<double>(hot + cold), clock_->Now());
}

void SequenceStore::End(const Launch& launch, bool ok) {
  if (launch.id == 0) return;
  MutexLock lock(&mutex_);
  for (const AttendOperation* operation : launch.operations) {
    for (const SequencePtr& sequence : operation->sequences.sequences()) {
      if (sequence == nullptr) continue;
      --sequence->launches;
      EndAppend(&sequence->layers[operation->request.layer], sequence->deleted, ok);
    }
  }
  running_.erase(launch.id);
  UnrefWhatIsDue();
}

void SequenceStore::EndAppend(SequenceLayer* layer, bool deleted, bool ok) {
  const std::unique_ptr<PendingAppend> pending = std::move(layer->pending);
  if (pending == nullptr) return;
  if (!ok || deleted || pending->discarded) {
    for (const PageId page : pending->pages) Unref(page);
    return;
  }
  // Only a shared page is replaced, and those that share it keep it.
  for (size_t i = pending->first_page; i < layer->pages.size(); ++i) Unref(layer->pages[i]);
  layer->pages.resize(pending->first_page);
  layer->pages.insert(layer->pages.end(), pending->pages.begin(), pending->pages.end());
  layer->length = pending->length;
}

}  // namespace flashcore::server

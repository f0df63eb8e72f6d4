#include "server/kv/launch_builder.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/plan.h"
#include "server/base/error_info.h"
#include "server/request/sequence_errors.h"
#include "server/request/spans.h"
#include "server/request/validate.h"

namespace flashcore::server {
namespace {

// The kernels' row numbers are int32. Half of that leaves room for every sum.
constexpr uint64_t kMaxRows = std::numeric_limits<int32_t>::max() / 2;

constexpr size_t kMaxUnusedPending = 4096;

// Splits `rows` rows of `source`, which start at row `length` of the layer, by page.
void AddRowAppends(const SpanTensors& source, uint32_t rows, uint64_t length,
                   const SequenceLayer& layer, const Arena& arena, Launch* launch) {
  for (uint64_t done = 0; done < rows;) {
    const uint64_t at = length + done;
    const uint64_t count = std::min(rows - done, kernels::kPageTokens - at % kernels::kPageTokens);
    const auto offset = static_cast<int64_t>(done) * source.kv_strides.row;
    kernels::RowAppend& append = launch->appends.emplace_back();
    append.key = source.key + offset;
    append.value = source.value + offset;
    append.row_stride = source.kv_strides.row;
    append.head_stride = source.kv_strides.head;
    append.page = arena.address(layer.PageAt(static_cast<size_t>(at / kernels::kPageTokens)));
    append.row = static_cast<int32_t>(at % kernels::kPageTokens);
    append.rows = static_cast<int32_t>(count);
    done += count;
  }
}

}  // namespace

absl::StatusOr<bool> LaunchBuilder::AddOperation(AttendOperation* operation, LaunchFit fits,
                                                 Launch* launch) {
  const AttendRequest& request = operation->request;
  const std::vector<SequencePtr>& sequences = operation->sequences.sequences();
  const size_t copies = launch->copies.size(), appends = launch->appends.size();
  savepoints_.clear();
  shortage_.reset();
  absl::Status status = AddAppends(operation, launch);
  // The sequences may have grown since the request was admitted.
  if (status.ok()) status = ValidateWork(request, operation->sequence_lengths, max_flop_);
  if (!status.ok()) {
    RollBack(copies, appends, launch);
    if (shortage_.has_value()) return Full(*operation);
    return status;
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i] != nullptr) operation->sequence_lengths[i] += request.spans[i].kv_rows;
  }
  if (!fits(operation)) {
    RollBack(copies, appends, launch);
    return false;
  }
  const TimePoint now = clock_.Now();
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i] == nullptr) continue;
    ++sequences[i]->launches;
    if (!request.append_only) AddRead(*operation, i, now, sequences[i].get(), launch);
  }
  return true;
}

// Sets sequence_lengths to the lengths before the operation appends.
absl::Status LaunchBuilder::AddAppends(AttendOperation* operation, Launch* launch) {
  const AttendRequest& request = operation->request;
  const std::vector<SequencePtr>& sequences = operation->sequences.sequences();
  SpanCursor cursor(request, operation->tensors.addresses());
  for (size_t i = 0; i < sequences.size(); ++i, cursor.Advance()) {
    if (sequences[i] == nullptr) continue;
    operation->sequence_lengths[i] = sequences[i]->layers[request.layer].pending_length();
    absl::Status status = AddAppend(*operation, i, cursor.tensors(), sequences[i].get(), launch);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status LaunchBuilder::AddAppend(const AttendOperation& operation, size_t index,
                                      const SpanTensors& tensors, Sequence* sequence,
                                      Launch* launch) {
  const AttendRequest& request = operation.request;
  const SpanShape& span = request.spans[index];
  SequenceLayer& layer = sequence->layers[request.layer];
  const uint64_t length = layer.pending_length();
  if (sequence->deleted) return Deleted(operation);
  if (span.expected_length.value_or(length) != length) {
    return LengthMismatch(
        sequence->id, *span.expected_length, length,
        request.append_only ? std::nullopt : std::optional<size_t>(index),
        absl::StrCat("spans[", index, "].expected_length: ", *span.expected_length,
                     "; the sequence has ", length, " rows in layer ", request.layer));
  }
  if (span.kv_rows == 0) return absl::OkStatus();
  absl::Status status = AllocatePages(*sequence, &layer, span.kv_rows, launch);
  if (!status.ok()) {
    return WithMessage(status, absl::StrCat("spans[", index, "]: ", status.message()));
  }
  AddRowAppends(tensors, span.kv_rows, length, layer, pages_.arena(), launch);
  return absl::OkStatus();
}

// Allocates the pages that `rows` more rows need, and copies the last page if it is shared.
absl::Status LaunchBuilder::AllocatePages(const Sequence& sequence, SequenceLayer* layer,
                                          uint32_t rows, Launch* launch) {
  const uint64_t length = layer->pending_length();
  if (length + rows > kMaxRows) {
    const size_t row_bytes = sequence.shape.page_bytes() / kernels::kPageTokens;
    return WithTooLarge(
        absl::ResourceExhaustedError(
            absl::StrCat("the sequence would have ", length + rows, " rows; at most ", kMaxRows)),
        (length + rows) * row_bytes, kMaxRows * row_bytes);
  }
  if (layer->pending == nullptr) {
    layer->pending = NewPending();
    layer->pending->first_page = layer->pages.size();
    layer->pending->length = length;
    layer->pending->launch = launch->id;
  }
  PendingAppend& pending = *layer->pending;
  assert(pending.launch == launch->id);  // because of the Batcher's order
  savepoints_.push_back({layer, pending.pages.size(), length});

  SequenceTable::Shortage why = SequenceTable::Shortage::kMemory;
  if (CopiesLastPage(*layer)) {
    const PageId copy = table_.AllocatePage(sequence, &why);
    if (copy == kNoPage) return NoPage(why);
    --pending.first_page;
    pending.pages.push_back(copy);
    launch->copies.push_back(
        {pages_.arena().address(layer->pages.back()), pages_.arena().address(copy)});
  }
  const size_t needed = PagesFor(length + rows);
  while (pending.first_page + pending.pages.size() < needed) {
    const PageId page = table_.AllocatePage(sequence, &why);
    if (page == kNoPage) return NoPage(why);
    pending.pages.push_back(page);
  }
  pending.length = length + rows;
  return absl::OkStatus();
}

// Whether an append copies the layer's last page, since it is partly filled and shared.
bool LaunchBuilder::CopiesLastPage(const SequenceLayer& layer) const {
  if (layer.pending_length() % kernels::kPageTokens == 0) return false;
  const PendingAppend* const pending = layer.pending.get();
  const bool is_old =
      pending == nullptr || (pending->first_page == layer.pages.size() && pending->pages.empty());
  return is_old && pages_.arena().refs(layer.pages.back()) > 1;
}

// Full tells the rest once the operation's pages are returned.
absl::Status LaunchBuilder::NoPage(SequenceTable::Shortage why) {
  shortage_ = why;
  return absl::ResourceExhaustedError("no page");
}

// Why the operation, which has been rolled back, found no page.
absl::Status LaunchBuilder::Full(const AttendOperation& operation) const {
  const AttendRequest& request = operation.request;
  const std::vector<SequencePtr>& sequences = operation.sequences.sequences();
  const Sequence* grown = nullptr;  // all have the same size of pages and, if they grow, the client
  size_t pages = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const uint32_t rows = request.spans[i].kv_rows;
    if (sequences[i] == nullptr || sequences[i]->deleted || rows == 0) continue;
    grown = sequences[i].get();
    const SequenceLayer& layer = grown->layers[request.layer];
    const uint64_t length = layer.pending_length();
    pages += PagesFor(length + rows) - PagesFor(length) + (CopiesLastPage(layer) ? 1 : 0);
  }
  return table_.Full(*shortage_, *grown, pages * grown->shape.page_bytes());
}

// Names all sequences of the operation that are gone.
absl::Status LaunchBuilder::Deleted(const AttendOperation& operation) {
  const std::vector<SequencePtr>& sequences = operation.sequences.sequences();
  std::vector<size_t> spans;
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i] != nullptr && sequences[i]->deleted) spans.push_back(i);
  }
  return SequencesLost(operation.request, spans,
                       "the sequence was deleted while the request was queued");
}

// Undoes the appends of the current operation, before which the launch had so many.
void LaunchBuilder::RollBack(size_t copies, size_t appends, Launch* launch) {
  launch->copies.resize(copies);
  launch->appends.resize(appends);
  for (auto it = savepoints_.rbegin(); it != savepoints_.rend(); ++it) {
    PendingAppend& pending = *it->layer->pending;
    for (size_t i = it->pending_pages; i < pending.pages.size(); ++i) {
      pages_.Unref(pending.pages[i]);
    }
    pending.pages.resize(it->pending_pages);
    pending.length = it->length;
    if (pending.pages.empty() && pending.length == it->layer->length) {
      Keep(std::move(it->layer->pending));
    }
  }
}

void LaunchBuilder::AddRead(const AttendOperation& operation, size_t span, TimePoint now,
                            Sequence* sequence, Launch* launch) {
  const Arena& arena = pages_.arena();
  SequenceLayer& layer = sequence->layers[operation.request.layer];
  const auto rows = static_cast<int32_t>(operation.sequence_lengths[span]);
  const auto query_rows = static_cast<int32_t>(operation.request.spans[span].query_rows);
  const size_t num_pages = PagesFor(operation.sequence_lengths[span]);
  const size_t first = launch->pages.size();
  launch->resident.push_back({first, rows});
  const std::vector<int32_t>& places = PlacesOf(&layer);
  const size_t old = layer.pending == nullptr ? num_pages : layer.pending->first_page;
  launch->pages.insert(launch->pages.end(), places.begin(),
                       places.begin() + static_cast<std::ptrdiff_t>(std::min(old, num_pages)));
  for (size_t t = old; t < num_pages; ++t) launch->pages.push_back(arena.place(layer.PageAt(t)));

  const kernels::KvRange visible =
      kernels::VisibleKv(operation.request.terms.mask, query_rows, rows, 0, query_rows);
  const auto at = [&](int32_t row) {
    return launch->pages.begin() + static_cast<std::ptrdiff_t>(first) + row;
  };
  const auto begin = at(visible.begin / kernels::kPageTokens);
  const auto end = at(kernels::PagesFor(visible.end));
  const int32_t cold = arena.first_cold_place();
  const auto hot_pages = static_cast<size_t>(
      std::count_if(begin, end, [cold](int32_t place) { return place < cold; }));
  const size_t page_bytes = sequence->shape.page_bytes();
  const size_t all_bytes = static_cast<size_t>(end - begin) * page_bytes;
  launch->read.hot += hot_pages * page_bytes;
  launch->read.cold += all_bytes - hot_pages * page_bytes;
  sequence->read_rate.Add(static_cast<double>(all_bytes), now);
}

const std::vector<int32_t>& LaunchBuilder::PlacesOf(SequenceLayer* layer) const {
  std::vector<int32_t>& places = layer->places;
  if (std::exchange(layer->places_of, pages_.moves()) != pages_.moves()) places.clear();
  for (size_t t = places.size(); t < layer->pages.size(); ++t) {
    places.push_back(pages_.arena().place(layer->pages[t]));
  }
  return places;
}

void LaunchBuilder::End(const Launch& launch, bool ok) {
  for (const AttendOperation* operation : launch.operations) {
    for (const SequencePtr& sequence : operation->sequences.sequences()) {
      if (sequence == nullptr) continue;
      --sequence->launches;
      EndAppend(&sequence->layers[operation->request.layer], sequence->client,
                ok && !sequence->deleted);
    }
  }
  if (ok) {
    metrics_.kv_read_hot_bytes.Increment(static_cast<double>(launch.read.hot));
    metrics_.kv_read_cold_bytes.Increment(static_cast<double>(launch.read.cold));
  }
  pages_.EndLaunch(launch.id);
}

void LaunchBuilder::EndAppend(SequenceLayer* layer, KvClient* client, bool commit) {
  std::unique_ptr<PendingAppend> pending = std::move(layer->pending);
  if (pending == nullptr) return;
  if (!commit || pending->discarded) {
    for (const PageId page : pending->pages) pages_.Unref(page);
  } else {
    // Pages from first_page on are replaced. They are shared, so others keep them.
    for (size_t i = pending->first_page; i < layer->pages.size(); ++i) {
      pages_.Unref(layer->pages[i], client);
    }
    layer->CutPages(pending->first_page);
    layer->pages.insert(layer->pages.end(), pending->pages.begin(), pending->pages.end());
    layer->length = pending->length;
  }
  Keep(std::move(pending));
}

std::unique_ptr<PendingAppend> LaunchBuilder::NewPending() {
  if (unused_pending_.empty()) return std::make_unique<PendingAppend>();
  std::unique_ptr<PendingAppend> pending = std::move(unused_pending_.back());
  unused_pending_.pop_back();
  return pending;
}

void LaunchBuilder::Keep(std::unique_ptr<PendingAppend> pending) {
  if (unused_pending_.size() >= kMaxUnusedPending) return;
  pending->pages.clear();
  pending->discarded = false;
  unused_pending_.push_back(std::move(pending));
}

}  // namespace flashcore::server

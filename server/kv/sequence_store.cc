#include "server/kv/sequence_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/registry.h"
#include "server/request/validate.h"

namespace flashcore::server {
namespace {

absl::Status CheckShape(const SequenceShape& shape, const SequenceOptions& options) {
  const auto invalid = [](const char* field, uint32_t value, absl::string_view want) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": ", value, " is not ", want));
  };
  if (shape.num_layers < 1 || shape.num_layers > options.max_layers) {
    return invalid("num_layers", shape.num_layers, absl::StrCat("in 1..", options.max_layers));
  }
  if (shape.num_kv_heads < 1 || shape.num_kv_heads > options.max_heads) {
    return invalid("num_kv_heads", shape.num_kv_heads, absl::StrCat("in 1..", options.max_heads));
  }
  if (std::find(options.head_dims.begin(), options.head_dims.end(), shape.head_dim) ==
      options.head_dims.end()) {
    return invalid("head_dim", shape.head_dim,
                   absl::StrCat("one of ", absl::StrJoin(options.head_dims, ", ")));
  }
  if (absl::Status status = ValidateDType(shape.dtype, options.dtypes); !status.ok()) return status;
  const size_t page_bytes = shape.page_bytes();
  if (page_bytes > options.superblock_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_kv_heads: ", shape.num_kv_heads, " of head_dim ", shape.head_dim, " need pages of ",
        page_bytes, " bytes; at most ", options.superblock_bytes, " are allowed"));
  }
  return absl::OkStatus();
}

// INVALID_ARGUMENT unless every layer has at least `length` rows.
absl::Status CheckLength(const Sequence& sequence, uint64_t length) {
  for (size_t i = 0; i < sequence.layers.size(); ++i) {
    if (sequence.layers[i].length < length) {
      return absl::InvalidArgumentError(absl::StrCat(
          "length: ", length, "; layer ", i, " has only ", sequence.layers[i].length, " rows"));
    }
  }
  return absl::OkStatus();
}

// INVALID_ARGUMENT unless the sequence fits the request, whose span number `span` names it.
absl::Status CheckFits(const AttendRequest& request, size_t span, const SequenceShape& shape) {
  if (request.layer >= shape.num_layers) {
    return absl::InvalidArgumentError(absl::StrCat("layer: ", request.layer,
                                                   "; the sequence of spans[", span, "] has ",
                                                   shape.num_layers, " layers"));
  }
  const auto differs = [&](const char* field, auto came, auto has) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": ", came, "; the sequence of spans[", span, "] has ", has));
  };
  if (request.num_kv_heads != shape.num_kv_heads) {
    return differs("num_kv_heads", request.num_kv_heads, shape.num_kv_heads);
  }
  if (request.head_dim != shape.head_dim) {
    return differs("head_dim", request.head_dim, shape.head_dim);
  }
  if (request.dtype != shape.dtype) {
    return differs("dtype", kernels::Name(request.dtype), kernels::Name(shape.dtype));
  }
  return absl::OkStatus();
}

}  // namespace

SequenceLease& SequenceLease::operator=(SequenceLease&& other) noexcept {
  if (this != &other) {
    Reset();
    store_ = std::exchange(other.store_, nullptr);
    sequences_ = std::exchange(other.sequences_, {});
  }
  return *this;
}

void SequenceLease::Reset() {
  if (store_ != nullptr) store_->EndLease(sequences_);
  store_ = nullptr;
  sequences_.clear();
}

SequenceStore::SequenceStore(const Options& options, const KvMemory& memory, const Clock* clock,
                             DeviceMetrics* metrics)
    : options_(options),
      clock_(clock),
      pages_(memory, options.superblock_bytes),
      table_(&options_, &pages_, clock, metrics),
      builder_(&pages_, &table_, options.max_request_flop, clock, metrics),
      mover_(&pages_, &table_, clock, metrics) {}

absl::StatusOr<SequenceInfo> SequenceStore::Create(const SequenceShape& shape, bool pin,
                                                   absl::string_view client) {
  if (absl::Status status = CheckShape(shape, options_); !status.ok()) return status;
  MutexLock lock(&mutex_);
  const absl::StatusOr<SequencePtr> sequence = table_.Add(shape, pin, 0, client);
  if (!sequence.ok()) return sequence.status();
  return Describe(**sequence);
}

absl::StatusOr<SequenceInfo> SequenceStore::Fork(SequenceId id, std::optional<uint64_t> length,
                                                 bool pin, absl::string_view client) {
  MutexLock lock(&mutex_);
  const absl::StatusOr<SequencePtr> parent = table_.Find(id);
  if (!parent.ok()) return parent.status();
  if (absl::Status status = CheckLength(**parent, length.value_or(0)); !status.ok()) return status;
  size_t table_pages = 0;
  for (const SequenceLayer& layer : (*parent)->layers) {
    table_pages += PagesFor(length.value_or(layer.length));
  }
  const absl::StatusOr<SequencePtr> child = table_.Add((*parent)->shape, pin, table_pages, client);
  if (!child.ok()) return child.status();
  for (size_t i = 0; i < (*parent)->layers.size(); ++i) {
    const SequenceLayer& from = (*parent)->layers[i];
    SequenceLayer& to = (*child)->layers[i];
    to.length = length.value_or(from.length);
    to.pages.assign(from.pages.begin(), from.pages.begin() + PagesFor(to.length));
    for (const PageId page : to.pages) pages_.AddRef(page);
  }
  table_.MarkUsed(parent->get());
  return Describe(**child);
}

absl::StatusOr<SequenceInfo> SequenceStore::Truncate(SequenceId id, uint64_t length,
                                                     std::optional<uint64_t> expected_length) {
  MutexLock lock(&mutex_);
  const absl::StatusOr<SequencePtr> found = table_.Find(id);
  if (!found.ok()) return found.status();
  Sequence& sequence = **found;
  if (expected_length.has_value() && *expected_length != sequence.layers[0].length) {
    return absl::FailedPreconditionError(absl::StrCat("expected_length: ", *expected_length,
                                                      "; the sequence has ",
                                                      sequence.layers[0].length, " rows"));
  }
  if (absl::Status status = CheckLength(sequence, length); !status.ok()) return status;
  for (SequenceLayer& layer : sequence.layers) {
    table_.DropPages(sequence, &layer, PagesFor(length));
    layer.length = length;
    if (layer.pending != nullptr) layer.pending->discarded = true;
  }
  table_.MarkUsed(&sequence);
  return Describe(sequence);
}

absl::Status SequenceStore::Delete(SequenceId id) {
  MutexLock lock(&mutex_);
  const absl::StatusOr<SequencePtr> found = table_.Find(id);
  if (found.ok()) table_.Remove(*found);
  return found.status();
}

absl::StatusOr<SequenceInfo> SequenceStore::Get(SequenceId id) const {
  MutexLock lock(&mutex_);
  const absl::StatusOr<SequencePtr> found = table_.Find(id);
  if (!found.ok()) return found.status();
  return Describe(**found);
}

SequenceStore::Listing SequenceStore::List(absl::string_view client, uint64_t after,
                                           size_t limit) const {
  Listing listing;
  MutexLock lock(&mutex_);
  const ClientAccount* account = pages_.FindAccount(client);
  if (account == nullptr) return listing;
  auto it = account->sequences.upper_bound(after);
  for (; it != account->sequences.end() && listing.sequences.size() < limit; ++it) {
    listing.sequences.push_back(Describe(*it->second));
    after = it->first;
  }
  if (it != account->sequences.end()) listing.next = after;
  return listing;
}

void SequenceStore::ExpireIdle() {
  MutexLock lock(&mutex_);
  table_.RemoveIdle();
}

SequenceInfo SequenceStore::Describe(const Sequence& sequence) const {
  SequenceInfo info;
  info.id = sequence.id;
  info.shape = sequence.shape;
  info.pin = sequence.pin;
  info.idle = sequence.leases > 0 ? Nanoseconds(0) : clock_->Now() - sequence.last_used;
  info.layer_lengths.reserve(sequence.layers.size());
  const size_t page_bytes = sequence.shape.page_bytes();
  const bool may_be_hot = pages_.arena().capacity_bytes(Segment::kHot) > 0;
  for (const SequenceLayer& layer : sequence.layers) {
    info.layer_lengths.push_back(layer.length);
    info.kv_bytes += layer.pages.size() * page_bytes;
    if (!may_be_hot) continue;
    for (const PageId page : layer.pages) {
      if (pages_.arena().segment(page) == Segment::kHot) info.hot_bytes += page_bytes;
    }
  }
  return info;
}

absl::Status SequenceStore::Lease(AttendOperation* operation) {
  const AttendRequest& request = operation->request;
  const auto named = [](const SpanShape& span) { return !span.sequence_id.empty(); };
  if (std::none_of(request.spans.begin(), request.spans.end(), named)) return absl::OkStatus();
  std::vector<SequencePtr> leased(request.spans.size());
  operation->sequence_lengths.assign(request.spans.size(), 0);
  operation->order.clear();
  MutexLock lock(&mutex_);
  const uint64_t mark = ++last_lease_;
  for (size_t i = 0; i < request.spans.size(); ++i) {
    const SpanShape& span = request.spans[i];
    if (!named(span)) continue;
    absl::StatusOr<SequencePtr> found = table_.Find(*SequenceId::FromBytes(span.sequence_id));
    if (!found.ok()) {
      return absl::NotFoundError(absl::StrCat("spans[", i, "].", found.status().message()));
    }
    leased[i] = *std::move(found);
    Sequence& sequence = *leased[i];
    if (absl::Status fits = CheckFits(request, i, sequence.shape); !fits.ok()) return fits;
    if (std::exchange(sequence.lease_mark, mark) == mark) {
      return absl::InvalidArgumentError(absl::StrCat(
          "spans[", i, "].sequence_id: names a sequence that an earlier span names too"));
    }
    SequenceLayer& layer = sequence.layers[request.layer];
    operation->order.push_back({&layer.order, span.kv_rows > 0});
    operation->sequence_lengths[i] = layer.length;
  }
  for (const SequencePtr& sequence : leased) {
    if (sequence == nullptr) continue;
    ++sequence->leases;
    table_.MarkUsed(sequence.get());
  }
  operation->sequences.store_ = this;
  operation->sequences.sequences_ = std::move(leased);
  return absl::OkStatus();
}

void SequenceStore::EndLease(const std::vector<SequencePtr>& sequences) {
  MutexLock lock(&mutex_);
  for (const SequencePtr& sequence : sequences) {
    if (sequence == nullptr) continue;
    --sequence->leases;
    table_.MarkUsed(sequence.get());
  }
}

void SequenceStore::BeginLaunch(absl::Span<AttendOperation* const> operations, Launch* launch) {
  launch->Clear();
  const auto resident = [](const AttendOperation* op) { return !op->sequences.empty(); };
  if (std::none_of(operations.begin(), operations.end(), resident)) {
    launch->operations.assign(operations.begin(), operations.end());
    return;
  }
  MutexLock lock(&mutex_);
  launch->id = pages_.BeginLaunch();
  for (AttendOperation* operation : operations) {
    absl::Status status;
    if (resident(operation)) status = builder_.AddOperation(operation, launch);
    if (status.ok()) {
      launch->operations.push_back(operation);
    } else {
      launch->refused.emplace_back(operation, std::move(status));
    }
  }
}

void SequenceStore::EndLaunch(const Launch& launch, bool ok) {
  if (launch.id == 0) return;
  MutexLock lock(&mutex_);
  builder_.End(launch, ok);
}

PageMoves SequenceStore::BeginMoves(size_t max_bytes) {
  MutexLock lock(&mutex_);
  return mover_.Begin(max_bytes);
}

void SequenceStore::EndMoves(const PageMoves& moves, bool ok) {
  MutexLock lock(&mutex_);
  mover_.End(moves, ok);
}

bool SequenceStore::ShouldResetPersistingL2() {
  MutexLock lock(&mutex_);
  return pages_.ShouldResetPersistingL2();
}

SequenceStore::Stats SequenceStore::stats() const {
  MutexLock lock(&mutex_);
  const Arena& arena = pages_.arena();
  Stats stats;
  stats.sequences = table_.by_use().size();
  stats.pages = arena.num_pages();
  stats.metadata_bytes = table_.metadata_bytes();
  stats.hot = {arena.used_bytes(Segment::kHot), arena.capacity_bytes(Segment::kHot)};
  stats.cold = {arena.used_bytes(Segment::kCold), arena.capacity_bytes(Segment::kCold)};
  return stats;
}

}  // namespace flashcore::server

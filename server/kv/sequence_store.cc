#include "server/kv/sequence_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/kernel.h"
#include "server/base/error_info.h"
#include "server/request/sequence_errors.h"
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
  const auto head_dims = [&options](kernels::KvDType kv_dtype) {
    const auto found = options.head_dims.find(kv_dtype);
    return found == options.head_dims.end() ? std::vector<uint32_t>() : found->second;
  };
  const auto has_head_dim = [&shape](const std::vector<uint32_t>& of) {
    return std::find(of.begin(), of.end(), shape.head_dim) != of.end();
  };
  const std::vector<uint32_t> all = head_dims(kernels::KvDType::kSameAsQuery);
  if (!has_head_dim(all)) {
    return invalid("head_dim", shape.head_dim, absl::StrCat("one of ", absl::StrJoin(all, ", ")));
  }
  if (absl::Status status = ValidateDType(shape.dtype, options.dtypes); !status.ok()) return status;
  const std::vector<uint32_t> of_kv_dtype = head_dims(shape.kv_dtype);
  if (!has_head_dim(of_kv_dtype)) {
    return absl::UnimplementedError(absl::StrCat(
        "kv_dtype: the device has no kernels for ", kernels::Name(shape.kv_dtype),
        " K/V of head_dim ", shape.head_dim, "; it has",
        of_kv_dtype.empty() ? " none" : " those of ", absl::StrJoin(of_kv_dtype, ", ")));
  }
  const size_t page_bytes = shape.page_bytes();
  if (page_bytes > options.superblock_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_kv_heads: ", shape.num_kv_heads, " of head_dim ", shape.head_dim, " need pages of ",
        page_bytes, " bytes; at most ", options.superblock_bytes, " are allowed"));
  }
  return absl::OkStatus();
}

// Host memory that a client's reference to a page of another client takes, beyond the page table.
constexpr size_t kBorrowBytes = 48;

// Upper limit of the size of the sequence's SequenceInfo message, encoded or in memory.
size_t MaxInfoBytes(const Sequence& sequence) {
  constexpr size_t kFixedBytes = 192;
  constexpr size_t kLengthBytes = sizeof(uint64_t);  // at most 5 encoded
  return kFixedBytes + sequence.settings.group.size() + sequence.layers.size() * kLengthBytes;
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

SequenceHold& SequenceHold::operator=(SequenceHold&& other) noexcept {
  if (this != &other) {
    Reset();
    store_ = std::exchange(other.store_, nullptr);
    sequences_ = std::exchange(other.sequences_, {});
  }
  return *this;
}

void SequenceHold::Reset() {
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

absl::StatusOr<SequenceInfo> SequenceStore::Create(const SequenceShape& shape,
                                                   const SequenceSettings& settings,
                                                   const Identity& identity) {
  if (absl::Status status = CheckShape(shape, options_); !status.ok()) return status;
  MutexLock lock(&mutex_);
  if (absl::Status status = table_.CheckSettings(settings, identity); !status.ok()) return status;
  const absl::StatusOr<SequencePtr> sequence = table_.Add(shape, settings, 0, identity);
  if (!sequence.ok()) return sequence.status();
  return Describe(**sequence);
}

absl::StatusOr<SequenceInfo> SequenceStore::Fork(SequenceId id, std::optional<uint64_t> length,
                                                 const SequenceSettings& settings,
                                                 const Identity& identity) {
  MutexLock lock(&mutex_);
  const absl::StatusOr<SequencePtr> found = table_.Find(id, identity, Access::kRead);
  if (!found.ok()) return found.status();
  Sequence& parent = **found;
  if (absl::Status status = table_.CheckSettings(settings, identity); !status.ok()) return status;
  if (absl::Status status = CheckLength(parent, length.value_or(0)); !status.ok()) return status;
  const bool borrows = parent.client->name != identity.name;
  size_t pages = 0;
  for (const SequenceLayer& layer : parent.layers) pages += PagesFor(length.value_or(layer.length));
  constexpr size_t kPageBytes = sizeof(PageId) + sizeof(int32_t);  // its id and its place
  const size_t table_bytes = pages * (kPageBytes + (borrows ? kBorrowBytes : 0));
  ++parent.leases;  // neither is evicted to make room for the child
  absl::StatusOr<SequencePtr> child = table_.Add(parent.shape, settings, table_bytes, identity);
  if (child.ok()) {
    ++(*child)->leases;
    const absl::Status shared = table_.SharePages(parent, length, child->get());
    --(*child)->leases;
    if (!shared.ok()) {
      table_.Remove(*child);
      child = shared;
    }
  }
  --parent.leases;
  if (!child.ok()) return child.status();
  table_.MarkUsed(&parent);
  return Describe(**child);
}

absl::StatusOr<SequenceInfo> SequenceStore::Truncate(SequenceId id, uint64_t length,
                                                     std::optional<uint64_t> expected_length,
                                                     const Identity& identity) {
  MutexLock lock(&mutex_);
  const absl::StatusOr<SequencePtr> found = table_.Find(id, identity, Access::kChange);
  if (!found.ok()) return found.status();
  Sequence& sequence = **found;
  if (expected_length.has_value() && *expected_length != sequence.layers[0].length) {
    return LengthMismatch(id, *expected_length, sequence.layers[0].length, std::nullopt,
                          absl::StrCat("expected_length: ", *expected_length, "; the sequence has ",
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

absl::Status SequenceStore::Delete(SequenceId id, const Identity& identity) {
  MutexLock lock(&mutex_);
  const absl::StatusOr<SequencePtr> found = table_.Find(id, identity, Access::kChange);
  if (absl::IsNotFound(found.status())) {
    return SequenceLost(id,
                        "no such sequence: it was deleted or evicted, has expired or never "
                        "existed; there is nothing to delete");
  }
  if (found.ok()) table_.Remove(*found);
  return found.status();
}

absl::StatusOr<SequenceInfo> SequenceStore::Get(SequenceId id, const Identity& identity) const {
  MutexLock lock(&mutex_);
  const absl::StatusOr<SequencePtr> found = table_.Find(id, identity, Access::kRead);
  if (!found.ok()) return found.status();
  return Describe(**found);
}

SequenceStore::Listing SequenceStore::List(const Identity& identity, uint64_t after,
                                           const ListLimit& limit) const {
  Listing listing;
  MutexLock lock(&mutex_);
  const KvClient* found = pages_.FindClient(identity.name);
  if (found == nullptr) return listing;
  auto it = found->sequences.upper_bound(after);
  for (; it != found->sequences.end() && listing.sequences.size() < limit.sequences; ++it) {
    const size_t bytes = MaxInfoBytes(*it->second);
    if (!listing.sequences.empty() && listing.bytes + bytes > limit.bytes) break;
    listing.sequences.push_back(Describe(*it->second));
    listing.bytes += bytes;
    after = it->first;
  }
  if (it != found->sequences.end()) listing.next = after;
  return listing;
}

void SequenceStore::ExpireIdle() {
  MutexLock lock(&mutex_);
  table_.RemoveIdle();
}

void SequenceStore::OpenLease(LeaseId id, const Identity& identity) {
  MutexLock lock(&mutex_);
  table_.OpenLease(id, identity);
}

void SequenceStore::CloseLease(LeaseId id) {
  MutexLock lock(&mutex_);
  table_.CloseLease(id);
}

bool SequenceStore::DeleteOrphan() {
  MutexLock lock(&mutex_);
  return table_.RemoveOrphan();
}

SequenceInfo SequenceStore::Describe(const Sequence& sequence) const {
  SequenceInfo info;
  info.id = sequence.id;
  info.shape = sequence.shape;
  info.settings = sequence.settings;
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
  AttendRequest& request = operation->request;
  request.kv_dtype = kernels::KvDType::kSameAsQuery;
  const auto named = [](const SpanShape& span) { return !span.sequence_id.empty(); };
  if (std::none_of(request.spans.begin(), request.spans.end(), named)) return absl::OkStatus();
  std::vector<SequencePtr> leased(request.spans.size());
  operation->sequence_lengths.assign(request.spans.size(), 0);
  operation->order.clear();
  operation->order.reserve(request.spans.size());
  MutexLock lock(&mutex_);
  for (const SpanShape& span : request.spans) table_.Prefetch(span.sequence_id.id());
  const uint64_t mark = ++last_lease_;
  size_t first = request.spans.size();  // span that names a sequence
  for (size_t i = 0; i < request.spans.size(); ++i) {
    const SpanShape& span = request.spans[i];
    if (!named(span)) continue;
    absl::StatusOr<SequencePtr> found =
        table_.Find(span.sequence_id.id(), operation->identity,
                    span.kv_rows > 0 ? Access::kChange : Access::kRead);
    if (!found.ok()) {
      return absl::IsNotFound(found.status())
                 ? LostFrom(i, *operation)
                 : WithMessage(found.status(),
                               absl::StrCat("spans[", i, "].", found.status().message()));
    }
    leased[i] = *std::move(found);
    Sequence& sequence = *leased[i];
    if (absl::Status fits = CheckFits(request, i, sequence.shape); !fits.ok()) return fits;
    if (first == request.spans.size()) first = i;
    if (sequence.shape.kv_dtype != leased[first]->shape.kv_dtype) {
      return absl::InvalidArgumentError(
          absl::StrCat("spans[", i, "].sequence_id: its kv_dtype is ",
                       kernels::Name(sequence.shape.kv_dtype), "; that of the sequence of spans[",
                       first, "] is ", kernels::Name(leased[first]->shape.kv_dtype)));
    }
    if (std::exchange(sequence.lease_mark, mark) == mark) {
      return absl::InvalidArgumentError(absl::StrCat(
          "spans[", i, "].sequence_id: names a sequence that an earlier span names too"));
    }
    SequenceLayer& layer = sequence.layers[request.layer];
    operation->order.push_back({&layer.order, span.kv_rows > 0});
    operation->sequence_lengths[i] = layer.length;
  }
  request.kv_dtype = leased[first]->shape.kv_dtype;
  if (kernels::Is8Bit(request.kv_dtype)) {
    const auto inlined = std::find(leased.begin(), leased.end(), nullptr);
    if (inlined != leased.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "spans[", inlined - leased.begin(), "]: inline K/V beside a sequence whose kv_dtype is ",
          kernels::Name(request.kv_dtype)));
    }
  }
  for (const SequencePtr& sequence : leased) {
    if (sequence == nullptr) continue;
    ++sequence->leases;  // nothing evicts it until the lease ends, which marks it as used
  }
  operation->sequences.store_ = this;
  operation->sequences.sequences_ = std::move(leased);
  return ValidateWork(request, operation->sequence_lengths, options_.max_request_flop);
}

// Names all lost sequences of the operation; that of span `first` is the first one.
absl::Status SequenceStore::LostFrom(size_t first, const AttendOperation& operation) const {
  const AttendRequest& request = operation.request;
  std::vector<size_t> lost;
  for (size_t i = first; i < request.spans.size(); ++i) {
    if (request.spans[i].sequence_id.empty()) continue;
    const SequenceId id = request.spans[i].sequence_id.id();
    const auto found = table_.Find(id, operation.identity, Access::kRead);
    if (absl::IsNotFound(found.status())) lost.push_back(i);
  }
  return SequencesLost(request, lost, SequenceTable::kLost);
}

void SequenceStore::EndLease(const std::vector<SequencePtr>& sequences) {
  const TimePoint now = clock_->Now();
  MutexLock lock(&mutex_);
  for (const SequencePtr& sequence : sequences) {
    if (sequence == nullptr) continue;
    --sequence->leases;
    table_.MarkUsed(sequence.get(), now);
  }
}

size_t SequenceStore::BeginLaunch(absl::Span<AttendOperation* const> operations, LaunchFit fits,
                                  Launch* launch) {
  launch->Clear();
  const auto resident = [](const AttendOperation* op) { return !op->sequences.empty(); };
  if (std::none_of(operations.begin(), operations.end(), resident)) {
    launch->operations.assign(operations.begin(), operations.end());
    return operations.size();
  }
  MutexLock lock(&mutex_);
  launch->id = pages_.BeginLaunch();
  for (size_t i = 0; i < operations.size(); ++i) {
    AttendOperation* const operation = operations[i];
    const absl::StatusOr<bool> added =
        resident(operation) ? builder_.AddOperation(operation, fits, launch) : fits(operation);
    if (!added.ok()) {
      launch->refused.emplace_back(operation, added.status());
    } else if (*added) {
      launch->operations.push_back(operation);
    } else {
      return i;
    }
  }
  return operations.size();
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

bool SequenceStore::GiveBackUnneeded() {
  MutexLock lock(&mutex_);
  return pages_.GiveBackUnneeded(clock_->Now());
}

bool SequenceStore::ShouldResetPersistingL2() {
  MutexLock lock(&mutex_);
  return pages_.ShouldResetPersistingL2();
}

SequenceStore::Stats SequenceStore::stats() const {
  MutexLock lock(&mutex_);
  const Arena& arena = pages_.arena();
  Stats stats;
  stats.sequences = table_.by_id().size();
  stats.pages = arena.num_pages();
  stats.metadata_bytes = table_.metadata_bytes();
  stats.hot = {arena.used_bytes(Segment::kHot), arena.capacity_bytes(Segment::kHot)};
  stats.cold = {arena.used_bytes(Segment::kCold), arena.capacity_bytes(Segment::kCold)};
  return stats;
}

}  // namespace flashcore::server

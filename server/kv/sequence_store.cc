#include "server/kv/sequence_store.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/registry.h"
#include "server/request/validate.h"

namespace flashcore::server {
namespace {

constexpr char kNotFound[] =
    "no such sequence: it was deleted, expired or was evicted, or never was; load its K/V again";

// Of a layer: its length always fits the kernels' int32.
size_t PagesFor(uint64_t length) {
  return static_cast<size_t>(kernels::PagesFor(static_cast<int32_t>(length)));
}

absl::Status CheckShape(const SequenceShape& shape, const SequenceStore::Options& options) {
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

// Every layer has `length` rows or more, or INVALID_ARGUMENT.
absl::Status CheckLength(const Sequence& sequence, uint64_t length) {
  for (size_t i = 0; i < sequence.layers.size(); ++i) {
    if (sequence.layers[i].length < length) {
      return absl::InvalidArgumentError(absl::StrCat(
          "length: ", length, "; layer ", i, " has only ", sequence.layers[i].length, " rows"));
    }
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
      memory_(memory),
      clock_(clock),
      metrics_(metrics),
      arena_({memory.base, memory.bytes, memory.hot_bytes, options.superblock_bytes}) {}

SequenceStore::~SequenceStore() = default;

absl::StatusOr<SequenceInfo> SequenceStore::Create(const SequenceShape& shape, bool pin,
                                                   absl::string_view client) {
  if (absl::Status status = CheckShape(shape, options_); !status.ok()) return status;
  MutexLock lock(&mutex_);
  absl::StatusOr<SequencePtr> sequence = Add(shape, pin, 0, client);
  if (!sequence.ok()) return sequence.status();
  return Describe(**sequence);
}

absl::StatusOr<SequenceInfo> SequenceStore::Fork(SequenceId id, std::optional<uint64_t> length,
                                                 bool pin, absl::string_view client) {
  MutexLock lock(&mutex_);
  absl::StatusOr<SequencePtr> parent = Find(id);
  if (!parent.ok()) return parent.status();
  if (absl::Status status = CheckLength(**parent, length.value_or(0)); !status.ok()) return status;
  size_t table_pages = 0;
  for (const SequenceLayer& layer : (*parent)->layers) {
    table_pages += PagesFor(length.value_or(layer.length));
  }
  absl::StatusOr<SequencePtr> child = Add((*parent)->shape, pin, table_pages, client);
  if (!child.ok()) return child.status();
  for (size_t i = 0; i < (*parent)->layers.size(); ++i) {
    const SequenceLayer& from = (*parent)->layers[i];
    SequenceLayer& to = (*child)->layers[i];
    to.length = length.value_or(from.length);
    to.pages.assign(from.pages.begin(), from.pages.begin() + PagesFor(to.length));
    for (const PageId page : to.pages) arena_.AddRef(page);
  }
  Touch(parent->get());
  return Describe(**child);
}

absl::StatusOr<SequenceInfo> SequenceStore::Truncate(SequenceId id, uint64_t length,
                                                     std::optional<uint64_t> expected_length) {
  MutexLock lock(&mutex_);
  absl::StatusOr<SequencePtr> found = Find(id);
  if (!found.ok()) return found.status();
  Sequence& sequence = **found;
  if (expected_length.has_value() && *expected_length != sequence.layers[0].length) {
    return absl::FailedPreconditionError(absl::StrCat("expected_length: ", *expected_length,
                                                      "; the sequence has ",
                                                      sequence.layers[0].length, " rows"));
  }
  if (absl::Status status = CheckLength(sequence, length); !status.ok()) return status;
  for (SequenceLayer& layer : sequence.layers) {
    DropPages(sequence, &layer, PagesFor(length));
    layer.length = length;
    if (layer.pending != nullptr) layer.pending->discarded = true;
  }
  Touch(&sequence);
  return Describe(sequence);
}

absl::Status SequenceStore::Delete(SequenceId id) {
  MutexLock lock(&mutex_);
  const absl::StatusOr<SequencePtr> found = Find(id);
  if (!found.ok()) return found.status();
  Remove(*found);
  return absl::OkStatus();
}

absl::StatusOr<SequenceInfo> SequenceStore::Get(SequenceId id) const {
  MutexLock lock(&mutex_);
  const absl::StatusOr<SequencePtr> found = Find(id);
  if (!found.ok()) return found.status();
  return Describe(**found);
}

SequenceStore::Listing SequenceStore::List(absl::string_view client, uint64_t after,
                                           size_t limit) const {
  Listing listing;
  MutexLock lock(&mutex_);
  const ClientAccounts::Account* account = accounts_.Find(client);
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
  if (options_.idle_timeout <= Nanoseconds(0)) return;
  MutexLock lock(&mutex_);
  const TimePoint oldest = clock_->Now() - options_.idle_timeout;
  for (auto it = by_use_.begin(); it != by_use_.end() && (*it)->last_used <= oldest;) {
    const SequencePtr sequence = *it++;
    if (sequence->users > 0) continue;
    Remove(sequence);
    metrics_->sequences_expired.Increment();
  }
}

absl::StatusOr<SequenceStore::SequencePtr> SequenceStore::Find(SequenceId id) const {
  const auto entry = sequences_.find(id);
  if (entry == sequences_.end())
    return absl::NotFoundError(absl::StrCat("sequence_id: ", kNotFound));
  return entry->second;
}

absl::StatusOr<SequenceStore::SequencePtr> SequenceStore::Add(const SequenceShape& shape, bool pin,
                                                              size_t table_pages,
                                                              absl::string_view client) {
  const size_t metadata_bytes =
      sizeof(Sequence) + shape.num_layers * sizeof(SequenceLayer) + table_pages * sizeof(PageId);
  if (metadata_bytes > options_.metadata_bytes - metadata_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("sequence metadata: this sequence needs ", metadata_bytes, " bytes; ",
                     metadata_bytes_, " of ", options_.metadata_bytes, " are in use"));
  }
  const uint32_t number = accounts_.Open(client);
  ClientAccounts::Account& account = accounts_[number];
  if (options_.client_sequences > 0 && account.sequences.size() >= options_.client_sequences) {
    return absl::ResourceExhaustedError(absl::StrCat("client quota: this client has ",
                                                     account.sequences.size(),
                                                     " sequences, which is the limit"));
  }
  auto sequence = std::make_shared<Sequence>();
  sequence->id = SequenceId::Random(options_.device);
  sequence->shape = shape;
  sequence->pin = pin;
  sequence->client = number;
  sequence->serial = ++last_serial_;
  sequence->layers = std::vector<SequenceLayer>(shape.num_layers);
  sequence->last_used = clock_->Now();
  sequence->metadata_bytes = metadata_bytes;
  sequence->by_use = by_use_.insert(by_use_.end(), sequence);
  metadata_bytes_ += metadata_bytes;
  account.sequences.emplace(sequence->serial, sequence);
  sequences_.emplace(sequence->id, sequence);
  return sequence;
}

void SequenceStore::Remove(const SequencePtr& sequence) {
  sequence->deleted = true;
  for (SequenceLayer& layer : sequence->layers) DropPages(*sequence, &layer, 0);
  by_use_.erase(sequence->by_use);
  metadata_bytes_ -= sequence->metadata_bytes;
  accounts_[sequence->client].sequences.erase(sequence->serial);
  accounts_.CloseIfEmpty(sequence->client);
  sequences_.erase(sequence->id);
}

void SequenceStore::Touch(Sequence* sequence) {
  sequence->last_used = clock_->Now();
  if (!sequence->deleted) by_use_.splice(by_use_.end(), by_use_, sequence->by_use);
}

SequenceInfo SequenceStore::Describe(const Sequence& sequence) const {
  SequenceInfo info;
  info.id = sequence.id;
  info.shape = sequence.shape;
  info.pin = sequence.pin;
  info.idle = sequence.users > 0 ? Nanoseconds(0) : clock_->Now() - sequence.last_used;
  info.layer_lengths.reserve(sequence.layers.size());
  const size_t page_bytes = sequence.shape.page_bytes();
  const bool may_be_hot = arena_.capacity_bytes(Segment::kHot) > 0;
  for (const SequenceLayer& layer : sequence.layers) {
    info.layer_lengths.push_back(layer.length);
    info.kv_bytes += layer.pages.size() * page_bytes;
    if (!may_be_hot) continue;
    for (const PageId page : layer.pages) {
      if (arena_.segment(page) == Segment::kHot) info.hot_bytes += page_bytes;
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
  absl::Status status;
  MutexLock lock(&mutex_);
  const uint64_t mark = ++last_lease_;
  for (size_t i = 0; i < request.spans.size() && status.ok(); ++i) {
    const SpanShape& span = request.spans[i];
    if (!named(span)) continue;
    const auto entry = sequences_.find(*SequenceId::FromBytes(span.sequence_id));
    if (entry == sequences_.end()) {
      status = absl::NotFoundError(absl::StrCat("spans[", i, "].sequence_id: ", kNotFound));
      break;
    }
    Sequence& sequence = *entry->second;
    status = CheckLease(request, i, sequence);
    if (status.ok() && std::exchange(sequence.lease_mark, mark) == mark) {
      status = absl::InvalidArgumentError(absl::StrCat(
          "spans[", i, "].sequence_id: names a sequence that an earlier span names too"));
    }
    if (!status.ok()) break;
    leased[i] = entry->second;
    SequenceLayer& layer = sequence.layers[request.layer];
    operation->order.push_back({&layer.order, span.kv_rows > 0});
    operation->sequence_lengths[i] = layer.length;
  }
  if (!status.ok()) return status;
  for (const SequencePtr& sequence : leased) {
    if (sequence == nullptr) continue;
    ++sequence->users;
    Touch(sequence.get());
  }
  operation->sequences.store_ = this;
  operation->sequences.sequences_ = std::move(leased);
  return absl::OkStatus();
}

absl::Status SequenceStore::CheckLease(const AttendRequest& request, size_t span,
                                       const Sequence& sequence) const {
  const SequenceShape& shape = sequence.shape;
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

void SequenceStore::EndLease(const std::vector<SequencePtr>& sequences) {
  MutexLock lock(&mutex_);
  for (const SequencePtr& sequence : sequences) {
    if (sequence == nullptr) continue;
    --sequence->users;
    Touch(sequence.get());
  }
}

void SequenceStore::DropPages(const Sequence& sequence, SequenceLayer* layer, size_t keep) {
  for (size_t i = keep; i < layer->pages.size(); ++i) {
    if (sequence.launches > 0) {
      UnrefLater(layer->pages[i]);
    } else {
      Unref(layer->pages[i]);
    }
  }
  layer->pages.resize(std::min(keep, layer->pages.size()));
}

void SequenceStore::Unref(PageId page) {
  const uint32_t owner = arena_.owner(page);
  const size_t bytes = arena_.page_bytes(page);
  const bool hot = arena_.segment(page) == Segment::kHot;
  if (!arena_.Unref(page)) return;
  if (hot) hot_left_bytes_ += bytes;
  if (owner == kNoOwner) return;
  accounts_[owner].kv_bytes -= bytes;
  accounts_.CloseIfEmpty(owner);
}

void SequenceStore::UnrefLater(PageId page) { unref_later_.emplace_back(last_launch_, page); }

void SequenceStore::UnrefWhatIsDue() {
  const uint64_t oldest = running_.empty() ? last_launch_ + 1 : *running_.begin();
  while (!unref_later_.empty() && unref_later_.front().first < oldest) {
    Unref(unref_later_.front().second);
    unref_later_.pop_front();
  }
}

SequenceStore::Stats SequenceStore::stats() const {
  MutexLock lock(&mutex_);
  Stats stats;
  stats.sequences = sequences_.size();
  stats.pages = arena_.num_pages();
  stats.metadata_bytes = metadata_bytes_;
  stats.hot = {arena_.used_bytes(Segment::kHot), arena_.capacity_bytes(Segment::kHot)};
  stats.cold = {arena_.used_bytes(Segment::kCold), arena_.capacity_bytes(Segment::kCold)};
  return stats;
}

}  // namespace flashcore::server

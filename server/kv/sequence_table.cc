#include "server/kv/sequence_table.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error_info.h"
#include "server/request/sequence_errors.h"

namespace flashcore::server {
namespace {

constexpr size_t kMaxQuoted = 64;  // bytes of a client's string in an error message

bool BelongsTo(const Identity& identity, const std::string& group) {
  return std::find(identity.groups.begin(), identity.groups.end(), group) != identity.groups.end();
}

bool MayRead(const Sequence& sequence, const Identity& identity) {
  const SequenceSettings& settings = sequence.settings;
  return settings.shared || (!settings.group.empty() && BelongsTo(identity, settings.group));
}

// The least recently used sequence of the client that may be evicted; null: none.
SequencePtr FirstWithoutLease(const KvClient& client) {
  const auto found = std::find_if(client.by_use.begin(), client.by_use.end(),
                                  [](const SequencePtr& s) { return s->leases == 0; });
  return found == client.by_use.end() ? nullptr : *found;
}

}  // namespace

absl::Status SequenceTable::CheckSettings(const SequenceSettings& settings,
                                          const Identity& identity) const {
  if (!settings.group.empty()) {
    if (settings.shared) {
      return absl::InvalidArgumentError("group: is set, but `shared` already admits everybody");
    }
    if (!BelongsTo(identity, settings.group)) {
      return absl::PermissionDeniedError(absl::StrCat("group: this client does not belong to '",
                                                      settings.group.substr(0, kMaxQuoted), "'"));
    }
  }
  const Nanoseconds limit = options_.idle_timeout;
  if (limit > Nanoseconds(0) && settings.idle_timeout.value_or(limit) > limit) {
    return absl::InvalidArgumentError(
        absl::StrCat("idle_timeout_seconds: ", Seconds(*settings.idle_timeout), " is more than ",
                     Seconds(limit), ", the server's"));
  }
  if (settings.lease.has_value()) {
    const auto lease = leases_.find(*settings.lease);
    if (lease == leases_.end() || lease->second.client != identity.name) {
      return WithInfo(
          absl::NotFoundError("lease_id: no such lease: its call has ended, or never was"),
          reason::kLeaseLost);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<SequencePtr> SequenceTable::Add(const SequenceShape& shape,
                                               const SequenceSettings& settings, size_t table_bytes,
                                               const Identity& identity) {
  const size_t metadata_bytes =
      sizeof(Sequence) + shape.num_layers * sizeof(SequenceLayer) + table_bytes;
  if (absl::Status status = MakeRoom(metadata_bytes, identity.name); !status.ok()) return status;
  const TimePoint now = clock_.Now();
  const auto age = std::chrono::duration_cast<std::chrono::microseconds>(now - start_).count();
  auto sequence = std::make_shared<Sequence>();
  sequence->id = SequenceId::Random(options_.device, options_.devices);
  sequence->shape = shape;
  sequence->settings = settings;
  if (!settings.idle_timeout.has_value() && options_.idle_timeout > Nanoseconds(0)) {
    sequence->settings.idle_timeout = options_.idle_timeout;
  }
  KvClient* const client = pages_.OpenClient(identity.name);
  sequence->client = client;
  // Not a plain counter: clients see it in page tokens, and it must not count what others create.
  last_serial_ = std::max(last_serial_ + 1, static_cast<uint64_t>(age));
  sequence->serial = last_serial_;
  sequence->layers = std::vector<SequenceLayer>(shape.num_layers);
  sequence->last_used = now;
  sequence->metadata_bytes = metadata_bytes;
  metadata_bytes_ += metadata_bytes;
  client->metadata_bytes += metadata_bytes;
  sequence->by_use = client->by_use.insert(client->by_use.end(), sequence);
  if (const auto& timeout = sequence->settings.idle_timeout; timeout.has_value()) {
    sequence->expiry = expiries_.emplace(now + *timeout, sequence);
  }
  if (settings.lease.has_value()) {
    std::list<SequencePtr>& of_lease = leases_.at(*settings.lease).sequences;
    sequence->by_lease = of_lease.insert(of_lease.end(), sequence);
  }
  client->sequences.emplace(sequence->serial, sequence);
  by_id_.emplace(sequence->id, sequence);
  return sequence;
}

absl::Status SequenceTable::MakeRoom(size_t metadata_bytes, const std::string& client) {
  while (true) {
    const KvClient* const found = pages_.FindClient(client);  // eviction may close it
    const KvClient none;
    const KvClient& has = found == nullptr ? none : *found;
    if (options_.client_sequences > 0 && has.sequences.size() >= options_.client_sequences) {
      if (EvictOf(has)) continue;
      return WithInfo(absl::ResourceExhaustedError(absl::StrCat("client quota: this client has ",
                                                                has.sequences.size(),
                                                                " sequences, which is the limit")),
                      reason::kQuotaExceeded,
                      {{"limit", "client_sequences"},
                       {"needed", 1},
                       {"used", has.sequences.size()},
                       {"allowed", options_.client_sequences}});
    }
    const size_t limit = options_.client_metadata_bytes;
    if (limit > 0 && has.metadata_bytes + metadata_bytes > limit) {
      if (metadata_bytes <= limit && EvictOf(has)) continue;
      const absl::Status full = absl::ResourceExhaustedError(
          absl::StrCat("client quota: this sequence needs ", metadata_bytes,
                       " bytes of sequence metadata; the sequences of this client hold ",
                       has.metadata_bytes, " of ", limit));
      if (metadata_bytes > limit) return WithTooLarge(full, metadata_bytes, limit);
      return WithInfo(full, reason::kQuotaExceeded,
                      {{"limit", "client_metadata_bytes"},
                       {"needed", metadata_bytes},
                       {"used", has.metadata_bytes},
                       {"allowed", limit}});
    }
    if (metadata_bytes > options_.metadata_bytes - metadata_bytes_) {
      if (metadata_bytes <= options_.metadata_bytes &&
          EvictOfLargest(&KvClient::metadata_bytes, client, metadata_bytes)) {
        continue;
      }
      const absl::Status full = absl::ResourceExhaustedError(
          absl::StrCat("sequence metadata: this sequence needs ", metadata_bytes, " bytes; ",
                       metadata_bytes_, " of ", options_.metadata_bytes, " are in use"));
      if (metadata_bytes > options_.metadata_bytes) {
        return WithTooLarge(full, metadata_bytes, options_.metadata_bytes);
      }
      return WithInfo(full, reason::kServerFull);
    }
    return absl::OkStatus();
  }
}

absl::StatusOr<SequencePtr> SequenceTable::Find(SequenceId id, const Identity& identity,
                                                Access access) const {
  const auto entry = by_id_.find(id);
  if (entry != by_id_.end()) {
    const Sequence& sequence = *entry->second;
    if (sequence.client->name == identity.name) return entry->second;
    if (MayRead(sequence, identity)) {
      if (access == Access::kRead) return entry->second;
      return absl::PermissionDeniedError(
          "sequence_id: belongs to another client, which shares it: it can be read and forked, but "
          "not changed or deleted");
    }
  }
  return SequenceLost(id, kLost);
}

void SequenceTable::Remove(const SequencePtr& removed) {
  // `removed` may be in a list.
  const SequencePtr sequence = removed;  // NOLINT(performance-unnecessary-copy-initialization)
  sequence->deleted = true;
  for (SequenceLayer& layer : sequence->layers) DropPages(*sequence, &layer, 0);
  KvClient* const client = sequence->client;
  client->by_use.erase(sequence->by_use);
  if (sequence->settings.idle_timeout.has_value()) expiries_.erase(sequence->expiry);
  if (const auto& id = sequence->settings.lease; id.has_value()) {
    const auto lease = leases_.find(*id);
    (lease == leases_.end() ? orphans_ : lease->second.sequences).erase(sequence->by_lease);
  }
  metadata_bytes_ -= sequence->metadata_bytes;
  client->metadata_bytes -= sequence->metadata_bytes;
  client->sequences.erase(sequence->serial);
  sequence->client = nullptr;
  pages_.CloseIfEmpty(client);
  by_id_.erase(sequence->id);
}

void SequenceTable::RemoveIdle() {
  const TimePoint now = clock_.Now();
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    const SequencePtr sequence = expiries_.begin()->second;
    const TimePoint idle_since = sequence->leases > 0 ? now : sequence->last_used;
    const TimePoint expiry = idle_since + *sequence->settings.idle_timeout;
    if (expiry <= now) {
      Remove(sequence);
      metrics_.sequences_expired.Increment();
    } else {  // it was used since the entry was made
      expiries_.erase(sequence->expiry);
      sequence->expiry = expiries_.emplace(expiry, sequence);
    }
  }
}

void SequenceTable::CloseLease(LeaseId id) {
  const auto lease = leases_.find(id);
  if (lease == leases_.end()) return;
  orphans_.splice(orphans_.end(), lease->second.sequences);
  leases_.erase(lease);
}

bool SequenceTable::RemoveOrphan() {
  if (orphans_.empty()) return false;
  Remove(orphans_.front());
  metrics_.sequences_orphaned.Increment();
  return true;
}

void SequenceTable::MarkUsed(Sequence* sequence, TimePoint now) {
  sequence->last_used = now;
  if (sequence->deleted) return;
  std::list<SequencePtr>& by_use = sequence->client->by_use;
  by_use.splice(by_use.end(), by_use, sequence->by_use);
}

bool SequenceTable::MakeKvRoom(size_t bytes, const KvClient& client) {
  const size_t limit = options_.client_kv_bytes;
  while (limit > 0 && client.kv_bytes + bytes > limit) {
    if (bytes > limit || !EvictOf(client)) return false;
  }
  return true;
}

PageId SequenceTable::AllocatePage(const Sequence& sequence, Shortage* why) {
  const size_t bytes = sequence.shape.page_bytes();
  *why = Shortage::kClient;
  if (!MakeKvRoom(bytes, *sequence.client)) return kNoPage;
  const Segment preferred = sequence.settings.pin ? Segment::kHot : Segment::kCold;
  do {
    const PageId page = pages_.Allocate(bytes, preferred, sequence.client);
    if (page != kNoPage) return page;
  } while (EvictOfLargest(&KvClient::kv_bytes, sequence.client->name, bytes));
  *why = Shortage::kMemory;
  return kNoPage;
}

absl::Status SequenceTable::Full(Shortage why, const Sequence& sequence, size_t bytes) const {
  if (why == Shortage::kClient) return OverKvQuota(bytes, sequence.client->kv_bytes);
  const Arena& arena = pages_.arena();
  const size_t used = arena.used_bytes(Segment::kHot) + arena.used_bytes(Segment::kCold);
  const size_t capacity =
      arena.capacity_bytes(Segment::kHot) + arena.capacity_bytes(Segment::kCold);
  const size_t page_bytes = sequence.shape.page_bytes();
  const size_t free = arena.free_bytes(page_bytes);
  const absl::Status full = absl::ResourceExhaustedError(absl::StrCat(
      "K/V memory is full: the request needs ", bytes, " bytes more; ", used, " of ", capacity,
      " bytes are in use, and ", free, " are free for pages of ", page_bytes));
  if (bytes > capacity) return WithTooLarge(full, bytes, capacity);
  return WithInfo(full, reason::kKvFull,
                  {{"needed_bytes", bytes}, {"free_bytes", free}, {"used_bytes", used}});
}

absl::Status SequenceTable::OverKvQuota(size_t needed, size_t used) const {
  const size_t limit = options_.client_kv_bytes;
  const absl::Status full = absl::ResourceExhaustedError(
      absl::StrCat("client quota: the sequences of this client hold ", used, " of ", limit,
                   " bytes of K/V, and the request needs ", needed, " more"));
  if (needed > limit) return WithTooLarge(full, needed, limit);
  return WithInfo(
      full, reason::kQuotaExceeded,
      {{"limit", "client_kv_bytes"}, {"needed", needed}, {"used", used}, {"allowed", limit}});
}

absl::Status SequenceTable::SharePages(const Sequence& parent, std::optional<uint64_t> length,
                                       Sequence* child) {
  const size_t before = child->client->kv_bytes;
  for (size_t i = 0; i < parent.layers.size(); ++i) {
    const SequenceLayer& from = parent.layers[i];
    SequenceLayer& to = child->layers[i];
    to.length = length.value_or(from.length);
    to.pages.assign(from.pages.begin(), from.pages.begin() + PagesFor(to.length));
    for (const PageId page : to.pages) pages_.AddRef(page, child->client);
  }
  // The pages of another client are new to this one.
  const size_t added = child->client->kv_bytes - before;
  if (MakeKvRoom(0, *child->client)) return absl::OkStatus();
  return OverKvQuota(added, child->client->kv_bytes - added);
}

bool SequenceTable::EvictOf(const KvClient& client) {
  return options_.evict_lru && Evict(FirstWithoutLease(client));
}

bool SequenceTable::EvictOfLargest(size_t KvClient::*held, const std::string& client,
                                   size_t amount) {
  if (!options_.evict_lru) return false;
  const KvClient* const found = pages_.FindClient(client);
  size_t most = (found == nullptr ? 0 : found->*held) + amount;
  SequencePtr victim = found == nullptr ? nullptr : FirstWithoutLease(*found);
  for (const auto& [name, other] : pages_.clients()) {
    if (other.*held <= most) continue;
    SequencePtr of_other = FirstWithoutLease(other);
    if (of_other == nullptr) continue;
    victim = std::move(of_other);
    most = other.*held;
  }
  return Evict(victim);
}

bool SequenceTable::Evict(const SequencePtr& victim) {
  if (victim == nullptr) return false;
  Remove(victim);
  metrics_.sequences_evicted.Increment();
  return true;
}

void SequenceTable::DropPages(const Sequence& sequence, SequenceLayer* layer, size_t keep) {
  for (size_t i = keep; i < layer->pages.size(); ++i) {
    if (sequence.launches > 0) {
      pages_.UnrefAfterLaunches(layer->pages[i], sequence.client);
    } else {
      pages_.Unref(layer->pages[i], sequence.client);
    }
  }
  layer->CutPages(keep);
}

}  // namespace flashcore::server

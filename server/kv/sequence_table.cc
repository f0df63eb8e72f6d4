#include "server/kv/sequence_table.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"

namespace flashcore::server {

absl::StatusOr<SequencePtr> SequenceTable::Add(const SequenceShape& shape, bool pin,
                                               size_t table_pages, absl::string_view client) {
  const size_t metadata_bytes =
      sizeof(Sequence) + shape.num_layers * sizeof(SequenceLayer) + table_pages * sizeof(PageId);
  if (metadata_bytes > options_.metadata_bytes - metadata_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("sequence metadata: this sequence needs ", metadata_bytes, " bytes; ",
                     metadata_bytes_, " of ", options_.metadata_bytes, " are in use"));
  }
  ClientAccount* const account = pages_.OpenAccount(client);
  const size_t sequences = account->sequences.size();
  if (options_.client_sequences > 0 && sequences >= options_.client_sequences) {
    return absl::ResourceExhaustedError(absl::StrCat("client quota: this client has ", sequences,
                                                     " sequences, which is the limit"));
  }
  auto sequence = std::make_shared<Sequence>();
  sequence->id = SequenceId::Random(options_.device);
  sequence->shape = shape;
  sequence->pin = pin;
  sequence->account = account;
  sequence->serial = ++last_serial_;
  sequence->layers = std::vector<SequenceLayer>(shape.num_layers);
  sequence->last_used = clock_.Now();
  sequence->metadata_bytes = metadata_bytes;
  sequence->by_use = by_use_.insert(by_use_.end(), sequence);
  metadata_bytes_ += metadata_bytes;
  account->sequences.emplace(sequence->serial, sequence);
  by_id_.emplace(sequence->id, sequence);
  return sequence;
}

absl::StatusOr<SequencePtr> SequenceTable::Find(SequenceId id) const {
  const auto entry = by_id_.find(id);
  if (entry != by_id_.end()) return entry->second;
  return absl::NotFoundError(
      "sequence_id: no such sequence: it was deleted or evicted, has expired or never existed; "
      "load its K/V again");
}

void SequenceTable::Remove(const SequencePtr& sequence) {
  sequence->deleted = true;
  for (SequenceLayer& layer : sequence->layers) DropPages(*sequence, &layer, 0);
  by_use_.erase(sequence->by_use);
  metadata_bytes_ -= sequence->metadata_bytes;
  sequence->account->sequences.erase(sequence->serial);
  pages_.CloseIfEmpty(sequence->account);
  by_id_.erase(sequence->id);
}

void SequenceTable::RemoveIdle() {
  if (options_.idle_timeout <= Nanoseconds(0)) return;
  const TimePoint oldest = clock_.Now() - options_.idle_timeout;
  for (auto it = by_use_.begin(); it != by_use_.end() && (*it)->last_used <= oldest;) {
    const SequencePtr sequence = *it++;
    if (sequence->leases > 0) continue;
    Remove(sequence);
    metrics_.sequences_expired.Increment();
  }
}

void SequenceTable::MarkUsed(Sequence* sequence) {
  sequence->last_used = clock_.Now();
  if (!sequence->deleted) by_use_.splice(by_use_.end(), by_use_, sequence->by_use);
}

absl::StatusOr<PageId> SequenceTable::AllocatePage(const Sequence& sequence) {
  const size_t bytes = sequence.shape.page_bytes();
  const size_t client_bytes = sequence.account->kv_bytes;
  if (options_.client_kv_bytes > 0 && client_bytes + bytes > options_.client_kv_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("client quota: the sequences of this client hold ", client_bytes, " of ",
                     options_.client_kv_bytes, " bytes of K/V"));
  }
  const Segment preferred = sequence.pin ? Segment::kHot : Segment::kCold;
  do {
    const PageId page = pages_.Allocate(bytes, preferred, sequence.account);
    if (page != kNoPage) return page;
  } while (options_.evict_lru && EvictOne());
  const Arena& arena = pages_.arena();
  const size_t used = arena.used_bytes(Segment::kHot) + arena.used_bytes(Segment::kCold);
  const size_t capacity =
      arena.capacity_bytes(Segment::kHot) + arena.capacity_bytes(Segment::kCold);
  return absl::ResourceExhaustedError(absl::StrCat("K/V memory is full: ", used, " of ", capacity,
                                                   " bytes are in use, and no page of ", bytes,
                                                   " bytes is free"));
}

bool SequenceTable::EvictOne() {
  const auto victim = std::find_if(by_use_.begin(), by_use_.end(),
                                   [](const SequencePtr& s) { return s->leases == 0; });
  if (victim == by_use_.end()) return false;
  Remove(SequencePtr(*victim));
  metrics_.sequences_evicted.Increment();
  return true;
}

void SequenceTable::DropPages(const Sequence& sequence, SequenceLayer* layer, size_t keep) {
  for (size_t i = keep; i < layer->pages.size(); ++i) {
    if (sequence.launches > 0) {
      pages_.UnrefAfterLaunches(layer->pages[i]);
    } else {
      pages_.Unref(layer->pages[i]);
    }
  }
  layer->pages.resize(std::min(keep, layer->pages.size()));
}

}  // namespace flashcore::server

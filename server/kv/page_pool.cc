#include "server/kv/page_pool.h"

#include <algorithm>

namespace flashcore::server {

KvClient* PagePool::OpenClient(absl::string_view name) {
  KvClient& client = clients_[std::string(name)];
  client.name = std::string(name);
  return &client;
}

const KvClient* PagePool::FindClient(absl::string_view name) const {
  const auto entry = clients_.find(name);
  return entry == clients_.end() ? nullptr : &entry->second;
}

void PagePool::CloseIfEmpty(KvClient* client) {
  if (client->kv_bytes > 0 || !client->sequences.empty()) return;
  clients_.erase(clients_.find(client->name));
}

PageId PagePool::Allocate(size_t page_bytes, Segment preferred, KvClient* client) {
  const Segment other = preferred == Segment::kHot ? Segment::kCold : Segment::kHot;
  PageId page = arena_.Allocate(page_bytes, preferred, client);
  if (page == kNoPage) page = arena_.Allocate(page_bytes, other, client);
  if (page != kNoPage) client->kv_bytes += page_bytes;
  return page;
}

void PagePool::AddRef(PageId page, KvClient* client) {
  arena_.AddRef(page);
  if (client == nullptr || client == arena_.owner(page)) return;
  ++borrowed_[page];
  if (++client->borrowed[page] == 1) client->kv_bytes += arena_.page_bytes(page);
}

void PagePool::EndBorrow(PageId page, KvClient* client) {
  const auto total = borrowed_.find(page);
  if (--total->second == 0) borrowed_.erase(total);
  const auto own = client->borrowed.find(page);
  if (--own->second > 0) return;
  client->borrowed.erase(own);
  client->kv_bytes -= arena_.page_bytes(page);
  CloseIfEmpty(client);
}

uint32_t PagePool::borrowed(PageId page) const {
  const auto total = borrowed_.find(page);
  return total == borrowed_.end() ? 0 : total->second;
}

void PagePool::Unref(PageId page, KvClient* client) {
  auto* const owner = static_cast<KvClient*>(arena_.owner(page));
  const size_t bytes = arena_.page_bytes(page);
  const bool hot = arena_.segment(page) == Segment::kHot;
  if (client != nullptr && client != owner) EndBorrow(page, client);
  const bool freed = arena_.Unref(page);
  if (freed && hot) left_hot_bytes_ += bytes;
  if (owner == nullptr || (!freed && arena_.refs(page) > borrowed(page))) return;
  if (!freed) arena_.SetOwner(page, nullptr);
  owner->kv_bytes -= bytes;
  CloseIfEmpty(owner);
}

void PagePool::UnrefAfterLaunches(PageId page, KvClient* client) {
  if (running_.empty()) return Unref(page, client);
  deferred_.push_back({last_launch_, page, client});
}

uint64_t PagePool::BeginLaunch() {
  running_.push_back(++last_launch_);
  return last_launch_;
}

void PagePool::EndLaunch(uint64_t launch) {
  running_.erase(std::find(running_.begin(), running_.end(), launch));
  const uint64_t oldest = running_.empty() ? last_launch_ + 1 : running_.front();
  for (; !deferred_.empty() && deferred_.front().launch < oldest; deferred_.pop_front()) {
    Unref(deferred_.front().page, deferred_.front().client);
  }
}

bool PagePool::ShouldResetPersistingL2() {
  const size_t capacity = arena_.capacity_bytes(Segment::kHot);
  const size_t free = capacity - arena_.used_bytes(Segment::kHot);
  const size_t stale = std::min(left_hot_bytes_, free);
  if (stale == 0 || stale < capacity / 4) return false;
  left_hot_bytes_ = 0;
  return true;
}

}  // namespace flashcore::server

#include "server/kv/page_pool.h"

#include <algorithm>

namespace flashcore::server {

ClientAccount* PagePool::OpenAccount(absl::string_view client) {
  ClientAccount& account = accounts_[std::string(client)];
  account.client = std::string(client);
  return &account;
}

const ClientAccount* PagePool::FindAccount(absl::string_view client) const {
  const auto entry = accounts_.find(client);
  return entry == accounts_.end() ? nullptr : &entry->second;
}

void PagePool::CloseIfEmpty(ClientAccount* account) {
  if (account->kv_bytes > 0 || !account->sequences.empty()) return;
  accounts_.erase(accounts_.find(account->client));
}

PageId PagePool::Allocate(size_t page_bytes, Segment preferred, ClientAccount* account) {
  const Segment other = preferred == Segment::kHot ? Segment::kCold : Segment::kHot;
  PageId page = arena_.Allocate(page_bytes, preferred, account);
  if (page == kNoPage) page = arena_.Allocate(page_bytes, other, account);
  if (page != kNoPage) account->kv_bytes += page_bytes;
  return page;
}

void PagePool::AddRef(PageId page, ClientAccount* account) {
  arena_.AddRef(page);
  if (account == nullptr || account == arena_.owner(page)) return;
  ++borrowed_[page];
  if (++account->borrowed[page] == 1) account->kv_bytes += arena_.page_bytes(page);
}

void PagePool::EndBorrow(PageId page, ClientAccount* account) {
  const auto total = borrowed_.find(page);
  if (--total->second == 0) borrowed_.erase(total);
  const auto own = account->borrowed.find(page);
  if (--own->second > 0) return;
  account->borrowed.erase(own);
  account->kv_bytes -= arena_.page_bytes(page);
  CloseIfEmpty(account);
}

uint32_t PagePool::borrowed(PageId page) const {
  const auto total = borrowed_.find(page);
  return total == borrowed_.end() ? 0 : total->second;
}

void PagePool::Unref(PageId page, ClientAccount* account) {
  auto* const owner = static_cast<ClientAccount*>(arena_.owner(page));
  const size_t bytes = arena_.page_bytes(page);
  const bool hot = arena_.segment(page) == Segment::kHot;
  if (account != nullptr && account != owner) EndBorrow(page, account);
  const bool freed = arena_.Unref(page);
  if (freed && hot) left_hot_bytes_ += bytes;
  if (owner == nullptr || (!freed && arena_.refs(page) > borrowed(page))) return;
  if (!freed) arena_.SetOwner(page, nullptr);
  owner->kv_bytes -= bytes;
  CloseIfEmpty(owner);
}

void PagePool::UnrefAfterLaunches(PageId page, ClientAccount* account) {
  if (running_.empty()) return Unref(page, account);
  deferred_.push_back({last_launch_, page, account});
}

uint64_t PagePool::BeginLaunch() {
  running_.push_back(++last_launch_);
  return last_launch_;
}

void PagePool::EndLaunch(uint64_t launch) {
  running_.erase(std::find(running_.begin(), running_.end(), launch));
  const uint64_t oldest = running_.empty() ? last_launch_ + 1 : running_.front();
  for (; !deferred_.empty() && deferred_.front().launch < oldest; deferred_.pop_front()) {
    Unref(deferred_.front().page, deferred_.front().account);
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

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

void PagePool::Unref(PageId page) {
  auto* const account = static_cast<ClientAccount*>(arena_.owner(page));
  const size_t bytes = arena_.page_bytes(page);
  const bool hot = arena_.segment(page) == Segment::kHot;
  if (!arena_.Unref(page)) return;
  if (hot) left_hot_bytes_ += bytes;
  if (account == nullptr) return;
  account->kv_bytes -= bytes;
  CloseIfEmpty(account);
}

void PagePool::UnrefAfterLaunches(PageId page) {
  if (running_.empty()) return Unref(page);
  deferred_.push_back({last_launch_, page});
}

uint64_t PagePool::BeginLaunch() {
  running_.push_back(++last_launch_);
  return last_launch_;
}

void PagePool::EndLaunch(uint64_t launch) {
  running_.erase(std::find(running_.begin(), running_.end(), launch));
  const uint64_t oldest = running_.empty() ? last_launch_ + 1 : running_.front();
  for (; !deferred_.empty() && deferred_.front().launch < oldest; deferred_.pop_front()) {
    Unref(deferred_.front().page);
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

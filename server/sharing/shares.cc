#include "server/sharing/shares.h"

namespace flashcore::server {
namespace {

constexpr size_t kMaxIdleAccounts = 64;

}  // namespace

Shares::Account* Shares::Take(absl::string_view holder, size_t amount) {
  auto found = accounts_.find(holder);
  if (found == accounts_.end()) {
    found = accounts_.try_emplace(std::string(holder), Account{std::string(holder)}).first;
  }
  Account& account = found->second;
  const bool was_within = limits_.one == 0 || account.held <= limits_.one;
  account.held += amount;
  held_ += amount;
  if (was_within && limits_.one > 0 && account.held > limits_.one) ++over_share_;
  return &account;
}

void Shares::Give(Account* account, size_t amount) {
  const bool was_over = limits_.one > 0 && account->held > limits_.one;
  account->held -= amount;
  held_ -= amount;
  if (was_over && account->held <= limits_.one) --over_share_;
  if (account->held == 0 && accounts_.size() > kMaxIdleAccounts) {
    accounts_.erase(accounts_.find(account->holder));
  }
}

void Shares::Take(absl::string_view holder, size_t amount, Item* item) {
  Account* const account = Take(holder, amount);
  *item = {account, amount, account->newest, nullptr};
  (account->newest == nullptr ? account->oldest : account->newest->newer) = item;
  account->newest = item;
  ++items_;
}

void Shares::Give(Item* item) {
  Account* const account = item->account;
  (item->older == nullptr ? account->oldest : item->older->newer) = item->newer;
  (item->newer == nullptr ? account->newest : item->newer->older) = item->older;
  Give(account, item->amount);
  *item = {};
  --items_;
}

bool Shares::IsOverShare(absl::string_view holder, size_t amount) const {
  return limits_.one > 0 && held(holder) + amount > limits_.one;
}

const Shares::Account* Shares::Debtor() const {
  const bool all_full = limits_.all > 0 && held_ > limits_.all;
  return over_share_ == 0 && !all_full ? nullptr : Largest();
}

const Shares::Account* Shares::Largest() const {
  const Account* most = nullptr;
  if (held_ == 0) return most;
  for (const auto& [holder, account] : accounts_) {
    if (most == nullptr || account.held > most->held) most = &account;
  }
  return most;
}

size_t Shares::held(absl::string_view holder) const {
  const auto found = accounts_.find(holder);
  return found == accounts_.end() ? 0 : found->second.held;
}

}  // namespace flashcore::server

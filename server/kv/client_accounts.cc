#include "server/kv/client_accounts.h"

namespace flashcore::server {

uint32_t ClientAccounts::Open(absl::string_view name) {
  auto [entry, is_new] = by_name_.try_emplace(name, 0);
  if (!is_new) return entry->second;
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(accounts_.size()));
    accounts_.emplace_back();
  }
  entry->second = free_.back();
  free_.pop_back();
  accounts_[entry->second] = std::make_unique<Account>();
  accounts_[entry->second]->name = std::string(name);
  return entry->second;
}

const ClientAccounts::Account* ClientAccounts::Find(absl::string_view name) const {
  const auto entry = by_name_.find(name);
  return entry == by_name_.end() ? nullptr : accounts_[entry->second].get();
}

void ClientAccounts::CloseIfEmpty(uint32_t number) {
  const Account& account = *accounts_[number];
  if (account.kv_bytes > 0 || !account.sequences.empty()) return;
  by_name_.erase(account.name);
  accounts_[number].reset();
  free_.push_back(number);
}

}  // namespace flashcore::server

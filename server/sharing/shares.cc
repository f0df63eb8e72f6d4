#include "server/sharing/shares.h"

namespace flashcore::server {
namespace {

constexpr size_t kMaxIdleClients = 64;

}  // namespace

Shares::Client* Shares::Take(absl::string_view name, size_t amount) {
  auto found = clients_.find(name);
  if (found == clients_.end()) {
    found = clients_.try_emplace(std::string(name), Client{std::string(name)}).first;
  }
  Client& client = found->second;
  const bool was_within = limits_.one == 0 || client.held <= limits_.one;
  client.held += amount;
  held_ += amount;
  if (was_within && limits_.one > 0 && client.held > limits_.one) ++over_share_;
  return &client;
}

void Shares::Give(Client* client, size_t amount) {
  const bool was_over = limits_.one > 0 && client->held > limits_.one;
  client->held -= amount;
  held_ -= amount;
  if (was_over && client->held <= limits_.one) --over_share_;
  if (client->held == 0 && clients_.size() > kMaxIdleClients) {
    clients_.erase(clients_.find(client->name));
  }
}

void Shares::Take(absl::string_view name, size_t amount, Item* item) {
  Client* const client = Take(name, amount);
  *item = {client, amount, client->newest, nullptr};
  (client->newest == nullptr ? client->oldest : client->newest->newer) = item;
  client->newest = item;
  ++items_;
}

void Shares::Give(Item* item) {
  Client* const client = item->client;
  (item->older == nullptr ? client->oldest : item->older->newer) = item->newer;
  (item->newer == nullptr ? client->newest : item->newer->older) = item->older;
  Give(client, item->amount);
  *item = {};
  --items_;
}

bool Shares::IsOverShare(absl::string_view name, size_t amount) const {
  return limits_.one > 0 && held(name) + amount > limits_.one;
}

const Shares::Client* Shares::MustGiveBack() const {
  const bool all_full = limits_.all > 0 && held_ > limits_.all;
  return over_share_ == 0 && !all_full ? nullptr : Largest();
}

const Shares::Client* Shares::Largest() const {
  const Client* most = nullptr;
  if (held_ == 0) return most;
  for (const auto& [name, client] : clients_) {
    if (most == nullptr || client.held > most->held) most = &client;
  }
  return most;
}

size_t Shares::held(absl::string_view name) const {
  const auto found = clients_.find(name);
  return found == clients_.end() ? 0 : found->second.held;
}

}  // namespace flashcore::server

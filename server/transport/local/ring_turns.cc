#include "server/transport/local/ring_turns.h"

#include <algorithm>
#include <utility>

namespace flashcore::server::local {

std::vector<RingTurns::Client>::iterator RingTurns::Find(const RingSession& session) {
  return std::find_if(clients_.begin(), clients_.end(),
                      [&](const Client& client) { return client.name == session.client(); });
}

void RingTurns::Add(std::shared_ptr<RingSession> session) {
  const auto found = Find(*session);
  Client& client = found != clients_.end() ? *found : clients_.emplace_back();
  client.name = session->client();
  client.sessions.push_back(std::move(session));
}

void RingTurns::Remove(const std::shared_ptr<RingSession>& session) {
  const auto client = Find(*session);
  if (client == clients_.end()) return;
  auto& sessions = client->sessions;
  sessions.erase(std::remove(sessions.begin(), sessions.end(), session), sessions.end());
  client->next = 0;
  if (sessions.empty()) clients_.erase(client);
}

bool RingTurns::Poll() {
  bool worked = false;
  for (Client& client : clients_) worked |= PollOne(&client);
  return worked;
}

bool RingTurns::PollOne(Client* client) {
  const size_t rings = client->sessions.size();
  for (size_t i = 0; i < rings; ++i) {
    RingSession& session = *client->sessions[client->next];
    client->next = client->next + 1 == rings ? 0 : client->next + 1;
    if (session.Poll()) return true;
  }
  return false;
}

bool RingTurns::Sleep() {
  bool has_news = false;
  for (const Client& client : clients_) {
    for (const auto& session : client.sessions) has_news |= session->Sleep();
  }
  return has_news;
}

}  // namespace flashcore::server::local

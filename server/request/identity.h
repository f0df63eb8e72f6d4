// An Identity is who a client is. Quotas, fairness, listings and ownership go by it.
#ifndef FLASHCORE_SERVER_REQUEST_IDENTITY_H_
#define FLASHCORE_SERVER_REQUEST_IDENTITY_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace flashcore::server {

using TokenDigest = std::array<uint8_t, 32>;  // SHA-256 of a bearer token

// Made in one place, the transport's Authenticator.
struct Identity {
  std::string name;                 // unique
  std::vector<std::string> groups;  // that it belongs to
  TokenDigest token = {};           // that the client sent; zeros: none
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_IDENTITY_H_

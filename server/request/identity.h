// Who calls. Quotas, fairness, listings and ownership go by it.
#ifndef FLASHCORE_SERVER_REQUEST_IDENTITY_H_
#define FLASHCORE_SERVER_REQUEST_IDENTITY_H_

#include <string>
#include <vector>

namespace flashcore::server {

// Made in one place, the transport's Authenticator.
struct Identity {
  std::string name;                 // unique
  std::vector<std::string> groups;  // that it belongs to
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_IDENTITY_H_

// The page tokens of ListSequences.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_PAGE_TOKEN_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_PAGE_TOKEN_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace flashcore::server {

// A token is a position in the listing of one client, with a tag that only this process can make
// and that holds for that client alone. Thread-safe.
class PageTokens {
 public:
  PageTokens();  // with a random key

  std::string Make(absl::string_view client, uint64_t position) const;
  // The position. Nothing if Make of this object did not return `token` for `client`.
  std::optional<uint64_t> Parse(absl::string_view client, absl::string_view token) const;

 private:
  // The first 64 bits of an HMAC-SHA256.
  uint64_t Tag(absl::string_view client, uint64_t position) const;

  std::array<unsigned char, 32> key_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_PAGE_TOKEN_H_

// The page tokens of ListSequences.
#ifndef FLASHCORE_SERVER_TRANSPORT_PAGE_TOKEN_H_
#define FLASHCORE_SERVER_TRANSPORT_PAGE_TOKEN_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace flashcore::server {

// SipHash-2-4 of `data`: without the key, nobody can compute or guess it.
using SipHashKey = std::array<uint64_t, 2>;
uint64_t SipHash(const SipHashKey& key, absl::string_view data);

// A token is a position in the listing of one client, with a tag that only this process can make
// and that holds for that client alone. Thread-safe.
class PageTokens {
 public:
  PageTokens();  // with a random key

  std::string Make(absl::string_view client, uint64_t position) const;
  // The position. Nothing if Make of this object did not return `token` for `client`.
  std::optional<uint64_t> Parse(absl::string_view client, absl::string_view token) const;

 private:
  uint64_t Tag(absl::string_view client, uint64_t position) const;

  SipHashKey key_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_PAGE_TOKEN_H_

// The file of --token_file: the bearer tokens that clients may send. Knows no gRPC.
#ifndef FLASHCORE_SERVER_ACCESS_TOKEN_FILE_H_
#define FLASHCORE_SERVER_ACCESS_TOKEN_FILE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/request/identity.h"

namespace flashcore::server {

TokenDigest DigestOf(absl::string_view token);

// Immutable.
class TokenTable {
 public:
  static constexpr size_t kMaxTokens = 1024;    // a look-up compares with all of them
  static constexpr size_t kMaxNameBytes = 128;  // of a name, and of a group

  struct Entry {
    std::string name;
    TokenDigest digest;
    std::vector<std::string> groups;
  };

  // Reads lines NAME:SHA256:GROUPS: the token's digest in hexadecimal, and group names with commas
  // between them, or none. Names are printable ASCII without ':', ',' and spaces. Empty lines and
  // those that begin with '#' are skipped. A name may have several tokens, so that they can be
  // replaced one after the other. INVALID_ARGUMENT names the line. A file without any token is an
  // error, because that is what a file looks like that is still being written.
  static absl::StatusOr<TokenTable> Parse(absl::string_view text);

  // Null if there is none. The time it takes does not depend on the digests.
  const Entry* Find(const TokenDigest& digest) const;

  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_ACCESS_TOKEN_FILE_H_

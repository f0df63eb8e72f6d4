#include "server/transport/rpc/page_token.h"

#include <openssl/hmac.h>
#include <sys/random.h>

#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace flashcore::server {
namespace {

constexpr size_t kHexDigits = 16;  // of 64 bits

std::string Hex(uint64_t value) { return absl::StrCat(absl::Hex(value, absl::kZeroPad16)); }

}  // namespace

PageTokens::PageTokens() {
  // getrandom never returns fewer than 256 bytes; without a random key nothing is secret.
  if (getrandom(key_.data(), sizeof(key_), 0) != sizeof(key_)) std::abort();
}

uint64_t PageTokens::Tag(absl::string_view client, uint64_t position) const {
  const std::string data = absl::StrCat(Hex(position), client);
  unsigned char digest[EVP_MAX_MD_SIZE] = {};
  HMAC(EVP_sha256(), key_.data(), static_cast<int>(key_.size()),
       reinterpret_cast<const unsigned char*>(data.data()), data.size(), digest, nullptr);
  uint64_t tag = 0;
  std::memcpy(&tag, digest, sizeof(tag));
  return tag;
}

std::string PageTokens::Make(absl::string_view client, uint64_t position) const {
  return Hex(position) + Hex(Tag(client, position));
}

std::optional<uint64_t> PageTokens::Parse(absl::string_view client, absl::string_view token) const {
  if (token.size() != 2 * kHexDigits) return std::nullopt;
  uint64_t position = 0;
  if (!absl::SimpleHexAtoi(token.substr(0, kHexDigits), &position)) return std::nullopt;
  if (token != Make(client, position)) return std::nullopt;
  return position;
}

}  // namespace flashcore::server

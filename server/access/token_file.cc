#include "server/access/token_file.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace flashcore::server {
namespace {

bool IsName(absl::string_view text) {
  return !text.empty() && text.size() <= TokenTable::kMaxNameBytes &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return absl::ascii_isgraph(c) && c != ':' && c != ',';
         });
}

bool ParseDigest(absl::string_view hex, TokenDigest* digest) {
  if (hex.size() != 2 * digest->size() || !std::all_of(hex.begin(), hex.end(), [](unsigned char c) {
        return absl::ascii_isxdigit(c);
      })) {
    return false;
  }
  const std::string bytes = absl::HexStringToBytes(hex);
  std::copy(bytes.begin(), bytes.end(), digest->begin());
  return true;
}

absl::Status ParseLine(absl::string_view line, TokenTable::Entry* entry) {
  const std::vector<absl::string_view> fields = absl::StrSplit(line, ':');
  if (fields.size() != 3) return absl::InvalidArgumentError("want NAME:SHA256:GROUPS");
  if (!IsName(fields[0])) {
    return absl::InvalidArgumentError(absl::StrCat("NAME: want 1 to ", TokenTable::kMaxNameBytes,
                                                   " bytes of printable ASCII without ':', ',' "
                                                   "and spaces"));
  }
  entry->name = std::string(fields[0]);
  if (!ParseDigest(fields[1], &entry->digest)) {
    return absl::InvalidArgumentError("SHA256: want the 64 hexadecimal digits of a SHA-256 digest");
  }
  if (fields[2].empty()) return absl::OkStatus();
  for (const absl::string_view group : absl::StrSplit(fields[2], ',')) {
    if (!IsName(group)) {
      return absl::InvalidArgumentError("GROUPS: want names with commas between them, or nothing");
    }
    entry->groups.emplace_back(group);
  }
  return absl::OkStatus();
}

}  // namespace

TokenDigest DigestOf(absl::string_view token) {
  TokenDigest digest;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  return digest;
}

absl::StatusOr<TokenTable> TokenTable::Parse(absl::string_view text) {
  TokenTable table;
  std::map<TokenDigest, int> lines;  // by digest
  int number = 0;
  const auto error = [&number](absl::string_view problem) {
    return absl::InvalidArgumentError(absl::StrCat("line ", number, ": ", problem));
  };
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line[0] == '#') continue;
    Entry entry;
    if (absl::Status status = ParseLine(line, &entry); !status.ok()) return error(status.message());
    const auto [other, is_new] = lines.emplace(entry.digest, number);
    if (!is_new) return error(absl::StrCat("the same token as in line ", other->second));
    if (lines.size() > kMaxTokens) return error(absl::StrCat("more than ", kMaxTokens, " tokens"));
    table.entries_.push_back(std::move(entry));
  }
  if (table.entries_.empty()) return absl::InvalidArgumentError("no token in it");
  return table;
}

const TokenTable::Entry* TokenTable::Find(const TokenDigest& digest) const {
  const Entry* found = nullptr;
  for (const Entry& entry : entries_) {
    if (CRYPTO_memcmp(entry.digest.data(), digest.data(), digest.size()) == 0) found = &entry;
  }
  return found;
}

}  // namespace flashcore::server

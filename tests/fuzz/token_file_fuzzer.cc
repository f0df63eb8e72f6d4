// Gives bytes to the reader of the token file. An accepted file is within its limits and its tokens
// are found by digest; a refused one is explained without being repeated.
#include <algorithm>
#include <cstdint>
#include <set>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/access/token_file.h"
#include "tests/fuzz/require.h"

namespace flashcore::fuzz {
namespace {

using server::TokenTable;

bool IsName(const std::string& name) {
  return !name.empty() && name.size() <= TokenTable::kMaxNameBytes &&
         name.find_first_of(":,") == name.npos &&
         std::all_of(name.begin(), name.end(),
                     [](unsigned char c) { return absl::ascii_isgraph(c); });
}

bool Same(const TokenTable::Entry& a, const TokenTable::Entry& b) {
  return a.name == b.name && a.digest == b.digest && a.groups == b.groups;
}

void CheckInput(const std::string& text) {
  const absl::StatusOr<TokenTable> table = TokenTable::Parse(text);
  if (!table.ok()) {
    const absl::string_view error = table.status().message();
    Require((absl::StartsWith(error, "line ") || error == "no token in it") && error.size() < 200,
            absl::StrCat("an error without its line: ", error));
    return;
  }
  Require(!table->entries().empty() && table->entries().size() <= TokenTable::kMaxTokens, "size");
  std::set<server::TokenDigest> digests;
  std::string written = "# again\n\n";
  for (const TokenTable::Entry& entry : table->entries()) {
    Require(IsName(entry.name), "name");
    for (const std::string& group : entry.groups) Require(IsName(group), "group");
    Require(digests.insert(entry.digest).second, "a token twice");
    Require(table->Find(entry.digest) == &entry, "an entry that is not found");
    const std::string bytes(entry.digest.begin(), entry.digest.end());
    absl::StrAppend(&written, entry.name, ":", absl::BytesToHexString(bytes), ":",
                    absl::StrJoin(entry.groups, ","), "\r\n");
  }
  const absl::StatusOr<TokenTable> again = TokenTable::Parse(written);
  Require(again.ok() && std::equal(again->entries().begin(), again->entries().end(),
                                   table->entries().begin(), table->entries().end(), Same),
          "it does not read back");
}

}  // namespace
}  // namespace flashcore::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashcore::fuzz::CheckInput(std::string(data, data + size));
  return 0;
}

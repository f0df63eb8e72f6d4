// Gives bytes to the reader of x-forwarded-client-cert. An accepted header reads the same when it
// is written again with all values in quotes.
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/access/forwarded_client.h"
#include "tests/fuzz/require.h"

namespace flashcore::fuzz {
namespace {

using server::ForwardedClient;
using server::ParseForwardedClients;

// Whether the value can be in quotes: the format has no way to write all of them.
bool Quotable(const std::string& value) { return !absl::StrContains(value, '\\'); }

std::string Quoted(const std::string& value) {
  std::string quoted = "\"";
  for (const char c : value) absl::StrAppend(&quoted, c == '"' ? "\\" : "", std::string(1, c));
  return quoted + "\"";
}

void CheckInput(const std::string& header) {
  const auto clients = ParseForwardedClients(header);
  if (!clients.ok()) {
    const absl::string_view error = clients.status().message();
    Require(absl::StartsWith(error, "x-forwarded-client-cert: ") && error.size() < 200,
            absl::StrCat("an error of another form: ", error));
    return;
  }
  Require(!clients->empty() && clients->size() <= 16 && header.size() <= 8192, "limits");
  std::vector<std::string> elements;
  for (const ForwardedClient& client : *clients) {
    std::vector<std::string> pairs = {"By=x"};
    const auto add = [&pairs](const char* key, const std::string& value) {
      Require(!value.empty(), "an empty name");
      pairs.push_back(absl::StrCat(key, "=", Quoted(value)));
      return Quotable(value);
    };
    bool quotable = true;
    for (const std::string& uri : client.uris) quotable &= add("URI", uri);
    for (const std::string& dns : client.dns) quotable &= add("dns", dns);
    if (!client.subject.empty()) quotable &= add("Subject", client.subject);
    if (!client.hash.empty()) quotable &= add("Hash", client.hash);
    client.Name();
    if (!quotable) return;
    elements.push_back(absl::StrJoin(pairs, ";"));
  }
  const std::string written = absl::StrJoin(elements, ",");
  if (written.size() > 8192) return;
  const auto again = ParseForwardedClients(written);
  Require(again.ok() && again->size() == clients->size(), "it does not read back: " + written);
  for (size_t i = 0; i < clients->size(); ++i) {
    const ForwardedClient &a = (*clients)[i], &b = (*again)[i];
    Require(a.uris == b.uris && a.dns == b.dns && a.subject == b.subject && a.hash == b.hash &&
                a.Name() == b.Name(),
            "it reads back differently: " + written);
  }
}

}  // namespace
}  // namespace flashcore::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashcore::fuzz::CheckInput(std::string(data, data + size));
  return 0;
}

#include "server/access/forwarded_client.h"

#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace flashcore::server {
namespace {

constexpr size_t kMaxHeaderBytes = 8192;
constexpr size_t kMaxElements = 16;

absl::Status Error(absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat("x-forwarded-client-cert: ", problem));
}

// Takes a value from the front of `rest`: all up to a separator, or what is in quotes.
absl::Status TakeValue(absl::string_view* rest, std::string* value) {
  if (!absl::ConsumePrefix(rest, "\"")) {
    const absl::string_view text = rest->substr(0, rest->find_first_of(",;"));
    if (absl::StrContains(text, '"')) return Error("a quote inside of a value");
    value->assign(text.data(), text.size());
    rest->remove_prefix(text.size());
    return absl::OkStatus();
  }
  while (!rest->empty() && rest->front() != '"') {
    if (absl::ConsumePrefix(rest, "\\\"")) {
      value->push_back('"');
      continue;
    }
    // Other escapes are those of RFC 2253 in a subject: left as they are. An escaped backslash does
    // not escape the quote after it.
    const size_t taken = rest->front() == '\\' && rest->size() > 1 ? 2 : 1;
    value->append(rest->data(), taken);
    rest->remove_prefix(taken);
  }
  if (!absl::ConsumePrefix(rest, "\"")) return Error("a quote that is not closed");
  return absl::OkStatus();
}

// Takes KEY=VALUE from the front of `rest`. `seen` has the keys of the element so far.
absl::Status TakePair(absl::string_view* rest, std::set<std::string>* seen,
                      ForwardedClient* client) {
  const size_t equals = rest->find_first_of("=,;\"");
  if (equals == rest->npos || (*rest)[equals] != '=') return Error("want KEY=VALUE");
  const std::string key =
      absl::AsciiStrToLower(absl::StripAsciiWhitespace(rest->substr(0, equals)));
  rest->remove_prefix(equals + 1);
  std::string value;
  if (absl::Status status = TakeValue(rest, &value); !status.ok()) return status;
  const bool repeatable = key == "by" || key == "uri" || key == "dns";
  if (!seen->insert(key).second && !repeatable) return Error("a key twice in one element");
  // Envoy writes "URI=" for a certificate without a URI.
  if (key == "uri") {
    if (!value.empty()) client->uris.push_back(std::move(value));
  } else if (key == "dns") {
    if (!value.empty()) client->dns.push_back(std::move(value));
  } else if (key == "subject") {
    client->subject = std::move(value);
  } else if (key == "hash") {
    client->hash = std::move(value);
  } else if (key != "by" && key != "cert" && key != "chain") {
    return Error("a key that is none of By, Hash, Cert, Chain, Subject, URI and DNS");
  }
  return absl::OkStatus();
}

// Takes the next attribute of an RFC 2253 name from the front of `rest`, with its escapes resolved.
std::string TakeAttribute(absl::string_view* rest) {
  std::string attribute;
  while (!rest->empty()) {
    const char c = rest->front();
    rest->remove_prefix(1);
    if (c == ',' || c == '+') break;
    if (c != '\\' || rest->empty()) {
      attribute.push_back(c);
      continue;
    }
    const bool is_hex =
        rest->size() >= 2 && absl::ascii_isxdigit((*rest)[0]) && absl::ascii_isxdigit((*rest)[1]);
    absl::StrAppend(&attribute, is_hex ? absl::HexStringToBytes(rest->substr(0, 2))
                                       : std::string(rest->substr(0, 1)));
    rest->remove_prefix(is_hex ? 2 : 1);
  }
  return attribute;
}

// Empty if there is none or more than one.
std::string CommonName(absl::string_view subject) {
  std::string name;
  while (!subject.empty()) {
    const std::string attribute = TakeAttribute(&subject);
    absl::string_view value = absl::StripLeadingAsciiWhitespace(attribute);
    if (!absl::StartsWithIgnoreCase(value, "CN=")) continue;
    if (!name.empty()) return "";
    name = std::string(value.substr(3));
  }
  return name;
}

}  // namespace

std::string ForwardedClient::Name() const {
  if (!uris.empty()) return uris.front();
  return dns.empty() ? CommonName(subject) : dns.front();
}

absl::StatusOr<std::vector<ForwardedClient>> ParseForwardedClients(absl::string_view header) {
  if (header.size() > kMaxHeaderBytes) {
    return Error(absl::StrCat("more than ", kMaxHeaderBytes, " bytes"));
  }
  std::vector<ForwardedClient> clients;
  while (true) {
    if (clients.size() == kMaxElements) {
      return Error(absl::StrCat("more than ", kMaxElements, " elements"));
    }
    ForwardedClient& client = clients.emplace_back();
    std::set<std::string> seen;
    do {
      absl::Status status = TakePair(&header, &seen, &client);
      if (!status.ok()) return status;
      header = absl::StripLeadingAsciiWhitespace(header);
    } while (absl::ConsumePrefix(&header, ";"));
    if (header.empty()) return clients;
    if (!absl::ConsumePrefix(&header, ",")) return Error("want ';' or ',' after a value");
  }
}

}  // namespace flashcore::server

#include "server/telemetry/metrics_token.h"

#include <algorithm>

#include "absl/memory/memory.h"
#include "absl/strings/ascii.h"

namespace flashcore::server {
namespace {

// A token that a client can send in a header as one word, without a comment.
bool CanBeToken(absl::string_view text) {
  return !text.empty() && text[0] != '#' &&
         std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return absl::ascii_isgraph(c); });
}

// Takes constant time for one length, so that a token cannot be guessed byte by byte.
bool SameSecret(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsToken>> MetricsToken::Open(const std::string& path,
                                                                 Counter* failures) {
  auto token = absl::WrapUnique(new MetricsToken(path, failures));
  if (absl::Status status = token->Read(); !status.ok()) return status;
  return token;
}

bool MetricsToken::Is(absl::string_view sent) {
  report_.Looked(Read());
  return SameSecret(sent, token_);
}

absl::Status MetricsToken::Read() {
  const absl::StatusOr<std::string> content = file_.Read();
  if (!content.ok()) return content.status();
  const absl::string_view line =
      absl::StripAsciiWhitespace(absl::string_view(*content).substr(0, content->find('\n')));
  if (!CanBeToken(line)) {
    return file_.Error(
        "its first line is no token: want visible ASCII without spaces, and no # at its begin");
  }
  token_ = std::string(line);
  return absl::OkStatus();
}

}  // namespace flashcore::server

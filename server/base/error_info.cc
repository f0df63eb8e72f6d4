#include "server/base/error_info.h"

#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_split.h"
#include "absl/types/optional.h"

namespace flashcore::server {
namespace {

// The payload has lines: the reason, then a key and a value in turns. It never leaves the process:
// ToStatus converts it, since protobuf is known to the transport only.
constexpr char kPayload[] = "flashcore/error_info";

}  // namespace

absl::Status WithInfo(absl::Status status, absl::string_view reason,
                      std::initializer_list<ErrorField> metadata) {
  std::string lines(reason);
  for (const ErrorField& field : metadata) {
    absl::StrAppend(&lines, "\n", field.key, "\n", field.value);
  }
  status.SetPayload(kPayload, absl::Cord(std::move(lines)));
  return status;
}

absl::Status WithTooLarge(absl::Status status, size_t needed_bytes, size_t limit_bytes) {
  return WithInfo(std::move(status), reason::kTooLarge,
                  {{"needed_bytes", needed_bytes}, {"limit_bytes", limit_bytes}});
}

std::optional<ErrorInfo> GetErrorInfo(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayload);
  if (!payload.has_value()) return std::nullopt;
  const std::vector<std::string> lines = absl::StrSplit(std::string(*payload), '\n');
  ErrorInfo info;
  info.reason = lines[0];
  for (size_t i = 1; i + 1 < lines.size(); i += 2) info.metadata.emplace(lines[i], lines[i + 1]);
  return info;
}

absl::Status WithMessage(const absl::Status& status, absl::string_view message) {
  absl::Status changed(status.code(), message);
  status.ForEachPayload([&](absl::string_view type, const absl::Cord& payload) {
    changed.SetPayload(type, payload);
  });
  return changed;
}

}  // namespace flashcore::server

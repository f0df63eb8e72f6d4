#include "server/base/error_info.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_split.h"

namespace flashcore::server {
namespace {

// The payload has the reason, then "key=value" for each field: one a line.
constexpr char kPayload[] = "flashcore/error_info";

}  // namespace

absl::Status WithInfo(absl::Status status, absl::string_view reason,
                      const std::vector<ErrorField>& metadata) {
  std::string lines(reason);
  for (const ErrorField& field : metadata)
    absl::StrAppend(&lines, "\n", field.key, "=", field.value);
  status.SetPayload(kPayload, absl::Cord(lines));
  return status;
}

std::optional<ErrorInfo> InfoOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayload);
  if (!payload.has_value()) return std::nullopt;
  const std::string text(*payload);
  ErrorInfo info;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (info.reason.empty()) {
      info.reason = std::string(line);
      continue;
    }
    const std::pair<absl::string_view, absl::string_view> field =
        absl::StrSplit(line, absl::MaxSplits('=', 1));
    info.metadata.emplace_back(field.first, field.second);
  }
  return info;
}

absl::Status WithMessage(const absl::Status& status, absl::string_view message) {
  absl::Status reworded(status.code(), message);
  status.ForEachPayload([&reworded](absl::string_view type, const absl::Cord& payload) {
    reworded.SetPayload(type, payload);
  });
  return reworded;
}

}  // namespace flashcore::server

#include "server/request/sequence_errors.h"

#include <algorithm>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/error_info.h"

namespace flashcore::server {
namespace {

constexpr size_t kMaxInText = 4;  // lost spans that the text names

std::string Hex(SequenceId id) { return absl::BytesToHexString(id.ToBytes()); }

// "spans[1].sequence_id", or "spans[1].sequence_id, spans[2].sequence_id and 7 more, 9 in all".
std::string FieldsOf(const std::vector<size_t>& spans) {
  const size_t named = std::min(spans.size(), kMaxInText);
  std::string fields = absl::StrJoin(
      spans.begin(), spans.begin() + static_cast<std::ptrdiff_t>(named), ", ",
      [](std::string* out, size_t span) { absl::StrAppend(out, "spans[", span, "].sequence_id"); });
  if (named < spans.size()) {
    absl::StrAppend(&fields, " and ", spans.size() - named, " more, ", spans.size(), " in all");
  }
  return fields;
}

}  // namespace

absl::Status SequenceLost(SequenceId id, absl::string_view why) {
  return WithInfo(absl::NotFoundError(absl::StrCat("sequence_id: ", why)), reason::kSequenceLost,
                  {{"sequence_ids", Hex(id)}, {"lost", 1}});
}

absl::Status SequencesLost(const AttendRequest& request, const std::vector<size_t>& spans,
                           absl::string_view why) {
  const auto end =
      spans.begin() + static_cast<std::ptrdiff_t>(std::min(spans.size(), kMaxNamedLost));
  const std::string ids =
      absl::StrJoin(spans.begin(), end, ",", [&request](std::string* out, size_t span) {
        absl::StrAppend(out, Hex(request.spans[span].sequence_id.id()));
      });
  const absl::Status status = absl::NotFoundError(absl::StrCat(FieldsOf(spans), ": ", why));
  if (request.append_only) {  // LoadSequence, which has no spans
    return WithInfo(status, reason::kSequenceLost, {{"sequence_ids", ids}, {"lost", spans.size()}});
  }
  return WithInfo(status, reason::kSequenceLost,
                  {{"sequence_ids", ids},
                   {"lost", spans.size()},
                   {"spans", absl::StrJoin(spans.begin(), end, ",")}});
}

absl::Status LengthMismatch(SequenceId id, uint64_t expected, uint64_t actual,
                            std::optional<size_t> span, absl::string_view text) {
  const absl::Status status = absl::FailedPreconditionError(text);
  if (!span.has_value()) {
    return WithInfo(status, reason::kLengthMismatch,
                    {{"sequence_id", Hex(id)}, {"expected", expected}, {"actual", actual}});
  }
  return WithInfo(
      status, reason::kLengthMismatch,
      {{"sequence_id", Hex(id)}, {"expected", expected}, {"actual", actual}, {"span", *span}});
}

}  // namespace flashcore::server

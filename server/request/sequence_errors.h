// Errors about sequences that a request names, with their ErrorInfo.
#ifndef FLASHCORE_SERVER_REQUEST_SEQUENCE_ERRORS_H_
#define FLASHCORE_SERVER_REQUEST_SEQUENCE_ERRORS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/request/request.h"
#include "server/request/sequence_id.h"

namespace flashcore::server {

// As many lost sequences are named in an ErrorInfo. A client of gRPC takes 8 KiB of metadata by
// default, and loses the whole status if there is more.
inline constexpr size_t kMaxNamedLost = 128;

// NOT_FOUND: the sequence is lost. `why` follows the name of the field in the text.
absl::Status SequenceLost(SequenceId id, absl::string_view why);
// NOT_FOUND: the sequences of these spans of the request are lost, at least one.
absl::Status SequencesLost(const AttendRequest& request, const std::vector<size_t>& spans,
                           absl::string_view why);

// FAILED_PRECONDITION with `text`: the sequence has `actual` rows. `span`: the index in an
// AttendRequest.
absl::Status LengthMismatch(SequenceId id, uint64_t expected, uint64_t actual,
                            std::optional<size_t> span, absl::string_view text);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_REQUEST_SEQUENCE_ERRORS_H_

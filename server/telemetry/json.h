// Text made safe to write to a log.
#ifndef FLASHCORE_SERVER_TELEMETRY_JSON_H_
#define FLASHCORE_SERVER_TELEMETRY_JSON_H_

#include <string>

#include "absl/strings/string_view.h"

namespace flashcore::server {

// Appends `text` as a JSON string with its quotes. Control characters are escaped, DEL and those of
// C1 included, so that the result is also safe on a terminal. Each maximal invalid part of a UTF-8
// sequence becomes one U+FFFD.
void AppendJsonString(absl::string_view text, std::string* out);

// Appends the shortest number that reads back as `value`; null if it is infinite or NaN.
void AppendJsonNumber(double value, std::string* out);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_JSON_H_

#include "client/cli/json.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace flashcore::cli {

std::string JsonString(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", c);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

JsonObject& JsonObject::Raw(absl::string_view key, absl::string_view json) {
  absl::StrAppend(&fields_, fields_.empty() ? "" : ", ", JsonString(key), ": ", json);
  return *this;
}

JsonObject& JsonObject::Add(absl::string_view key, double value) {
  return Raw(key, std::isfinite(value) ? absl::StrFormat("%.9g", value) : "null");
}

JsonObject& JsonObject::Add(absl::string_view key, uint64_t value) {
  return Raw(key, absl::StrCat(value));
}

JsonObject& JsonObject::Add(absl::string_view key, const std::vector<JsonObject>& values) {
  return Raw(key, absl::StrCat("[",
                               absl::StrJoin(values, ", ",
                                             [](std::string* out, const JsonObject& value) {
                                               absl::StrAppend(out, value.ToString());
                                             }),
                               "]"));
}

JsonObject& JsonObject::Add(absl::string_view key, const std::vector<uint64_t>& values) {
  return Raw(key, absl::StrCat("[", absl::StrJoin(values, ", "), "]"));
}

}  // namespace flashcore::cli

// JSON out of values in hand: fields appear in the order in which they were added.
#ifndef FLASHCORE_CLIENT_CLI_JSON_H_
#define FLASHCORE_CLIENT_CLI_JSON_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace flashcore::cli {

std::string JsonString(absl::string_view text);  // quoted and escaped

// Numbers that JSON cannot express (NaN, infinities) become null.
class JsonObject {
 public:
  JsonObject& Add(absl::string_view key, double value);
  JsonObject& Add(absl::string_view key, uint64_t value);
  JsonObject& Add(absl::string_view key, int value) { return Raw(key, std::to_string(value)); }
  JsonObject& Add(absl::string_view key, bool value) { return Raw(key, value ? "true" : "false"); }
  JsonObject& Add(absl::string_view key, const char* value) { return Raw(key, JsonString(value)); }
  JsonObject& Add(absl::string_view key, const std::string& value) {
    return Raw(key, JsonString(value));
  }
  JsonObject& Add(absl::string_view key, const JsonObject& value) {
    return Raw(key, value.ToString());
  }
  JsonObject& Add(absl::string_view key, const std::vector<JsonObject>& values);
  JsonObject& Add(absl::string_view key, const std::vector<uint64_t>& values);

  std::string ToString() const { return "{" + fields_ + "}"; }

 private:
  JsonObject& Raw(absl::string_view key, absl::string_view json);

  std::string fields_;
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_JSON_H_

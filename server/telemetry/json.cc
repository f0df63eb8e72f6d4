#include "server/telemetry/json.h"

#include <charconv>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_format.h"

namespace flashcore::server {
namespace {

constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

struct Sequence {
  size_t bytes;  // at least 1
  bool valid;
};

// What the UTF-8 sequence at the start of `text`, which is not empty, is: the Unicode standard's
// table 3-7.
Sequence NextSequence(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {1, true};
  size_t length = 0;
  unsigned char second_min = 0x80;
  unsigned char second_max = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) second_min = 0xA0;  // overlong
    if (lead == 0xED) second_max = 0x9F;  // surrogate
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) second_min = 0x90;  // overlong
    if (lead == 0xF4) second_max = 0x8F;  // above U+10FFFF
  } else {
    return {1, false};
  }
  for (size_t i = 1; i < length; ++i) {
    const unsigned char min = i == 1 ? second_min : 0x80;
    const unsigned char max = i == 1 ? second_max : 0xBF;
    if (i >= text.size() || byte(i) < min || byte(i) > max) return {i, false};
  }
  return {length, true};
}

void AppendAscii(char c, std::string* out) {
  switch (c) {
    case '"':
      out->append("\\\"");
      return;
    case '\\':
      out->append("\\\\");
      return;
    case '\n':
      out->append("\\n");
      return;
    case '\r':
      out->append("\\r");
      return;
    case '\t':
      out->append("\\t");
      return;
    default:
      break;
  }
  if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
    absl::StrAppendFormat(out, "\\u%04x", static_cast<unsigned>(c));
  } else {
    out->push_back(c);
  }
}

// U+0080 to U+009F: some terminals take them as commands.
bool IsC1(absl::string_view sequence) {
  return sequence.size() == 2 && sequence[0] == '\xC2' &&
         static_cast<unsigned char>(sequence[1]) < 0xA0;
}

}  // namespace

void AppendJsonString(absl::string_view text, std::string* out) {
  out->push_back('"');
  while (!text.empty()) {
    const Sequence next = NextSequence(text);
    const absl::string_view sequence = text.substr(0, next.bytes);
    if (!next.valid) {
      out->append(kReplacement.data(), kReplacement.size());
    } else if (next.bytes == 1) {
      AppendAscii(text[0], out);
    } else if (IsC1(sequence)) {
      absl::StrAppendFormat(out, "\\u%04x", static_cast<unsigned char>(sequence[1]));
    } else {
      out->append(sequence.data(), sequence.size());
    }
    text.remove_prefix(next.bytes);
  }
  out->push_back('"');
}

void AppendJsonNumber(double value, std::string* out) {
  if (!std::isfinite(value)) {
    out->append("null");
    return;
  }
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  out->append(buffer, static_cast<size_t>(result.ptr - buffer));
}

}  // namespace flashcore::server

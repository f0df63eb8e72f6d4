#include "server/transport/rpc/take_spans.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/strings/string_view.h"
#include "flashcore/v1/attention.pb.h"
#include "google/protobuf/io/coded_stream.h"
#include "proto/wire/fields.h"

namespace flashcore::server {
namespace {

using ::google::protobuf::io::CodedInputStream;

CodedInputStream Reader(absl::string_view bytes) {
  return CodedInputStream(reinterpret_cast<const uint8_t*>(bytes.data()),
                          static_cast<int>(bytes.size()));
}

// Reads the bytes of a field of `message`, which `in` reads.
bool ReadBytes(absl::string_view message, CodedInputStream* in, absl::string_view* bytes) {
  uint32_t length = 0;
  if (!wire::ReadLength(in, &length)) return false;
  *bytes = message.substr(static_cast<size_t>(in->CurrentPosition()), length);
  return in->Skip(static_cast<int>(length));
}

bool DecodeSpan(absl::string_view message, SpanShape* span, int* unknown_field) {
  constexpr auto kSequenceId =
      wire::MakeTag(v1::Span::kSequenceIdFieldNumber, wire::kLengthDelimited);
  constexpr auto kQueryRows = wire::MakeTag(v1::Span::kQueryRowsFieldNumber, wire::kVarint);
  constexpr auto kKvRows = wire::MakeTag(v1::Span::kKvRowsFieldNumber, wire::kVarint);
  constexpr auto kExpectedLength =
      wire::MakeTag(v1::Span::kExpectedLengthFieldNumber, wire::kVarint);
  CodedInputStream in = Reader(message);
  while (const uint32_t tag = wire::ReadTag(&in)) {
    uint64_t value = 0;
    switch (tag) {
      case kSequenceId: {
        absl::string_view id;
        if (!ReadBytes(message, &in, &id)) return false;
        span->sequence_id = id;
        break;
      }
      case kQueryRows:
        if (!in.ReadVarint64(&value)) return false;
        span->query_rows = static_cast<uint32_t>(value);
        break;
      case kKvRows:
        if (!in.ReadVarint64(&value)) return false;
        span->kv_rows = static_cast<uint32_t>(value);
        break;
      case kExpectedLength:
        if (!in.ReadVarint64(&value)) return false;
        span->expected_length = value;
        break;
      default:
        if (!wire::SkipValue(&in, tag, /*depth=*/1)) return false;
        *unknown_field = wire::FieldNumber(tag);
    }
  }
  return wire::AtEnd(&in, message.size());
}

}  // namespace

bool TakeSpans(std::string* message, std::vector<SpanShape>* spans, int* unknown_field) {
  *unknown_field = 0;
  constexpr auto kSpans =
      wire::MakeTag(v1::AttendRequest::kSpansFieldNumber, wire::kLengthDelimited);
  CodedInputStream in = Reader(*message);
  size_t kept = 0;   // bytes of the fields that stay
  size_t field = 0;  // where the current one begins
  while (const uint32_t tag = wire::ReadTag(&in)) {
    if (tag == kSpans) {
      absl::string_view span;
      if (!ReadBytes(*message, &in, &span) ||
          !DecodeSpan(span, &spans->emplace_back(), unknown_field)) {
        return false;
      }
    } else if (!wire::SkipValue(&in, tag, /*depth=*/0)) {
      return false;
    }
    const auto end = static_cast<size_t>(in.CurrentPosition());
    if (tag != kSpans) {
      std::memmove(&(*message)[kept], &(*message)[field], end - field);
      kept += end - field;
    }
    field = end;
  }
  if (!wire::AtEnd(&in, message->size())) return false;
  message->resize(kept);
  return true;
}

}  // namespace flashcore::server

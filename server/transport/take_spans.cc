#include "server/transport/take_spans.h"

#include <cstdint>
#include <cstring>

#include "absl/strings/string_view.h"
#include "flashcore/v1/attention.pb.h"

namespace flashcore::server {
namespace {

// Wire types of protobuf's encoding.
enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kLengthDelimited = 2,
  kStartGroup = 3,
  kEndGroup = 4,
  kFixed32 = 5,
};

// The generated parser's limits.
constexpr int kMaxVarintBytes = 10;
constexpr int kMaxTagBytes = 5;  // also of a length
constexpr int kMaxDepth = 99;    // of groups in a span

// Reads encoded fields from front to back.
class FieldReader {
 public:
  explicit FieldReader(absl::string_view bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}

  bool AtEnd() const { return at_ == end_; }
  const char* position() const { return at_; }

  bool ReadVarint(uint64_t* value) { return ReadVarint(value, kMaxVarintBytes); }

  bool ReadTag(uint32_t* number, uint32_t* type) {
    uint64_t tag = 0;
    if (!ReadVarint(&tag, kMaxTagBytes)) return false;
    *number = static_cast<uint32_t>(tag) >> 3;  // without the bits that do not fit
    *type = tag & 7;
    return *number != 0;
  }

  bool ReadBytes(absl::string_view* bytes) {
    uint64_t length = 0;
    if (!ReadVarint(&length, kMaxTagBytes)) return false;
    if (length > static_cast<uint64_t>(end_ - at_)) return false;
    *bytes = absl::string_view(at_, static_cast<size_t>(length));
    at_ += length;
    return true;
  }

  // Skips the value of a field of this number and type.
  bool Skip(uint32_t number, uint32_t type, int depth = 0) {
    uint64_t varint = 0;
    absl::string_view bytes;
    switch (type) {
      case kVarint:
        return ReadVarint(&varint);
      case kFixed64:
        return SkipBytes(8);
      case kFixed32:
        return SkipBytes(4);
      case kLengthDelimited:
        return ReadBytes(&bytes);
      case kStartGroup:
        return SkipGroup(number, depth + 1);
      default:  // an end tag without a start tag, or no wire type
        return false;
    }
  }

 private:
  bool ReadVarint(uint64_t* value, int max_bytes) {
    *value = 0;
    for (int i = 0; i < max_bytes && at_ != end_; ++i) {
      const auto byte = static_cast<uint8_t>(*at_++);
      *value |= uint64_t{byte & 0x7Fu} << (7 * i);
      if (byte < 0x80) return true;
    }
    return false;
  }

  bool SkipBytes(std::ptrdiff_t count) {
    if (count > end_ - at_) return false;
    at_ += count;
    return true;
  }

  bool SkipGroup(uint32_t group, int depth) {
    if (depth > kMaxDepth) return false;
    uint32_t number = 0, type = 0;
    while (ReadTag(&number, &type)) {
      if (type == kEndGroup) return number == group;
      if (!Skip(number, type, depth)) return false;
    }
    return false;
  }

  const char* at_;
  const char* const end_;
};

bool DecodeSpan(absl::string_view bytes, SpanShape* span) {
  FieldReader reader(bytes);
  while (!reader.AtEnd()) {
    uint32_t number = 0, type = 0;
    if (!reader.ReadTag(&number, &type)) return false;
    if (number == v1::Span::kSequenceIdFieldNumber && type == kLengthDelimited) {
      absl::string_view id;
      if (!reader.ReadBytes(&id)) return false;
      span->sequence_id = id;
      continue;
    }
    if (type != kVarint) {
      if (!reader.Skip(number, type)) return false;
      continue;
    }
    uint64_t value = 0;
    if (!reader.ReadVarint(&value)) return false;
    if (number == v1::Span::kQueryRowsFieldNumber) {
      span->query_rows = static_cast<uint32_t>(value);
    } else if (number == v1::Span::kKvRowsFieldNumber) {
      span->kv_rows = static_cast<uint32_t>(value);
    } else if (number == v1::Span::kExpectedLengthFieldNumber) {
      span->expected_length = value;
    }
  }
  return true;
}

}  // namespace

bool TakeSpans(std::string* message, std::vector<SpanShape>* spans) {
  FieldReader reader(*message);
  char* kept = &(*message)[0];  // end of the fields that stay
  while (!reader.AtEnd()) {
    const char* const field = reader.position();
    uint32_t number = 0, type = 0;
    if (!reader.ReadTag(&number, &type)) return false;
    if (number == v1::AttendRequest::kSpansFieldNumber && type == kLengthDelimited) {
      absl::string_view bytes;
      if (!reader.ReadBytes(&bytes) || !DecodeSpan(bytes, &spans->emplace_back())) return false;
      continue;
    }
    if (!reader.Skip(number, type)) return false;
    const auto size = static_cast<size_t>(reader.position() - field);
    std::memmove(kept, field, size);
    kept += size;
  }
  message->resize(static_cast<size_t>(kept - message->data()));
  return true;
}

}  // namespace flashcore::server

#include "proto/wire/fields.h"

#include <limits>

namespace flashcore::wire {

using ::google::protobuf::io::CodedInputStream;

namespace {

// The generated parser accepts tags and lengths of at most five bytes; CodedInputStream also
// accepts longer ones.
constexpr int kMaxVarint32Bytes = 5;

// Skips the rest of group `number`, including its end tag.
bool SkipGroup(CodedInputStream* in, int number, int depth) {
  constexpr int kMaxDepth = 100;  // the generated parser's limit
  if (depth > kMaxDepth) return false;
  const uint32_t end = MakeTag(number, kEndGroup);
  while (const uint32_t tag = ReadTag(in)) {
    if (tag == end) return true;
    if (!SkipValue(in, tag, depth)) return false;
  }
  return false;
}

}  // namespace

uint32_t ReadTag(CodedInputStream* in) {
  const int begin = in->CurrentPosition();
  const uint32_t tag = in->ReadTag();
  return in->CurrentPosition() - begin <= kMaxVarint32Bytes ? tag : 0;
}

bool ReadLength(CodedInputStream* in, uint32_t* length) {
  const int begin = in->CurrentPosition();
  uint64_t value = 0;
  if (!in->ReadVarint64(&value) || value > std::numeric_limits<int32_t>::max()) return false;
  *length = static_cast<uint32_t>(value);
  return in->CurrentPosition() - begin <= kMaxVarint32Bytes;
}

bool AtEnd(CodedInputStream* in, size_t bytes) {
  return in->ConsumedEntireMessage() && static_cast<size_t>(in->CurrentPosition()) == bytes;
}

bool SkipValue(CodedInputStream* in, uint32_t tag, int depth) {
  const int number = FieldNumber(tag);
  if (number == 0) return false;
  switch (WireTypeOf(tag)) {
    case kVarint: {
      uint64_t value = 0;
      return in->ReadVarint64(&value);
    }
    case kFixed64:
      return in->Skip(8);
    case kFixed32:
      return in->Skip(4);
    case kLengthDelimited: {
      uint32_t length = 0;
      return ReadLength(in, &length) && in->Skip(static_cast<int>(length));
    }
    case kStartGroup:
      return SkipGroup(in, number, depth + 1);
    default:  // an end tag without a start tag
      return false;
  }
}

}  // namespace flashcore::wire

#include "proto/wire/message.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "proto/wire/fields.h"

namespace flashcore::wire {
namespace {

using ::google::protobuf::io::ArrayInputStream;
using ::google::protobuf::io::CodedInputStream;
using ::google::protobuf::io::CodedOutputStream;
using ::google::protobuf::io::ZeroCopyInputStream;

// Appends to a string that may not grow beyond a limit.
class SmallFields {
 public:
  SmallFields(size_t limit, std::string* out) : limit_(limit), out_(out) { out_->clear(); }

  bool full() const { return full_; }

  // Room for `size` more bytes at the end, or null if that is over the limit.
  char* Extend(size_t size) {
    if (size > limit_ - out_->size()) {
      full_ = true;
      return nullptr;
    }
    out_->resize(out_->size() + size);
    return &(*out_)[out_->size() - size];
  }

  bool AppendVarint(uint64_t value) {
    uint8_t bytes[10];
    const uint8_t* end = CodedOutputStream::WriteVarint64ToArray(value, bytes);
    return Append(bytes, end - bytes);
  }

  bool Append(const void* bytes, size_t size) {
    char* to = Extend(size);
    if (to == nullptr) return false;
    std::copy_n(static_cast<const char*>(bytes), size, to);
    return true;
  }

 private:
  const size_t limit_;
  std::string* const out_;
  bool full_ = false;
};

// Moves the payload of the field `tag` from `in` to `out`. False if the message is malformed or
// `out` is full.
bool MoveField(CodedInputStream* in, uint32_t tag, SmallFields* out) {
  switch (WireTypeOf(tag)) {
    case kVarint: {
      uint64_t value = 0;
      return in->ReadVarint64(&value) && out->AppendVarint(tag) && out->AppendVarint(value);
    }
    case kFixed64: {
      char bytes[8];
      return in->ReadRaw(bytes, 8) && out->AppendVarint(tag) && out->Append(bytes, 8);
    }
    case kFixed32: {
      char bytes[4];
      return in->ReadRaw(bytes, 4) && out->AppendVarint(tag) && out->Append(bytes, 4);
    }
    case kLengthDelimited: {
      uint32_t size = 0;
      if (!ReadLength(in, &size) || !out->AppendVarint(tag) || !out->AppendVarint(size)) {
        return false;
      }
      char* to = out->Extend(size);
      return to != nullptr && in->ReadRaw(to, static_cast<int>(size));
    }
    default:  // a group: no message of ours has one, so only its number is of interest
      return SkipValue(in, tag, /*depth=*/0) && out->AppendVarint(tag) &&
             out->AppendVarint(MakeTag(FieldNumber(tag), kEndGroup));
  }
}

LargeField* Find(absl::Span<LargeField> large, uint32_t tag) {
  if (WireTypeOf(tag) != kLengthDelimited) {
    return nullptr;
  }
  for (LargeField& field : large) {
    if (field.number == FieldNumber(tag)) return &field;
  }
  return nullptr;
}

bool RecordPosition(CodedInputStream* in, size_t message_bytes, LargeField* field) {
  uint32_t size = 0;
  if (!ReadLength(in, &size)) return false;
  field->offset = static_cast<size_t>(in->CurrentPosition());
  if (size > message_bytes - field->offset) return false;
  field->size = size;
  return in->Skip(static_cast<int>(size));
}

absl::Status Split(CodedInputStream* in, size_t message_bytes, size_t max_small_bytes,
                   absl::Span<LargeField> large, std::string* small) {
  SmallFields out(max_small_bytes, small);
  while (const uint32_t tag = ReadTag(in)) {
    LargeField* field = Find(large, tag);
    const bool ok =
        FieldNumber(tag) != 0 &&
        (field != nullptr ? RecordPosition(in, message_bytes, field) : MoveField(in, tag, &out));
    if (ok) continue;
    if (out.full()) {
      return absl::InvalidArgumentError(
          absl::StrCat("message: its fields other than tensors take more than the ",
                       max_small_bytes, " bytes allowed"));
    }
    return absl::InvalidArgumentError(
        absl::StrCat("message: not a well-formed protobuf message, broken or truncated in or after "
                     "the field at byte ",
                     in->CurrentPosition(), " of ", message_bytes));
  }
  if (!AtEnd(in, message_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat("message: broken tag near byte ",
                                                   in->CurrentPosition(), " of ", message_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

MessageView::MessageView(absl::string_view bytes)
    : MessageView(bytes.data(), bytes.size(), [](const void* data, size_t size, Reader reader) {
        ArrayInputStream stream(data, static_cast<int>(size));
        reader(&stream);
      }) {}

absl::Status SplitMessage(const MessageView& message, size_t max_small_bytes,
                          absl::Span<LargeField> large, std::string* small) {
  for (LargeField& field : large) field.offset = field.size = 0;
  small->clear();
  absl::Status status;
  if (message.size() == 0) return status;
  message.Read([&](ZeroCopyInputStream* stream) {
    CodedInputStream in(stream);
    status = Split(&in, message.size(), max_small_bytes, large, small);
  });
  return status;
}

void CopyField(const MessageView& message, const LargeField& field, void* destination) {
  if (field.size == 0) return;
  message.Read([&](ZeroCopyInputStream* stream) {
    CodedInputStream in(stream);
    in.Skip(static_cast<int>(field.offset));
    in.ReadRaw(destination, static_cast<int>(field.size));
  });
}

std::string FieldHeader(int number, size_t payload_bytes) {
  uint8_t bytes[20];
  uint8_t* end = CodedOutputStream::WriteVarint32ToArray(MakeTag(number, kLengthDelimited), bytes);
  end = CodedOutputStream::WriteVarint64ToArray(payload_bytes, end);
  return std::string(bytes, end);
}

}  // namespace flashcore::wire

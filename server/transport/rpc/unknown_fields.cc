#include "server/transport/rpc/unknown_fields.h"

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/unknown_field_set.h"
#include "server/base/error_info.h"

namespace flashcore::server {

namespace protobuf = ::google::protobuf;

absl::Status CheckKnownFields(const protobuf::Message& message) {
  const protobuf::Descriptor& type = *message.GetDescriptor();
  const protobuf::Reflection& reflection = *message.GetReflection();
  const protobuf::UnknownFieldSet& unknown = reflection.GetUnknownFields(message);
  if (!unknown.empty()) return UnknownField(type.full_name(), unknown.field(0).number());
  for (int i = 0; i < type.field_count(); ++i) {
    const protobuf::FieldDescriptor* const field = type.field(i);
    if (field->cpp_type() != protobuf::FieldDescriptor::CPPTYPE_MESSAGE) continue;
    absl::Status status;
    if (!field->is_repeated()) {
      if (!reflection.HasField(message, field)) continue;
      status = CheckKnownFields(reflection.GetMessage(message, field));
    } else {
      const int size = reflection.FieldSize(message, field);
      for (int j = 0; j < size && status.ok(); ++j) {
        status = CheckKnownFields(reflection.GetRepeatedMessage(message, field, j));
      }
    }
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status UnknownField(absl::string_view type, int number) {
  return WithInfo(
      absl::UnimplementedError(absl::StrCat("message: field ", number, " of ", type,
                                            " is unknown to this server, or of another type")),
      reason::kUnknownField, {{"message", type}, {"field", number}});
}

}  // namespace flashcore::server

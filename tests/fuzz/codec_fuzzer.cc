// Proves the codec against the generated parser: whatever the bytes and however they lie in slices,
// both accept or refuse, and both read the same values. codec_values.h compares what server and
// client then make of the values.
//
// An input is three bytes that say how to take the rest, and a message:
//   [0]     which message: AttendRequest, LoadSequenceRequest or AttendResponse
//   [1][2]  bytes of the first slice, of the second, of the third as the first ...; both 0: one
//           slice
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "flashcore/v1/attention.pb.h"
#include "google/protobuf/message.h"
#include "google/protobuf/stubs/logging.h"
#include "grpcpp/support/byte_buffer.h"
#include "proto/grpc/message_view.h"
#include "server/transport/rpc/message.h"
#include "server/transport/rpc/unknown_fields.h"
#include "tests/fuzz/codec_values.h"
#include "tests/fuzz/require.h"

namespace flashcore::fuzz {
namespace {

using ::google::protobuf::Message;

grpc::ByteBuffer InSlices(const std::string& bytes, size_t even_bytes, size_t odd_bytes) {
  std::vector<grpc::Slice> slices;
  size_t begin = 0;
  while (even_bytes + odd_bytes > 0 && begin < bytes.size()) {
    slices.emplace_back(bytes.substr(begin, slices.size() % 2 == 0 ? even_bytes : odd_bytes));
    begin += slices.back().size();
  }
  if (begin < bytes.size()) slices.emplace_back(bytes.substr(begin));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// The limit on small fields counts exactly the bytes that it lets through.
void CheckLimit(const grpc::ByteBuffer& message, std::vector<wire::LargeField> tensors) {
  std::string small, again;
  const auto split = [&](size_t limit, std::string* out) {
    return wire::SplitMessage(wire::ViewOf(message), limit, absl::MakeSpan(tensors), out).ok();
  };
  Require(split(message.Length(), &small), "refused once, accepted before");
  Require(split(small.size(), &again) && small == again, "the limit refuses what fits");
  if (small.empty()) return;
  Require(!split(small.size() - 1, &again), "the limit lets too much through");
}

// Parses `message`, whose bytes are `bytes`, as the server does; `*want` is what the generated
// parser makes of it. Returns whether it is well-formed.
bool CheckMessage(const grpc::ByteBuffer& message, const std::string& bytes,
                  std::vector<wire::LargeField> tensors, Message* want, Message* got) {
  const bool well_formed = want->ParseFromString(bytes);
  const bool accepted =
      server::ParseMessage(wire::ViewOf(message), absl::MakeSpan(tensors), got).ok();
  Require(accepted == well_formed, "one parser refuses what the other accepts");
  if (!accepted) return false;
  CheckLimit(message, tensors);
  want->DiscardUnknownFields();
  got->DiscardUnknownFields();

  // Encoded by hand, as requests and replies are.
  std::string encoded = got->SerializeAsString();
  for (const wire::LargeField& tensor : tensors) {
    const auto* field = got->GetDescriptor()->FindFieldByNumber(tensor.number);
    Require(got->GetReflection()->GetString(*got, field).empty(), "a tensor among small fields");
    const std::string payload = Payload(message, tensor);
    encoded += wire::FieldHeader(tensor.number, payload.size()) + payload;
    got->GetReflection()->SetString(got, field, payload);
  }
  Require(got->SerializeAsString() == want->SerializeAsString(), "the values differ");
  Require(got->ParseFromString(encoded), "what was encoded by hand is refused");
  Require(got->SerializeAsString() == want->SerializeAsString(), "encoded by hand, values differ");
  return true;
}

void CheckInput(const uint8_t* data, size_t size) {
  if (size < 3) return;
  const std::string bytes = WithRegion(std::string(data + 3, data + size));
  const grpc::ByteBuffer message = InSlices(bytes, data[1], data[2]);
  if (data[0] % 3 == 0) {
    v1::AttendRequest want, got;
    const bool well_formed = CheckMessage(
        message, bytes,
        {{want.kQueryFieldNumber}, {want.kKeyFieldNumber}, {want.kValueFieldNumber}}, &want, &got);
    if (!well_formed) return;
    v1::AttendRequest whole;  // with unknown fields
    whole.ParseFromString(bytes);
    CheckServerRequest(message, server::CheckKnownFields(whole).ok(), want);
    CheckClientRequest(want);
  } else if (data[0] % 3 == 1) {
    v1::LoadSequenceRequest want, got;
    CheckMessage(message, bytes, {{want.kKeyFieldNumber}, {want.kValueFieldNumber}}, &want, &got);
  } else {
    v1::AttendResponse want, got;
    const bool well_formed = CheckMessage(
        message, bytes, {{want.kOutputFieldNumber}, {want.kLseFieldNumber}}, &want, &got);
    CheckClientReply(message, well_formed, want);
  }
}

}  // namespace
}  // namespace flashcore::fuzz

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  google::protobuf::SetLogHandler(nullptr);  // it complains of every string that is not UTF-8
  flashcore::fuzz::StartValueChecks();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashcore::fuzz::CheckInput(data, size);
  return 0;
}

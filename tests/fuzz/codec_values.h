// Compares what server and client make of a message's values with the message itself, field by
// field. A message that gains a field fails at start until the comparison knows the field.
#ifndef FLASHCORE_TESTS_FUZZ_CODEC_VALUES_H_
#define FLASHCORE_TESTS_FUZZ_CODEC_VALUES_H_

#include <string>

#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/byte_buffer.h"
#include "proto/wire/message.h"

namespace flashcore::fuzz {

// The id of a region in inputs. The server chooses ids at random, so WithRegion replaces it.
inline constexpr char kRegionInInputs[] = "a region, 4 KiB!";

// Call once at start. Registers the region, and checks that every field of the messages below is
// known.
void StartValueChecks();

// `bytes` with the registered region's id in place of kRegionInInputs.
std::string WithRegion(std::string bytes);

// The payload of `field` of `message`.
std::string Payload(const grpc::ByteBuffer& message, const wire::LargeField& field);

// All bytes of `message`.
std::string BytesOf(const grpc::ByteBuffer& message);

bool HasBound(const v1::Mask& mask);
bool HasKnownEnums(const v1::AttendRequest& request);  // no unspecified and no unknown ones

// As the server reads a request. `want` is what the generated parser makes of `message`; `known`:
// without unknown fields.
void CheckServerRequest(const grpc::ByteBuffer& message, bool known, const v1::AttendRequest& want);

// As the client writes a request with the shape and the ranges of `want`.
void CheckClientRequest(const v1::AttendRequest& want);

// As the client reads a reply. `want` is what the generated parser makes of `message`.
void CheckClientReply(const grpc::ByteBuffer& message, bool well_formed,
                      const v1::AttendResponse& want);

}  // namespace flashcore::fuzz

#endif  // FLASHCORE_TESTS_FUZZ_CODEC_VALUES_H_

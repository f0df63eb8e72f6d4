// Decodes the spans of an AttendRequest. The generated classes would make two heap blocks of each.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_TAKE_SPANS_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_TAKE_SPANS_H_

#include <string>
#include <vector>

#include "server/request/request.h"

namespace flashcore::server {

// Moves the fields `spans` of `*message`, the small fields of a v1::AttendRequest as
// wire::SplitMessage makes them, to the end of `*spans`; the other fields stay. Numbers are copied
// unchecked. False, and `*message` unspecified, if a span is not well-formed protobuf.
// `*unknown_field` is the number of a field of a span that v1::Span does not have; 0: there is
// none.
//
// Accepts what the generated parser accepts, with the same result.
bool TakeSpans(std::string* message, std::vector<SpanShape>* spans, int* unknown_field);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_TAKE_SPANS_H_

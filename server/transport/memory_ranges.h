// Tensors that did not come with their request.
#ifndef FLASHCORE_SERVER_TRANSPORT_MEMORY_RANGES_H_
#define FLASHCORE_SERVER_TRANSPORT_MEMORY_RANGES_H_

#include "absl/status/status.h"
#include "flashcore/v1/attention.pb.h"
#include "server/memory/shared_memory.h"
#include "server/request/request.h"

namespace flashcore::server {

// Fills in request->ranges, and the sizes of the inputs among them from the request's shapes.
// UNIMPLEMENTED if there are ranges and `memory` is null; NOT_FOUND of SharedMemory::Find;
// FAILED_PRECONDITION of AttendRequest::CheckRegions; INVALID_ARGUMENT if a tensor came although it
// has a range. Whether it fits is ValidateAttend's to say.
absl::Status ToMemoryRanges(const v1::AttendRequest& message, const SharedMemory* memory,
                            AttendRequest* request);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_MEMORY_RANGES_H_

// Converts between the wire contract and the engine: messages to requests, results to messages,
// statuses.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_CONVERT_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_CONVERT_H_

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "flashcore/v1/attention.pb.h"
#include "server/base/clock.h"
#include "server/device/device.h"
#include "server/kv/operation.h"
#include "server/kv/sequence.h"
#include "server/kv/sequence_store.h"
#include "server/memory/regions.h"
#include "server/request/request.h"

namespace flashcore::server {

// Converts `message`, without its tensors. INVALID_ARGUMENT for an unknown enum value or a
// meaningless combination of fields. Numbers are copied unchecked: ValidateAttend checks them.
absl::Status ToRequest(const v1::AttendRequest& message, AttendRequest* request);

// Sets request->inputs_ready and results_ready. First of the conversions, so that a request which
// another one refuses has its results_ready. UNIMPLEMENTED, NOT_FOUND as ToMemoryRanges;
// INVALID_ARGUMENT if there is no counter in host memory at such a place.
absl::Status ToTimelinePoints(const v1::AttendRequest& message, const Regions* regions,
                              AttendRequest* request);

// Sets request->ranges, and from them the sizes of inputs in shared memory.
// UNIMPLEMENTED if there are ranges and `regions` is null; NOT_FOUND if it has no such region;
// FAILED_PRECONDITION if a region is lost; INVALID_ARGUMENT if the message has both a tensor and
// its range. ValidateAttend checks that ranges fit their tensors and regions.
absl::Status ToMemoryRanges(const v1::AttendRequest& message, const Regions* regions,
                            AttendRequest* request);
// As above, for a chunk.
absl::Status ToMemoryRanges(const v1::LoadSequenceRequest& message, const Regions* regions,
                            AttendRequest* request);

// INVALID_ARGUMENT for other values than DTYPE_FLOAT16 and DTYPE_BFLOAT16, LAYOUT_NHD and
// LAYOUT_HND, and for ids that are not 16 bytes long.
absl::Status ToDType(v1::DType dtype, kernels::DType* out);
absl::Status ToKvDType(v1::KvDType kv_dtype, kernels::KvDType* out);
absl::Status ToLayout(v1::Layout layout, Layout* out);
absl::StatusOr<SequenceId> ToSequenceId(const std::string& bytes);

// INVALID_ARGUMENT if idle_timeout_seconds is neither 0 nor at least 1, or lease_id neither empty
// nor 16 bytes. The SequenceStore checks the rest.
absl::StatusOr<SequenceSettings> ToSettings(const v1::CreateSequenceRequest& message);
absl::StatusOr<SequenceSettings> ToSettings(const v1::ForkSequenceRequest& message);

v1::SequenceInfo ToSequenceInfo(const SequenceInfo& info, const std::string& device_id);
// With the status's ErrorInfo (WithInfo), if it has one.
v1::Status ToStatus(const absl::Status& status);
v1::Timing ToTiming(const PhaseTimes& times);
v1::DeviceInfo ToDeviceInfo(const DeviceInfo& info, const SequenceStore::Stats& kv);
v1::KernelInfo ToKernelInfo(const kernels::KernelSpec& spec);

// Converts an RPC's deadline from the system clock to `clock`.
TimePoint ToDeadline(std::chrono::system_clock::time_point deadline, const Clock& clock);

// The deadline of a request that has `timeout_ns` nanoseconds from now; 0: none.
TimePoint DeadlineIn(uint64_t timeout_ns, const Clock& clock);
TimePoint DeadlineAfter(TimePoint start, uint64_t timeout_ns);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_CONVERT_H_

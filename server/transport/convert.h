// Between the wire contract and the core: messages to requests, results to messages, statuses once.
#ifndef FLASHCORE_SERVER_TRANSPORT_CONVERT_H_
#define FLASHCORE_SERVER_TRANSPORT_CONVERT_H_

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "flashcore/v1/attention.pb.h"
#include "grpcpp/support/status.h"
#include "server/base/clock.h"
#include "server/device/device.h"
#include "server/kv/sequence.h"
#include "server/kv/sequence_store.h"
#include "server/request/request.h"

namespace flashcore::server {

// `message` without its tensors, as the core takes it. INVALID_ARGUMENT for an enum value or a
// combination of fields that has no meaning; numbers are passed on as they came.
absl::Status ToRequest(const v1::AttendRequest& message, AttendRequest* request);

// INVALID_ARGUMENT unless it is DTYPE_FLOAT16 or DTYPE_BFLOAT16, LAYOUT_NHD or LAYOUT_HND, 16
// bytes.
absl::Status ToDType(v1::DType dtype, kernels::DType* out);
absl::Status ToLayout(v1::Layout layout, Layout* out);
absl::StatusOr<SequenceId> ToSequenceId(const std::string& bytes);

v1::SequenceInfo ToSequenceInfo(const SequenceInfo& info, const std::string& device_id);
v1::Timing ToTiming(const PhaseTimes& times);
v1::DeviceInfo ToDeviceInfo(const DeviceInfo& info, const SequenceStore::Stats& kv);
v1::KernelInfo ToKernelInfo(const kernels::KernelSpec& spec);

// gRPC's deadline of an RPC on the fleet's clock.
TimePoint ToDeadline(std::chrono::system_clock::time_point deadline, const Clock& clock);

grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_CONVERT_H_

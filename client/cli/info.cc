// flashcore info and flashcore health.
#include <cstdio>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/command.h"
#include "client/cpp/encode.h"
#include "google/protobuf/util/json_util.h"
#include "nlohmann/json.hpp"

namespace flashcore::cli {
namespace {

std::string Mebibytes(uint64_t bytes) {
  const auto count = static_cast<double>(bytes);
  if (bytes >= uint64_t{1} << 30) return absl::StrFormat("%.1f GiB", count / 0x1p30);
  return absl::StrFormat("%.1f MiB", count / 0x1p20);
}

// 0 is unknown.
std::string Bytes(uint64_t bytes) { return bytes == 0 ? "unknown" : Mebibytes(bytes); }

std::string DeviceLines(const v1::DeviceInfo& device) {
  std::string out =
      absl::StrCat("device    ", device.id(), ": ", device.name(), ", ", device.arch(), ", ",
                   device.compute_units(), " compute units, ", device.lanes(), " lanes, memory ",
                   Bytes(device.memory_bytes()), ", L2 ", Bytes(device.l2_bytes()));
  if (device.l2_persisting_max_bytes() > 0) {
    absl::StrAppend(&out, " (persisting ", Bytes(device.l2_persisting_max_bytes()),
                    " at most, now ", Mebibytes(device.l2_persisting_bytes()), "; window ",
                    Mebibytes(device.l2_window_bytes()), ")");
  }
  if (!device.l2_note().empty()) {
    absl::StrAppend(&out, "\n          no L2 window: ", device.l2_note());
  }
  absl::StrAppendFormat(&out, "\n          K/V memory %s, %s used", Bytes(device.kv_memory_bytes()),
                        Mebibytes(device.kv_used_bytes()));
  if (device.kv_hot_bytes() > 0) {
    absl::StrAppend(&out, ", ", Mebibytes(device.kv_hot_bytes()), " for pinned sequences");
  }
  return out + "\n";
}

// "unlimited" if 0.
std::string Bound(uint64_t limit, const std::string& text) {
  return limit == 0 ? "unlimited" : text;
}

std::string LimitLines(const v1::Limits& limits) {
  std::string out = absl::StrCat(
      "limits    message ", Bytes(limits.max_message_bytes()), ", ", limits.max_spans(), " spans, ",
      limits.max_heads(), " heads, head_dim ", absl::StrJoin(limits.head_dims(), " "), ", ",
      limits.max_request_flop(), " floating-point operations a request\n");
  absl::StrAppend(&out, "          queue ", limits.max_queue_requests(), " requests, batch ",
                  limits.max_batch_requests(), " requests or ", limits.max_batch_tokens(),
                  " tokens, ", limits.max_stream_inflight(), " in flight per stream, staging ",
                  Bytes(limits.staging_memory_bytes()), "\n");
  if (limits.max_connection_rings() > 0) {
    absl::StrAppend(
        &out, "memory    shared over the local socket, ", Bytes(limits.shared_memory_bytes()),
        " at most; of one client ",
        Bound(limits.client_shared_memory_bytes(), Bytes(limits.client_shared_memory_bytes())),
        " in ", limits.client_shared_regions(), " regions\n");
  }
  const double idle_seconds = limits.sequence_idle_timeout_seconds();
  absl::StrAppend(
      &out, "sequences ", limits.max_layers(), " layers, page ", Bytes(limits.max_page_bytes()),
      " at most; of one client: K/V ",
      Bound(limits.client_kv_bytes(), Mebibytes(limits.client_kv_bytes())), ", sequences ",
      Bound(limits.client_sequences(), absl::StrCat(limits.client_sequences())), ", metadata ",
      Bound(limits.client_metadata_bytes(), Mebibytes(limits.client_metadata_bytes())),
      "; idle ones ",
      idle_seconds > 0 ? absl::StrCat("expire after ", idle_seconds, " s") : "never expire",
      limits.evicts() ? "; when memory is full, whoever holds most loses what is unused longest\n"
                      : "; appends are refused when memory is full\n");
  return out;
}

std::string InfoTable(const v1::GetServerInfoResponse& info) {
  std::string out = absl::StrCat("server    ", Target(), ", version ", info.version(), "\n");
  for (const v1::DeviceInfo& device : info.devices()) out += DeviceLines(device);
  for (const v1::KernelInfo& kernel : info.kernels()) {
    const std::string kv_dtype = AbslUnparseFlag(client::FromProto(kernel.kv_dtype()));
    const std::string precision = AbslUnparseFlag(client::FromProto(kernel.precision()));
    absl::StrAppend(
        &out, "kernel    ", kernel.arch(), ", ", AbslUnparseFlag(client::FromProto(kernel.dtype())),
        ", head_dim ", kernel.head_dim(),
        kernel.kv_dtype() == v1::KV_DTYPE_SAME_AS_QUERY ? "" : absl::StrCat(", ", kv_dtype, " K/V"),
        kernel.precision() == v1::PRECISION_16BIT ? "" : absl::StrCat(", ", precision, " products"),
        ", sums in ", kernel.accumulate(), ", ", absl::StrJoin(kernel.features(), " "), "\n");
  }
  return out + LimitLines(info.limits());
}

int RunInfo(Client* client) {
  const absl::StatusOr<v1::GetServerInfoResponse> info = client->GetServerInfo();
  if (!info.ok()) return Fail(info.status());
  if (!absl::GetFlag(FLAGS_json)) {
    std::fputs(InfoTable(*info).c_str(), stdout);
    return kExitOk;
  }
  std::string json;
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  if (!google::protobuf::util::MessageToJsonString(*info, &json, options).ok()) {
    return Fail(absl::InternalError("the server's reply cannot be written as JSON"));
  }
  std::printf("%s\n", json.c_str());
  return kExitOk;
}

int RunHealth(Client* client) {
  const absl::StatusOr<HealthStatus> health = client->CheckHealth();
  if (!health.ok()) return Fail(health.status());
  const char* name = *health == HealthStatus::kServing      ? "SERVING"
                     : *health == HealthStatus::kNotServing ? "NOT_SERVING"
                                                            : "UNKNOWN";
  Print({{"status", name}}, absl::StrCat(name, "\n"));
  return *health == HealthStatus::kServing ? kExitOk : kExitFailure;
}

}  // namespace

Command InfoCommand() {
  return {"info",
          "prints the server's version, devices, kernels and limits",
          "Calls GetServerInfo. With --json, prints the reply in protobuf's "
          "JSON form, in which 64-bit integers are strings.",
          {},
          RunInfo};
}

Command HealthCommand() {
  return {"health",
          "checks whether the server is ready (grpc.health.v1)",
          "Prints SERVING, NOT_SERVING or UNKNOWN. The exit code is 0 only "
          "for SERVING, so it can be a container's health check.",
          {},
          RunHealth};
}

}  // namespace flashcore::cli

// Metrics as a server has them, for tests.
#ifndef FLASHCORE_TESTS_TELEMETRY_EXAMPLE_METRICS_H_
#define FLASHCORE_TESTS_TELEMETRY_EXAMPLE_METRICS_H_

#include "server/telemetry/metrics.h"

namespace flashcore::server {

inline constexpr char kExampleService[] = "flashcore.v1.AttentionService";

inline Metrics::Options ExampleOptions() {
  Metrics::Options options;
  options.version = "1.2.3";
  options.devices = {{"cpu", "Some \"CPU\"", "AVX2"},
                     {"cuda:0", "NVIDIA L4", "sm_89", 4194304, 5242880}};
  options.methods = {{kExampleService, "Attend", "unary", "grpc", true},
                     {kExampleService, "AttendStream", "bidi_stream", "grpc", true},
                     {kExampleService, "LoadSequence", "client_stream", "grpc", true},
                     {kExampleService, "Delete", "unary"}};
  return options;
}

}  // namespace flashcore::server

#endif  // FLASHCORE_TESTS_TELEMETRY_EXAMPLE_METRICS_H_

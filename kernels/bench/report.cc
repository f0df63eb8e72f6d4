#include "kernels/bench/report.h"

#include <cinttypes>
#include <cstdio>

namespace flashcore::kernels {
namespace {

constexpr double kMiB = 1 << 20;

// As a JSON string.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

}  // namespace

void PrintHeader(const Device& device, const Ceilings& ceilings) {
  std::printf("GPU: %s, %d SMs at up to %.0f MHz, L2 %.1f MiB\n", device.name.c_str(),
              device.multiprocessors, device.clock_khz * 1e-3, device.l2_bytes / kMiB);
  std::printf("Ceilings, measured now: tensor %.1f TFLOP/s (mma.sync.m16n8k16 f16, f32 sums), ",
              ceilings.tensor_tflops);
  std::printf("copy %.0f GB/s (read + written)\n\n", ceilings.copy_gbps);
  std::printf("%-24s %-28s %9s %9s %9s %8s %8s %7s %7s %9s %14s %s\n", "shape", "kernel", "p50 us",
              "p90 us", "p99 us", "TFLOP/s", "GB/s", "tensor", "copy", "max err", "rows checked",
              "sets");
}

void PrintResult(const Result& result, const Device& device, const Ceilings& ceilings) {
  const double all_bytes = static_cast<double>(result.set_bytes) * result.sets;
  std::printf("%-24s %-28s %9.2f %9.2f %9.2f %8.1f %8.1f %6.1f%% %6.1f%% %9.2e",
              result.shape.c_str(), result.kernel.c_str(), result.us.p50, result.us.p90,
              result.us.p99, result.tflops(), result.gbps(),
              100 * result.tflops() / ceilings.tensor_tflops,
              100 * result.gbps() / ceilings.copy_gbps, result.accuracy.max_error);
  std::printf(" %6" PRId64 "/%-7" PRId64 " %d x %.2f MiB = %.1f L2\n", result.accuracy.rows_checked,
              result.accuracy.rows, result.sets, static_cast<double>(result.set_bytes) / kMiB,
              all_bytes / device.l2_bytes);
  std::fflush(stdout);
}

void PrintFailure(const std::string& shape, const std::string& why) {
  std::printf("%-24s FAILED: %s\n", shape.c_str(), why.c_str());
  std::fflush(stdout);
}

bool WriteJson(const std::string& file, const std::vector<Result>& results, const Device& device,
               const Ceilings& ceilings) {
  std::FILE* out = std::fopen(file.c_str(), "w");
  if (out == nullptr) return false;
  std::fprintf(out, "[");
  const char* separator = "\n";
  for (const Result& result : results) {
    std::fprintf(out, "%s {\"shape\": %s, \"kernel\": %s, \"gpu\": %s,\n", separator,
                 Quoted(result.shape).c_str(), Quoted(result.kernel).c_str(),
                 Quoted(device.name).c_str());
    std::fprintf(out, "  \"p50_us\": %.4f, \"p90_us\": %.4f, \"p99_us\": %.4f,\n", result.us.p50,
                 result.us.p90, result.us.p99);
    std::fprintf(out, "  \"tflops\": %.3f, \"gbps\": %.3f, \"max_err\": %.3e,\n", result.tflops(),
                 result.gbps(), result.accuracy.max_error);
    std::fprintf(out, "  \"fraction_of_tensor\": %.4f, \"fraction_of_copy\": %.4f,\n",
                 result.tflops() / ceilings.tensor_tflops, result.gbps() / ceilings.copy_gbps);
    std::fprintf(out, "  \"sets\": %d, \"set_bytes\": %" PRId64 "}", result.sets, result.set_bytes);
    separator = ",\n";
  }
  std::fprintf(out, "\n]\n");
  const bool written = std::ferror(out) == 0;
  return std::fclose(out) == 0 && written;
}

}  // namespace flashcore::kernels

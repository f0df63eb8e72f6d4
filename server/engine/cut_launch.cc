#include "server/engine/cut_launch.h"

#include <algorithm>
#include <utility>

namespace flashcore::server {

std::shared_ptr<CutLaunch> CutLaunch::Make(const Device& device, Nanoseconds max_part,
                                           Launch* launch) {
  std::vector<kernels::Span> spans;
  AppendSpans(*launch, device.kv_memory().base, launch->pages.data(), &spans);
  const kernels::Geometry geometry = launch->geometry();
  const auto kernel = device.KernelFor(geometry);
  if (spans.empty() || !kernel.ok()) return nullptr;
  const DeviceInfo& info = device.info();
  const kernels::CutOptions options = {Seconds(max_part) * info.speed.flop_per_s,
                                       info.speed.flop_per_s / info.speed.bytes_per_s};
  std::vector<kernels::BatchPart> parts =
      CutBatch({geometry, spans.data(), static_cast<int32_t>(spans.size())},
               (*kernel)->plan_options, std::max(1, info.compute_units), options);
  if (parts.size() == 1) return nullptr;
  auto cut = std::make_shared<CutLaunch>();
  cut->launch = std::move(*launch);
  cut->launch.in_parts = true;
  cut->launch.part = parts[0];
  cut->part_work = cut->launch.operations.front()->work / static_cast<int64_t>(parts.size());
  cut->parts = std::move(parts);
  return cut;
}

bool CutLaunch::Next() {
  AttendOperation* const operation = launch.operations.front();
  times.copy_in += operation->times.copy_in;
  times.kernel += operation->times.kernel;
  times.copy_out += operation->times.copy_out;
  if (++done == parts.size()) {
    operation->times.copy_in = times.copy_in;
    operation->times.kernel = times.kernel;
    operation->times.copy_out = times.copy_out;
    return false;
  }
  launch.copies.clear();
  launch.appends.clear();
  launch.part = parts[done];
  operation->work = std::max(part_work * static_cast<int64_t>(parts.size() - done), Nanoseconds(1));
  return true;
}

}  // namespace flashcore::server

// Prints how the CUDA kernels would run a shape of FP16 on a device, as a line of JSON for each
// shape. Needs no GPU: l4_model.py predicts times from it.
//
//   flashcore-kernel-plan --workers=58 --arch=sm89 canon_1 1x8x512x64,causal
//
//   {"shape": "canon_1", "head_dim": 128, "flop": 137438953472, "bytes": 134217728,
//    "partial_bytes": 0, "combine": false,
//    "launches": [{"rows": 64, "arch": "sm80", "has_runs": false, "row_tiles": 1, "row_warps": 4,
//                  "warp_groups": 1, "tile_tokens": 64, "blocks": [[2048, 2048]]}]}
//
// A launch is for tiles of `rows` packed rows; `arch` is that of its kernel's block (BlockArch),
// the next but one four are of its Block. `blocks` has [K/V rows of a block, number of such
// blocks] in the order in which they start. `bytes`: Q, K, V and O, once. `partial_bytes`: room for
// partial results. `combine`: whether a launch of its own combines them.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/work_list.h"
#include "kernels/registry.h"
#include "kernels/sm80/tiles.h"
#include "nlohmann/json.hpp"
#include "tests/bench/kernels/bench_options.h"
#include "tests/bench/kernels/shape.h"

namespace flashcore::kernels {
namespace {

namespace family = sm80;  // whose options and blocks are printed

struct Device {
  int32_t workers = 132;
  Arch arch = Arch::kLargeShared;
};

nlohmann::json PlanOf(const Device& device, const BenchShape& shape) {
  const AttentionShape& attention = shape.attention;
  static std::byte memory;  // which nobody reads
  const std::vector<Span> spans = MakeSpans(attention, {&memory, &memory, &memory});
  const AttentionBatch batch = {attention.geometry(), spans.data(), attention.spans};
  Plan plan;
  const KernelSpec spec = SpecFor(attention, device.arch, Accumulate::kFloat32);
  MakePlan(batch, family::PlanFor(spec), device.workers, &plan);
  const WorkListLayout layout(batch, plan);
  std::vector<WorkTile> list(layout.bytes / sizeof(WorkTile) + 1);
  PackWorkList(batch, plan, layout, reinterpret_cast<std::byte*>(list.data()));

  auto launches = nlohmann::json::array();
  for (int kind = kTileKinds - 1; kind >= 0; --kind) {
    const WorkListLayout::TileArray& array = layout.kinds[kind];
    if (array.count == 0) continue;
    std::vector<std::pair<int32_t, int32_t>> blocks;
    const WorkTile* const tiles = array.In(list.data());
    for (const WorkTile* tile = tiles; tile < tiles + array.count; ++tile) {
      const int32_t kv_rows = tile->kv_end - tile->kv_begin;
      if (blocks.empty() || blocks.back().first != kv_rows) blocks.emplace_back(kv_rows, 0);
      blocks.back().second += attention.num_kv_heads;
    }
    const auto [rows, arch, block] =
        family::LaunchBlockFor(spec, kind, array.most_rows, array.has_runs);
    launches.push_back({{"rows", rows},
                        {"arch", Name(arch)},
                        {"has_runs", array.has_runs},
                        {"row_tiles", block.row_tiles},
                        {"row_warps", block.row_warps},
                        {"warp_groups", block.warp_groups},
                        {"tile_tokens", block.tile_tokens},
                        {"blocks", blocks}});
  }
  return {{"shape", shape.name},
          {"head_dim", attention.head_dim},
          {"flop", Flops(attention)},
          {"bytes", SetBytes(attention)},
          {"partial_bytes", plan.workspace_bytes},
          {"combine", layout.combines.count > 0},
          {"launches", launches}};
}

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(2);
}

// Whether `argument` is --name=VALUE; then parses the value.
template <class Parse, class Value>
bool TakeFlag(const std::string& argument, const std::string& name, Parse parse, Value* value) {
  const std::string flag = "--" + name + "=";
  if (argument.compare(0, flag.size(), flag) != 0) return false;
  const std::string wrong = parse(argument.substr(flag.size()), value);
  if (!wrong.empty()) Fail("--" + name + ": " + wrong);
  return true;
}

int Main(int argc, char** argv) {
  Device device;
  KvDType kv_dtype = KvDType::kSameAsQuery;
  Precision precision = Precision::k16Bit;
  std::vector<BenchShape> shapes;
  for (int i = 1; i < argc; ++i) {
    if (TakeFlag(argv[i], "workers", ParseCount, &device.workers)) continue;
    if (TakeFlag(argv[i], "arch", ParseArch, &device.arch)) continue;
    if (TakeFlag(argv[i], "kv_dtype", ParseKvDType, &kv_dtype)) continue;
    if (TakeFlag(argv[i], "precision", ParsePrecision, &precision)) continue;
    const std::string wrong = ParseShape(argv[i], &shapes.emplace_back());
    if (!wrong.empty()) Fail(wrong);
  }
  if (precision != Precision::k16Bit && kv_dtype != KvDType::kInt8) {
    Fail("--precision: only with --kv_dtype=int8");
  }
  for (BenchShape& shape : shapes) {
    shape.attention.kv_dtype = kv_dtype;
    // CPU and CUDA kernels have the same head_dims, but CUDA only 64 and 128 over 8-bit K/V.
    const KernelSpec spec = SpecFor(shape.attention, Arch::kCpu, Accumulate::kFloat32);
    if (FindKernel(spec) == nullptr) Fail(ExplainMissing(spec));
    shape.attention.precision = precision;
  }
  if (shapes.empty()) {
    Fail(
        "usage: flashcore-kernel-plan [--workers=SMS] [--arch=sm80|sm89] [--kv_dtype=int8] "
        "[--precision=int8_qk|int8_qk_pv] SHAPE...");
  }
  for (const BenchShape& shape : shapes) std::printf("%s\n", PlanOf(device, shape).dump().c_str());
  return 0;
}

}  // namespace
}  // namespace flashcore::kernels

int main(int argc, char** argv) { return flashcore::kernels::Main(argc, argv); }

#include "tests/kernels/device_launch.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/branches.h"
#include "kernels/cuda/work_list.h"
#include "tests/kernels/device_mirror.h"

namespace flashcore::kernels {
namespace {

using Access = DeviceMirror::Access;

// Bytes from a span's first K (or V) element to the last that a kernel may read: whole pages of
// paged K/V, only the span's rows of dense K/V.
size_t KvBytes(const Geometry& geometry, const KvView& kv) {
  int64_t page = PagesFor(kv.rows) - 1;
  int64_t row = (kv.rows - 1) % kPageTokens;
  if (kv.pages != nullptr) {
    page = *std::max_element(kv.pages, kv.pages + PagesFor(kv.rows));
    row = kPageTokens - 1;
  }
  return page * kv.page_stride + (geometry.num_kv_heads - 1) * kv.head_stride +
         row * kv.row_stride + geometry.head_dim * geometry.kv_element_bytes() +
         kPageTokens * KvRowScaleBytes(geometry.kv_dtype);
}

void AddKv(const Geometry& geometry, const KvView& kv, DeviceMirror* mirror) {
  if (kv.rows == 0) return;
  mirror->Add(kv.key, KvBytes(geometry, kv), Access::kRead);
  mirror->Add(kv.value, KvBytes(geometry, kv), Access::kRead);
}

void AddSpan(const Geometry& geometry, const Span& span, DeviceMirror* mirror) {
  if (span.query_rows > 0) {
    const size_t bytes = (span.query_rows - 1) * span.row_stride +
                         (geometry.num_heads - 1) * span.head_stride +
                         geometry.head_dim * DTypeBytes(geometry.dtype);
    mirror->Add(span.query, bytes, Access::kRead);
    mirror->Add(span.output, bytes, Access::kWrite);
    if (span.lse != nullptr) {
      const size_t floats = (span.query_rows - 1) * span.lse_row_stride +
                            (geometry.num_heads - 1) * span.lse_head_stride + 1;
      mirror->Add(span.lse, floats * sizeof(float), Access::kWrite);
    }
  }
  AddKv(geometry, span.kv, mirror);
}

Span OnDevice(const DeviceMirror& mirror, Span span) {
  span.query = mirror.At(span.query);
  span.output = mirror.At(span.output);
  span.lse = mirror.At(span.lse);
  span.kv.key = mirror.At(span.kv.key);
  span.kv.value = mirror.At(span.kv.value);
  return span;
}

// Those of every launch: one waits for the one before.
const Branches* MakeBranches() {
  auto* const branches = new Branches;
  EXPECT_EQ(branches->Create(0), cudaSuccess);
  return branches;
}

}  // namespace

int LaunchOnDevice(const Kernel& kernel, const AttentionBatch& batch, const Plan& plan) {
  static const Branches* const branches = MakeBranches();
  DeviceMirror mirror;
  for (int32_t s = 0; s < batch.num_spans; ++s) AddSpan(batch.geometry, batch.spans[s], &mirror);
  std::vector<std::byte> workspace(plan.workspace_bytes, std::byte{0xff});  // NaN
  mirror.Add(workspace.data(), workspace.size(), Access::kWrite);
  const WorkListLayout layout(batch, plan);
  std::vector<std::byte> work_list(layout.BytesInMemory());
  mirror.Add(work_list.data(), work_list.size(), Access::kRead);
  std::vector<int32_t> finished(plan.combines.size());
  mirror.Add(finished.data(), finished.size() * sizeof(int32_t), Access::kRead);  // restored
  mirror.Allocate();

  std::vector<Span> spans;
  for (int32_t s = 0; s < batch.num_spans; ++s) spans.push_back(OnDevice(mirror, batch.spans[s]));
  const AttentionBatch on_device{batch.geometry, spans.data(), batch.num_spans};
  if (!work_list.empty()) PackWorkList(on_device, plan, layout, work_list.data());
  mirror.Upload();

  LaunchContext context;
  context.workspace = mirror.At(workspace.data());
  context.cuda.work_list = mirror.At(work_list.data());
  context.cuda.finished = mirror.At(finished.data());
  context.cuda.branches = branches;
  const int error = kernel.launch(on_device, plan, context);
  mirror.Download();
  return error;
}

}  // namespace flashcore::kernels

#include "tests/bench/kernels/cpu_workload.h"

#include <algorithm>
#include <memory>
#include <random>

#include "kernels/half.h"
#include "kernels/kv_pages.h"

namespace flashcore::kernels {

Workload::Workload(const AttentionShape& shape, int threads, bool cascade)
    : shape_(shape),
      kernel_(FindKernel({Arch::kCpu, shape.dtype, shape.head_dim})),
      plan_options_(kernel_->plan_options),
      pool_(threads),
      pages_(PageTable(shape)) {
  if (!cascade) plan_options_.cascade_rows = 0;
  const PageLayout page{shape.dtype, shape.num_kv_heads, shape.head_dim};
  const int64_t lse_of_span = int64_t{shape.num_heads} * shape.query_rows;
  query_.resize(QueryBytes(shape) / sizeof(uint16_t));
  output_.resize(query_.size());
  lse_.resize(lse_of_span * shape.spans);
  kv_.resize(page.page_bytes() / sizeof(uint16_t) * (int64_t{pages_.back()} + 1));
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (auto* elements : {&query_, &kv_}) {
    for (uint16_t& element : *elements) element = FromFloat(shape.dtype, uniform(random));
  }
  Tensors tensors;
  tensors.query = reinterpret_cast<std::byte*>(query_.data());
  tensors.output = reinterpret_cast<std::byte*>(output_.data());
  tensors.key = reinterpret_cast<std::byte*>(kv_.data());
  tensors.pages = pages_.data();
  spans_ = MakeSpans(shape, tensors);
  for (int32_t s = 0; s < shape.spans; ++s) {
    spans_[s].lse = lse_.data() + s * lse_of_span;
    spans_[s].lse_row_stride = 1;
    spans_[s].lse_head_stride = shape.query_rows;
  }
}

void Workload::Run() {
  const AttentionBatch batch{shape_.geometry(), spans_.data(), shape_.spans};
  MakePlan(batch, plan_options_, pool_.num_threads(), &plan_);
  constexpr size_t kAlignment = 64;
  workspace_.resize(std::max(workspace_.size(), (plan_.workspace_bytes + kAlignment) / 4));
  void* workspace = workspace_.data();
  size_t bytes = workspace_.size() * sizeof(float);
  std::align(kAlignment, plan_.workspace_bytes, workspace, bytes);
  kernel_->launch(batch, plan_, {workspace, &pool_});
}

}  // namespace flashcore::kernels

#include "kernels/bench/cpu_workload.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "kernels/half.h"

namespace flashcore::kernels {
namespace {

// Elements of one page's K (or V): [kv_heads][64][head_dim].
int64_t PageElements(const WorkloadShape& shape) {
  return int64_t{shape.num_kv_heads} * kPageTokens * shape.head_dim;
}

int32_t PagesOfSpan(const WorkloadShape& shape) { return PagesFor(shape.kv_rows); }

// Pages of every span, one span after the other: those of the prefix, then its own.
std::vector<int32_t> PageTable(const WorkloadShape& shape) {
  const int32_t prefix = shape.prefix_rows / kPageTokens;
  int32_t next_page = prefix;
  std::vector<int32_t> pages;
  for (int32_t s = 0; s < shape.spans; ++s) {
    for (int32_t p = 0; p < PagesOfSpan(shape); ++p) {
      pages.push_back(p < prefix ? p : next_page++);
    }
  }
  return pages;
}

}  // namespace

Workload::Workload(const WorkloadShape& shape, int threads)
    : shape_(shape),
      kernel_(FindKernel({Arch::kCpu, shape.dtype, shape.head_dim, Accumulate::kFloat32, 0})),
      plan_options_(kernel_->plan_options),
      pool_(threads),
      pages_(PageTable(shape)) {
  if (!shape.share_items) plan_options_.shared_rows = 0;
  const int64_t row = int64_t{shape.num_heads} * shape.head_dim;
  query_.resize(row * shape.query_rows * shape.spans);
  output_.resize(query_.size());
  lse_.resize(int64_t{shape.num_heads} * shape.query_rows * shape.spans);
  kv_.resize(2 * PageElements(shape) * (int64_t{pages_.back()} + 1));
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (auto* elements : {&query_, &kv_}) {
    for (uint16_t& element : *elements) element = FromFloat(shape.dtype, uniform(random));
  }
  for (int32_t s = 0; s < shape.spans; ++s) {
    Span span;
    span.query = reinterpret_cast<std::byte*>(query_.data() + s * shape.query_rows * row);
    span.output = reinterpret_cast<std::byte*>(output_.data() + s * shape.query_rows * row);
    span.row_stride = row * 2;
    span.head_stride = int64_t{shape.head_dim} * 2;
    span.query_rows = shape.query_rows;
    span.lse = lse_.data() + int64_t{s} * shape.query_rows * shape.num_heads;
    span.lse_row_stride = shape.num_heads;
    span.lse_head_stride = 1;
    span.kv.key = reinterpret_cast<const std::byte*>(kv_.data());
    span.kv.value = span.kv.key + PageElements(shape) * 2;
    span.kv.pages = pages_.data() + s * PagesOfSpan(shape);
    span.kv.row_stride = int64_t{shape.head_dim} * 2;
    span.kv.head_stride = kPageTokens * span.kv.row_stride;
    span.kv.page_stride = 2 * PageElements(shape) * 2;
    span.kv.rows = shape.kv_rows;
    span.mask = shape.mask;
    span.softmax_scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
    spans_.push_back(span);
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
  kernel_->launch(batch, plan_, {workspace, &pool_, nullptr});
}

void Workload::ExportInputs(float* query, float* key, float* value) const {
  const WorkloadShape& w = shape_;
  for (int32_t s = 0; s < w.spans; ++s) {
    for (int32_t h = 0; h < w.num_heads; ++h) {
      for (int32_t i = 0; i < w.query_rows; ++i) {
        const int64_t row = (int64_t{s} * w.query_rows + i) * w.num_heads + h;
        for (int32_t d = 0; d < w.head_dim; ++d) {
          *query++ = ToFloat(w.dtype, query_[row * w.head_dim + d]);
        }
      }
    }
    for (int32_t h = 0; h < w.num_kv_heads; ++h) {
      for (int32_t j = 0; j < w.kv_rows; ++j) {
        const int64_t page = pages_[s * PagesOfSpan(w) + j / kPageTokens];
        const int64_t row = (page * 2 * w.num_kv_heads + h) * kPageTokens + j % kPageTokens;
        const uint16_t* from = kv_.data() + row * w.head_dim;
        for (int32_t d = 0; d < w.head_dim; ++d) {
          *key++ = ToFloat(w.dtype, from[d]);
          *value++ = ToFloat(w.dtype, from[PageElements(w) + d]);
        }
      }
    }
  }
}

void Workload::ExportOutput(float* output) const {
  const WorkloadShape& w = shape_;
  for (int32_t s = 0; s < w.spans; ++s) {
    for (int32_t h = 0; h < w.num_heads; ++h) {
      for (int32_t i = 0; i < w.query_rows; ++i) {
        const int64_t row = (int64_t{s} * w.query_rows + i) * w.num_heads + h;
        for (int32_t d = 0; d < w.head_dim; ++d) {
          *output++ = ToFloat(w.dtype, output_[row * w.head_dim + d]);
        }
      }
    }
  }
}

}  // namespace flashcore::kernels

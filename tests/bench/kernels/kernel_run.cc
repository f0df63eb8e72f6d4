#include "tests/bench/kernels/kernel_run.h"

#include <utility>

#include "kernels/cuda/work_list.h"

namespace flashcore::kernels {

cudaError_t KernelRun::Prepare(const Kernel& kernel, const Geometry& geometry,
                               std::vector<std::vector<Span>> sets, bool cascade) {
  kernel_ = &kernel;
  geometry_ = geometry;
  sets_ = std::move(sets);
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = branches_.Create(0);
  if (error != cudaSuccess) return error;
  PlanOptions options = kernel.plan_options;
  if (!cascade) options.cascade_rows = 0;
  MakePlan(Batch(0), options, multiprocessors, &plan_);
  error = SendWorkLists();
  if (error != cudaSuccess) return error;
  const size_t counter_bytes = plan_.combines.size() * sizeof(int32_t);
  error = cudaMalloc(finished_.out(), counter_bytes);
  if (error != cudaSuccess) return error;
  if (counter_bytes > 0) error = cudaMemset(finished_.get(), 0, counter_bytes);
  if (error != cudaSuccess) return error;
  return cudaMalloc(workspace_.out(), plan_.workspace_bytes);
}

cudaError_t KernelRun::SendWorkLists() {
  const WorkListLayout layout(Batch(0), plan_);  // as of every set
  work_list_bytes_ = layout.BytesInMemory();
  if (work_list_bytes_ == 0) return cudaSuccess;
  work_list_bytes_ += kWorkListAlignment - 1;
  work_list_bytes_ -= work_list_bytes_ % kWorkListAlignment;
  const size_t bytes = work_list_bytes_ * sets_.size();
  PinnedMemory staging;
  cudaError_t error = cudaMallocHost(staging.out(), bytes);
  if (error != cudaSuccess) return error;
  auto* blocks = static_cast<std::byte*>(staging.get());
  for (int set = 0; set < num_sets(); ++set) {
    PackWorkList(Batch(set), plan_, layout, blocks + set * work_list_bytes_);
  }
  error = cudaMalloc(work_lists_.out(), bytes);
  if (error != cudaSuccess) return error;
  return cudaMemcpy(work_lists_.get(), blocks, bytes, cudaMemcpyHostToDevice);
}

AttentionBatch KernelRun::Batch(int set) const {
  return {geometry_, sets_[set].data(), static_cast<int32_t>(sets_[set].size())};
}

cudaError_t KernelRun::Launch(int set, cudaStream_t stream) const {
  LaunchContext context;
  context.workspace = workspace_.get();
  context.cuda.stream = stream;
  context.cuda.work_list = static_cast<std::byte*>(work_lists_.get()) + set * work_list_bytes_;
  context.cuda.finished = static_cast<int32_t*>(finished_.get());
  context.cuda.branches = &branches_;
  return static_cast<cudaError_t>(kernel_->launch(Batch(set), plan_, context));
}

}  // namespace flashcore::kernels

#include "server/device/launch_graph.h"

#include "server/device/cuda_resources.h"

namespace flashcore::server {

absl::Status LaunchGraph::Make(cudaStream_t stream, absl::FunctionRef<absl::Status()> enqueue) {
  // Other threads may call whatever they like meanwhile.
  cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
  if (error != cudaSuccess) return CudaStatus(error, "cudaStreamBeginCapture");
  absl::Status status = enqueue();
  kernels::CudaGraph graph;
  error = cudaStreamEndCapture(stream, graph.out());
  if (status.ok()) status = CudaStatus(error, "cudaStreamEndCapture");
  if (!status.ok()) return status;
  cudaGraphExecUpdateResultInfo difference;
  const bool updated = exec_.get() != nullptr &&
                       cudaGraphExecUpdate(exec_.get(), graph.get(), &difference) == cudaSuccess;
  if (!updated) {
    error = cudaGraphInstantiate(exec_.out(), graph.get(), 0);
    if (error != cudaSuccess) return CudaStatus(error, "cudaGraphInstantiate");
  }
  return CudaStatus(cudaGraphUpload(exec_.get(), stream), "cudaGraphUpload");
}

absl::Status LaunchGraph::Launch(cudaStream_t stream) const {
  return CudaStatus(cudaGraphLaunch(exec_.get(), stream), "cudaGraphLaunch");
}

}  // namespace flashcore::server

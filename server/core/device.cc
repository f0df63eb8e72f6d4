#include "server/core/device.h"

#include <set>

namespace flashcore::server {

std::vector<uint32_t> SupportedHeadDims(const Device& device) {
  std::set<uint32_t> float16;
  std::set<uint32_t> both;
  for (const kernels::Kernel* kernel : device.kernels()) {
    const auto head_dim = static_cast<uint32_t>(kernel->spec.head_dim);
    if (kernel->spec.dtype == kernels::DType::kFloat16) float16.insert(head_dim);
  }
  for (const kernels::Kernel* kernel : device.kernels()) {
    const auto head_dim = static_cast<uint32_t>(kernel->spec.head_dim);
    if (kernel->spec.dtype == kernels::DType::kBFloat16 && float16.count(head_dim) > 0) {
      both.insert(head_dim);
    }
  }
  return {both.begin(), both.end()};
}

}  // namespace flashcore::server

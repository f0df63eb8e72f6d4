#include "kernels/sm80/attend.cuh"

namespace flashcore::kernels::sm80 {

template int LaunchAttend<128, Accumulate::kFloat32, KvDType::kFloat8E4M3>(DType, int32_t,
                                                                           const LaunchTiles&);

}  // namespace flashcore::kernels::sm80

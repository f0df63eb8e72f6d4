#include "tests/e2e/lose_device.h"

namespace flashcore::server::testing {
namespace {

__global__ void Trap() { __trap(); }

}  // namespace

void LoseDevice() { Trap<<<1, 1>>>(); }

}  // namespace flashcore::server::testing

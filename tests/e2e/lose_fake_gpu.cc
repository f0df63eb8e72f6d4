#include "server/telemetry/log.h"
#include "tests/device/fake_gpu.h"
#include "tests/e2e/lose_device.h"

namespace flashcore::server::testing {

void LoseDevice(int ordinal) { LoseFakeGpu(ordinal, cudaErrorLaunchFailure); }

void HoldDevice() {
  static bool held = false;
  held = !held;
  HoldFakeGpu(0, held);
  LogInfo(held ? "cuda:0 is held" : "cuda:0 goes on");
}

}  // namespace flashcore::server::testing

#include "server/device/cpu_device.h"

#include <cstddef>
#include <cstring>

#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

TEST(CpuDeviceOptionsTest, SumsInFloat32Only) {
  const SteadyClock clock;
  CpuDevice::Options options;
  const auto device = CpuDevice::Create(options, &clock);
  ASSERT_EQ(device.status(), absl::OkStatus());
  for (const kernels::Kernel* kernel : (*device)->kernels()) {
    EXPECT_EQ(kernel->spec.accumulate, kernels::Accumulate::kFloat32);
  }
  options.accumulate = kernels::Accumulate::kFloat16;
  EXPECT_EQ(CpuDevice::Create(options, &clock).status(),
            absl::UnimplementedError("no kernels for cpu: accumulate float16 is not float32"));
}

TEST(CpuDeviceTest, MemoryThatIsGivenBackReadsAsZeros) {
  const SteadyClock clock;
  CpuDevice::Options options;
  options.kv_memory_bytes = 3 * Arena::kDefaultSuperblockBytes;
  const auto device = CpuDevice::Create(options, &clock);
  ASSERT_EQ(device.status(), absl::OkStatus());
  const KvMemory memory = (*device)->kv_memory();
  std::memset(memory.base, 0xff, memory.bytes);
  constexpr size_t kPart = Arena::kDefaultSuperblockBytes;
  memory.give_back(memory.base + kPart, kPart);
  for (size_t at = 0; at < memory.bytes; ++at) {
    const bool given_back = at / kPart == 1;
    ASSERT_EQ(memory.base[at], given_back ? std::byte{0} : std::byte{0xff}) << at;
  }
  memory.base[kPart] = std::byte{1};
  EXPECT_EQ(memory.base[kPart], std::byte{1});
}

}  // namespace
}  // namespace flashcore::server

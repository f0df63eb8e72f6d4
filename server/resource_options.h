// The flags of devices, memory and queues, read and checked.
#ifndef FLASHCORE_SERVER_RESOURCE_OPTIONS_H_
#define FLASHCORE_SERVER_RESOURCE_OPTIONS_H_

#include <cstddef>
#include <vector>

#include "server/device/open_device.h"
#include "server/engine/device_memory.h"
#include "server/engine/engine.h"
#include "server/flag_checker.h"
#include "server/memory/budgets.h"
#include "server/memory/shared_memory.h"

namespace flashcore::server {

// Which devices: their kind and ordinals.
void ReadDevices(DeviceOptions* options, FlagChecker* check);
// How they compute. `device_tensor_bytes`: what clients may have of their memory.
void ReadDeviceOptions(const Budgets& budgets, size_t device_tensor_bytes, DeviceOptions* options,
                       FlagChecker* check);
// Which budgets there are, and that those that are given go together.
Budgets ReadBudgets(const HostMemory& memory, const MemoryUse& use, FlagChecker* check);
void ReadSharedMemoryOptions(const Budgets& budgets, SharedMemory::Options* options);
void ReadDeviceMemoryOptions(bool has_device_tensors, DeviceMemory::Options* options,
                             FlagChecker* check);
void ReadEngineOptions(const Budgets& budgets, Engine::Options* options, FlagChecker* check);
// The cores that the server runs on; empty: any.
std::vector<int> ReadCores(FlagChecker* check);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_RESOURCE_OPTIONS_H_

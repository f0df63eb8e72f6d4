#include "client/local/cuda.h"

#include <dlfcn.h>

#include <atomic>
#include <type_traits>

namespace flashcore::client::local {
namespace {

std::atomic<const CudaDriver*> loaded_driver{nullptr};  // for OnGpu

constexpr char kLibrary[] = "libcuda.so.1";

// Results that have a code of their own, and what helps.
struct Meaning {
  int result;  // CUresult
  Code code;
  const char* advice;
};
constexpr Meaning kMeanings[] = {
    {2, kResourceExhausted, ""},  // CUDA_ERROR_OUT_OF_MEMORY
    {3, kFailedPrecondition,      // CUDA_ERROR_NOT_INITIALIZED
     "; CUDA does not survive a fork: start the process anew, or fork before it is used"},
    {100, kFailedPrecondition, ""},  // CUDA_ERROR_NO_DEVICE
    {201, kFailedPrecondition,       // CUDA_ERROR_INVALID_CONTEXT
     "; the default stream needs a context that is current in this thread: see cudaSetDevice"},
    {801, kUnimplemented, ""},  // CUDA_ERROR_NOT_SUPPORTED
};

Status LoadFunctions(CudaDriver* driver) {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return {kUnimplemented,
            std::string("device memory and CUDA streams need the driver of an NVIDIA GPU: ") +
                dlerror(),
            ""};
  }
  const char* missing = nullptr;
  const auto load = [library, &missing](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (*function == nullptr) missing = name;
  };
  load("cuInit", &driver->cuInit);
  load("cuGetErrorString", &driver->cuGetErrorString);
  load("cuDeviceGetCount", &driver->cuDeviceGetCount);
  load("cuDeviceGet", &driver->cuDeviceGet);
  load("cuDeviceGetUuid_v2", &driver->cuDeviceGetUuid);
  load("cuDevicePrimaryCtxRetain", &driver->cuDevicePrimaryCtxRetain);
  load("cuDevicePrimaryCtxRelease_v2", &driver->cuDevicePrimaryCtxRelease);
  load("cuCtxPushCurrent_v2", &driver->cuCtxPushCurrent);
  load("cuCtxPopCurrent_v2", &driver->cuCtxPopCurrent);
  load("cuMemImportFromShareableHandle", &driver->cuMemImportFromShareableHandle);
  load("cuMemAddressReserve", &driver->cuMemAddressReserve);
  load("cuMemAddressFree", &driver->cuMemAddressFree);
  load("cuMemMap", &driver->cuMemMap);
  load("cuMemUnmap", &driver->cuMemUnmap);
  load("cuMemSetAccess", &driver->cuMemSetAccess);
  load("cuMemRelease", &driver->cuMemRelease);
  load("cuMemHostRegister_v2", &driver->cuMemHostRegister);
  load("cuMemHostUnregister", &driver->cuMemHostUnregister);
  load("cuMemHostGetDevicePointer_v2", &driver->cuMemHostGetDevicePointer);
  load("cuPointerGetAttribute", &driver->cuPointerGetAttribute);
  load("cuStreamGetCtx", &driver->cuStreamGetCtx);
  load("cuStreamGetId", &driver->cuStreamGetId);
  load("cuStreamIsCapturing", &driver->cuStreamIsCapturing);
  load("cuStreamBatchMemOp_v2", &driver->cuStreamBatchMemOp);
  if (missing == nullptr) return {};
  return {kUnimplemented,
          std::string(kLibrary) + " has no " + missing +
              ": device memory and CUDA streams need a driver of CUDA 12.0 or later",
          ""};
}

}  // namespace

Status CudaDriver::Get(const CudaDriver** driver) {
  struct Loaded {
    Loaded() : status(LoadFunctions(&driver)) {
      if (status.ok()) status = driver.Check(driver.cuInit(0), "cuInit");
      if (status.ok()) loaded_driver.store(&driver, std::memory_order_release);
    }
    CudaDriver driver = {};
    Status status;
  };
  static const auto* const loaded = new Loaded;  // threads may use it until the process ends
  *driver = &loaded->driver;
  return loaded->status;
}

Status CudaDriver::Check(int result, const char* function) const {
  if (result == 0) return {};
  const char* text = nullptr;
  std::string message = std::string(function) + ": ";
  if (cuGetErrorString(result, &text) == 0 && text != nullptr) {
    message += text;
  } else {
    message += "error " + std::to_string(result);
  }
  for (const Meaning& meaning : kMeanings) {
    if (meaning.result == result) return {meaning.code, message + meaning.advice, ""};
  }
  return {kInternal, message, ""};
}

Status CudaDriver::FindDevice(const CuUuid& uuid, int* ordinal, int* device) const {
  int count = 0;
  Status status = Check(cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (!status.ok()) return status;
  std::string seen;
  for (*ordinal = 0; *ordinal < count; ++*ordinal) {
    CuUuid found = {};
    status = Check(cuDeviceGet(device, *ordinal), "cuDeviceGet");
    if (status.ok()) status = Check(cuDeviceGetUuid(&found, *device), "cuDeviceGetUuid");
    if (!status.ok()) return status;
    if (std::memcmp(found.bytes, uuid.bytes, sizeof(uuid.bytes)) == 0) return {};
    seen += (seen.empty() ? "" : ", ") + UuidText(found);
  }
  return {kFailedPrecondition,
          "the server's memory is on " + UuidText(uuid) + ", which this process does not see; " +
              (seen.empty() ? "it sees no GPU" : "it sees " + seen) + ": see CUDA_VISIBLE_DEVICES",
          ""};
}

bool OnGpu(const void* data) {
  constexpr int kMemoryType = 2, kIsManaged = 8;  // CU_POINTER_ATTRIBUTE_*
  constexpr unsigned kDevice = 2;                 // CU_MEMORYTYPE_DEVICE
  const CudaDriver* const driver = loaded_driver.load(std::memory_order_acquire);
  if (driver == nullptr) return false;
  const auto address = reinterpret_cast<CuAddress>(data);
  unsigned type = 0;  // an error: CUDA does not know the memory
  if (driver->cuPointerGetAttribute(&type, kMemoryType, address) != 0 || type != kDevice) {
    return false;
  }
  unsigned managed = 0;
  driver->cuPointerGetAttribute(&managed, kIsManaged, address);
  return managed == 0;
}

std::string UuidText(const CuUuid& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[uuid.bytes[i] >> 4];
    text += kDigits[uuid.bytes[i] & 15];
  }
  return text;
}

CurrentContext::CurrentContext(const CudaDriver& driver, CuContext context)
    : driver_(driver),
      status_(driver.Check(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")) {}

CurrentContext::~CurrentContext() {
  CuContext popped = nullptr;
  if (status_.ok()) driver_.cuCtxPopCurrent(&popped);
}

Status PinnedMemory::Pin(const CudaDriver& driver, CuContext context, void* data, size_t bytes,
                         PinnedMemory* pinned) {
  constexpr unsigned kPortable = 1, kDeviceMap = 2;  // CU_MEMHOSTREGISTER_*
  const CurrentContext current(driver, context);
  if (!current.status().ok()) return current.status();
  Status status = driver.Check(driver.cuMemHostRegister(data, bytes, kPortable | kDeviceMap),
                               "cuMemHostRegister");
  if (!status.ok()) return status;
  PinnedMemory made;
  made.driver_ = &driver;
  made.context_ = context;
  made.data_ = data;
  status = driver.Check(driver.cuMemHostGetDevicePointer(&made.address_, data, 0),
                        "cuMemHostGetDevicePointer");
  if (status.ok()) *pinned = std::move(made);
  return status;
}

PinnedMemory::~PinnedMemory() {
  if (data_ == nullptr) return;
  const CurrentContext current(*driver_, context_);
  if (current.status().ok()) driver_->cuMemHostUnregister(data_);
}

}  // namespace flashcore::client::local

#include "tests/client/fake_cuda/fake_cuda.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kContextIsDestroyed = 709,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kUnknown = 999,
};

constexpr int kMaxGpus = 8;
constexpr uint32_t kWaitValue64 = 4, kWriteValue64 = 5;

std::atomic<int> pending{0};  // operations of all streams, destroyed ones included

}  // namespace

struct CUctx_st {
  int retained = 0;
  CUstream default_stream = nullptr;
};

struct CUstream_st {
  uint64_t id = 0;
  CUcontext context = nullptr;
  std::atomic<bool> capturing{false};
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> operations;  // the first one may be running
  bool destroyed = false;

  void Run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return destroyed || !operations.empty(); });
      if (operations.empty()) break;
      lock.unlock();
      operations.front()();  // a deque's element stays where it is
      lock.lock();
      operations.pop_front();
      --pending;
      changed.notify_all();
    }
    lock.unlock();
    delete this;
  }
};

namespace {

using Uuid = std::array<uint8_t, 16>;

struct Import {
  int fd;
  size_t bytes;
};
struct Registration {
  std::byte* alias;  // the address for GPUs
  size_t bytes;
};

// All with `mutex`, but what is atomic.
struct Driver {
  std::mutex mutex;
  pid_t process = 0;  // in which it was initialised
  int gpus = 1;
  unsigned managed = 0;
  std::array<Uuid, kMaxGpus> uuids = {};
  std::array<CUctx_st, kMaxGpus> contexts;
  int current = 0;  // contexts, on all threads
  std::map<uint64_t, Import> imports;
  std::map<uint64_t, size_t> reservations, maps;  // bytes by address
  std::map<void*, Registration> registrations;
  std::set<CUstream> streams;
  uint64_t next = 1;  // handle or id
  std::string fault;
  int fault_calls = 0, fault_result = 0;
};

Driver& driver() {
  static Driver* const made = [] {
    auto* const fresh = new Driver;  // threads use it until the process ends
    std::memcpy(fresh->uuids[0].data(), "fake GPU no. 000", 16);
    return fresh;
  }();
  return *made;
}

thread_local std::vector<CUcontext> current_contexts;

// Begins a call of the driver: what `result` says if it fails at once. Holds the driver's lock.
class Call {
 public:
  explicit Call(std::string function) : lock_(driver().mutex) {
    if (function.size() > 3 && function.substr(function.size() - 3) == "_v2") {
      function.resize(function.size() - 3);
    }
    Driver& d = driver();
    if (d.process != getpid() && function != "cuInit") result_ = kNotInitialized;
    if (function != d.fault || d.fault_calls-- > 0) return;
    d.fault.clear();
    result_ = d.fault_result;
  }
  bool failed() const { return result_ != kSuccess; }
  int result() const { return result_; }

 private:
  const std::lock_guard<std::mutex> lock_;
  int result_ = kSuccess;
};

bool Inside(uint64_t start, size_t bytes, uint64_t address, size_t size = sizeof(uint64_t)) {
  return address >= start && address - start + size <= bytes;
}

// Whether memory of a GPU is mapped at `address`.
bool Mapped(uint64_t address, size_t size) {
  for (const auto& [start, bytes] : driver().maps) {
    if (Inside(start, bytes, address, size)) return true;
  }
  return false;
}

// Whether a GPU may read and write a number at `address`.
bool Reachable(uint64_t address) {
  if (address % sizeof(uint64_t) != 0) return false;
  if (Mapped(address, sizeof(uint64_t))) return true;
  for (const auto& [data, registration] : driver().registrations) {
    const auto start = reinterpret_cast<uint64_t>(registration.alias);
    if (Inside(start, registration.bytes, address)) return true;
  }
  return false;
}

CUstream NewStream(CUcontext context) {
  auto* const stream = new CUstream_st;
  stream->id = driver().next++;
  stream->context = context;
  driver().streams.insert(stream);
  std::thread([stream] { stream->Run(); }).detach();
  return stream;
}

// The stream of a handle. Null: the default stream of the current context.
int FindStream(CUstream handle, CUstream* stream) {
  *stream = handle;
  if (handle == nullptr) {
    if (current_contexts.empty()) return kInvalidContext;
    CUcontext const context = current_contexts.back();
    if (context->default_stream == nullptr) context->default_stream = NewStream(context);
    *stream = context->default_stream;
  }
  return driver().streams.count(*stream) > 0 ? kSuccess : kInvalidHandle;
}

void Enqueue(CUstream stream, std::function<void()> operation) {
  const std::lock_guard<std::mutex> lock(stream->mutex);
  ++pending;
  stream->operations.push_back(std::move(operation));
  stream->changed.notify_all();
}

void WaitUntilIdle(CUstream stream) {
  std::unique_lock<std::mutex> lock(stream->mutex);
  stream->changed.wait(lock, [stream] { return stream->operations.empty(); });
}

struct MemOp {  // CUstreamBatchMemOpParams
  uint32_t operation;
  uint64_t address;
  uint64_t value;
  uint32_t flags;
  uint64_t alias, reserved;
};

void RunMemOp(const MemOp& operation) {
  auto* const counter = reinterpret_cast<std::atomic<uint64_t>*>(operation.address);
  if (operation.operation == kWriteValue64) {
    counter->store(operation.value);
  } else {
    while (static_cast<int64_t>(counter->load() - operation.value) < 0) sched_yield();
  }
}

}  // namespace

extern "C" {

int cuInit(unsigned flags) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  if (flags != 0) return kInvalidValue;
  driver().process = getpid();
  return kSuccess;
}

int cuGetErrorString(int result, const char** text) {
  static const std::map<int, const char*> kTexts = {
      {kSuccess, "no error"},
      {kInvalidValue, "invalid argument"},
      {kOutOfMemory, "out of memory"},
      {kNotInitialized, "initialization error"},
      {kNoDevice, "no CUDA-capable device is detected"},
      {kInvalidContext, "invalid device context"},
      {kNotSupported, "operation not supported"},
      {kUnknown, "unknown error"}};
  const auto found = kTexts.find(result);
  *text = found == kTexts.end() ? nullptr : found->second;
  return found == kTexts.end() ? kInvalidValue : kSuccess;
}

int cuDeviceGetCount(int* count) {
  const Call call(__func__);
  *count = driver().gpus;
  return call.result();
}

int cuDeviceGet(int* device, int ordinal) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  *device = ordinal;
  return ordinal >= 0 && ordinal < driver().gpus ? kSuccess : kInvalidDevice;
}

int cuDeviceGetUuid_v2(uint8_t* uuid, int device) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  std::memcpy(uuid, driver().uuids.at(static_cast<size_t>(device)).data(), 16);
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(CUcontext* context, int device) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  *context = &driver().contexts.at(static_cast<size_t>(device));
  ++(*context)->retained;
  return kSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  CUctx_st& context = driver().contexts.at(static_cast<size_t>(device));
  if (context.retained == 0) return kInvalidContext;
  --context.retained;
  return kSuccess;
}

int cuCtxPushCurrent_v2(CUcontext context) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  if (context == nullptr) return kInvalidContext;
  if (context->retained == 0) return kContextIsDestroyed;
  current_contexts.push_back(context);
  ++driver().current;
  return kSuccess;
}

int cuCtxPopCurrent_v2(CUcontext* context) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  if (current_contexts.empty()) return kInvalidContext;
  *context = current_contexts.back();
  current_contexts.pop_back();
  --driver().current;
  return kSuccess;
}

int cuCtxGetCurrent(CUcontext* context) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  *context = current_contexts.empty() ? nullptr : current_contexts.back();
  return kSuccess;
}

int cuCtxSetCurrent(CUcontext context) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  if (context == nullptr) return kInvalidContext;
  if (context->retained == 0) return kContextIsDestroyed;
  if (current_contexts.empty()) {
    current_contexts.push_back(context);
    ++driver().current;
  }
  current_contexts.back() = context;
  return kSuccess;
}

int cuMemImportFromShareableHandle(uint64_t* handle, void* file, int type) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const int fd = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(file)), F_DUPFD_CLOEXEC, 0);
  struct stat status = {};
  if (type != 1 || fd < 0 || fstat(fd, &status) != 0) return kInvalidValue;
  *handle = driver().next++;
  driver().imports[*handle] = {fd, static_cast<size_t>(status.st_size)};
  return kSuccess;
}

int cuMemRelease(uint64_t handle) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const auto found = driver().imports.find(handle);
  if (found == driver().imports.end()) return kInvalidValue;
  close(found->second.fd);
  driver().imports.erase(found);
  return kSuccess;
}

int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t alignment, uint64_t hint,
                        uint64_t flags) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  if (bytes == 0 || bytes % FAKE_CUDA_GRANULARITY != 0) return kInvalidValue;
  if (alignment != 0 || hint != 0 || flags != 0) return kInvalidValue;
  void* const data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return kOutOfMemory;
  *address = reinterpret_cast<uint64_t>(data);
  driver().reservations[*address] = bytes;
  return kSuccess;
}

int cuMemAddressFree(uint64_t address, size_t bytes) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const auto found = driver().reservations.find(address);
  if (found == driver().reservations.end() || found->second != bytes) return kInvalidValue;
  if (driver().maps.count(address) > 0) return kInvalidValue;
  munmap(reinterpret_cast<void*>(address), bytes);
  driver().reservations.erase(found);
  return kSuccess;
}

int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const auto reserved = driver().reservations.find(address);
  const auto import = driver().imports.find(handle);
  if (reserved == driver().reservations.end() || reserved->second != bytes ||
      import == driver().imports.end() || import->second.bytes != bytes || offset != 0 ||
      flags != 0 || driver().maps.count(address) > 0) {
    return kInvalidValue;
  }
  if (mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
           import->second.fd, 0) == MAP_FAILED) {
    return kOutOfMemory;
  }
  driver().maps[address] = bytes;
  return kSuccess;
}

int cuMemUnmap(uint64_t address, size_t bytes) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const auto found = driver().maps.find(address);
  if (found == driver().maps.end() || found->second != bytes) return kInvalidValue;
  mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
       -1, 0);
  driver().maps.erase(found);
  return kSuccess;
}

int cuMemSetAccess(uint64_t address, size_t bytes, const int* access, size_t count) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const auto found = driver().maps.find(address);
  if (found == driver().maps.end() || found->second != bytes || count != 1) return kInvalidValue;
  constexpr int kDevice = 1, kReadWrite = 3;
  if (access[0] != kDevice || access[1] >= driver().gpus || access[2] != kReadWrite) {
    return kInvalidValue;
  }
  mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
  return kSuccess;
}

// GPUs see the memory at an address of its own, which is gone with the registration.
int cuMemHostRegister_v2(void* data, size_t bytes, unsigned flags) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  constexpr unsigned kPortable = 1, kDeviceMap = 2;
  if (current_contexts.empty()) return kInvalidContext;
  if (flags != (kPortable | kDeviceMap)) return kInvalidValue;
  if (driver().registrations.count(data) > 0) return kAlreadyRegistered;
  // With 0 as the old size it maps shared memory a second time.
  void* const alias = mremap(data, 0, bytes, MREMAP_MAYMOVE);
  if (alias == MAP_FAILED) return kInvalidValue;
  driver().registrations[data] = {static_cast<std::byte*>(alias), bytes};
  return kSuccess;
}

// Waits for all streams, as a driver was seen to do.
int cuMemHostUnregister(void* data) {
  {
    const Call call(__func__);
    if (call.failed()) return call.result();
    if (driver().registrations.count(data) == 0) return kNotRegistered;
  }
  while (pending > 0) sched_yield();
  const std::lock_guard<std::mutex> lock(driver().mutex);
  const auto found = driver().registrations.find(data);
  munmap(found->second.alias, found->second.bytes);
  driver().registrations.erase(found);
  return kSuccess;
}

int cuMemHostGetDevicePointer_v2(uint64_t* address, void* data, unsigned flags) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const auto found = driver().registrations.find(data);
  if (found == driver().registrations.end() || flags != 0) return kInvalidValue;
  *address = reinterpret_cast<uint64_t>(found->second.alias);
  return kSuccess;
}

// An error for memory that CUDA does not know.
int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  constexpr int kMemoryType = 2, kIsManaged = 8;
  constexpr unsigned kDevice = 2;
  if (!Mapped(address, 1)) return kInvalidValue;
  if (attribute == kMemoryType) {
    std::memcpy(value, &kDevice, sizeof(kDevice));
  } else if (attribute == kIsManaged) {
    std::memcpy(value, &driver().managed, sizeof(driver().managed));
  } else {
    return kInvalidValue;
  }
  return kSuccess;
}

int cuStreamCreate(CUstream* stream, unsigned flags) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  if (current_contexts.empty()) return kInvalidContext;
  if (flags > 1) return kInvalidValue;
  *stream = NewStream(current_contexts.back());
  return kSuccess;
}

int cuStreamDestroy_v2(CUstream stream) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  if (driver().streams.erase(stream) == 0) return kInvalidHandle;
  const std::lock_guard<std::mutex> lock(stream->mutex);
  stream->destroyed = true;
  stream->changed.notify_all();
  return kSuccess;
}

int cuStreamSynchronize(CUstream stream) {
  {
    const Call call(__func__);
    if (call.failed()) return call.result();
    const int result = FindStream(stream, &stream);
    if (result != kSuccess) return result;
  }
  WaitUntilIdle(stream);
  return kSuccess;
}

int cuLaunchHostFunc(CUstream stream, void (*function)(void*), void* data) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const int result = FindStream(stream, &stream);
  if (result == kSuccess) Enqueue(stream, [function, data] { function(data); });
  return result;
}

int cuStreamGetCtx(CUstream stream, CUcontext* context) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const int result = FindStream(stream, &stream);
  if (result == kSuccess) *context = stream->context;
  return result;
}

int cuStreamGetId(CUstream stream, uint64_t* id) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const int result = FindStream(stream, &stream);
  if (result != kSuccess) return result;
  *id = stream->id;
  return stream->capturing ? kCaptureUnsupported : kSuccess;
}

int cuStreamIsCapturing(CUstream stream, int* state) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const int result = FindStream(stream, &stream);
  if (result == kSuccess) *state = stream->capturing ? 1 : 0;
  return result;
}

// A call that fails leaves its first operation behind: callers must expect that it did a part.
int cuStreamBatchMemOp_v2(CUstream stream, unsigned count, const MemOp* operations,
                          unsigned flags) {
  const Call call(__func__);
  const int result = FindStream(stream, &stream);
  if (result != kSuccess) return result;
  if (flags != 0 || count > 256) return kInvalidValue;
  for (unsigned i = 0; i < count; ++i) {
    const MemOp& operation = operations[i];
    if (operation.operation != kWaitValue64 && operation.operation != kWriteValue64) {
      return kNotSupported;
    }
    if (operation.flags != 0 || !Reachable(operation.address)) return kInvalidValue;
  }
  for (unsigned i = 0; i < (call.failed() ? 1 : count); ++i) {
    Enqueue(stream, [operation = operations[i]] { RunMemOp(operation); });
  }
  return call.result();
}

// The source may be any memory of the process.
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t source, size_t bytes, CUstream stream) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  if (current_contexts.empty()) return kInvalidContext;
  const int result = FindStream(stream, &stream);
  if (result != kSuccess) return result;
  if (!Mapped(to, bytes)) return kInvalidValue;
  Enqueue(stream, [to, source, bytes] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(source), bytes);
  });
  return kSuccess;
}

// Either side is memory of a GPU, or of the host, which must not change meanwhile.
int cuMemcpyAsync(uint64_t to, uint64_t source, size_t bytes, CUstream stream) {
  const Call call(__func__);
  if (call.failed()) return call.result();
  const int result = FindStream(stream, &stream);
  if (result != kSuccess) return result;
  Enqueue(stream, [to, source, bytes] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(source), bytes);
  });
  return kSuccess;
}

int cuCtxSynchronize(void) {
  {
    const Call call(__func__);
    if (call.failed()) return call.result();
    if (current_contexts.empty()) return kInvalidContext;
  }
  while (pending > 0) sched_yield();
  return kSuccess;
}

void fake_cuda_reset(void) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  driver().gpus = 1;
  driver().managed = 0;
  std::memcpy(driver().uuids[0].data(), "fake GPU no. 000", 16);
  driver().fault.clear();
}

void fake_cuda_set_gpus(int count, const uint8_t* uuids) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  driver().gpus = count;
  for (int i = 0; i < count; ++i) {
    std::memcpy(driver().uuids.at(static_cast<size_t>(i)).data(), uuids + 16 * i, 16);
  }
}

void fake_cuda_fail(const char* function, int calls, int result) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  driver().fault = function;
  driver().fault_calls = calls;
  driver().fault_result = result;
}

int fake_cuda_alive(const char* kind) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  int contexts = 0, default_streams = 0;
  for (const CUctx_st& context : driver().contexts) {
    contexts += context.retained;
    if (context.default_stream != nullptr) ++default_streams;
  }
  const std::map<std::string, size_t> counts = {
      {"contexts", static_cast<size_t>(contexts)},
      {"current", static_cast<size_t>(driver().current)},
      {"imports", driver().imports.size()},
      {"reservations", driver().reservations.size()},
      {"maps", driver().maps.size()},
      {"registrations", driver().registrations.size()},
      {"streams", driver().streams.size() - static_cast<size_t>(default_streams)}};
  return static_cast<int>(counts.at(kind));
}

void fake_cuda_manage(int managed) {
  const std::lock_guard<std::mutex> lock(driver().mutex);
  driver().managed = managed != 0 ? 1 : 0;
}

void fake_cuda_capture(CUstream stream, int capturing) { stream->capturing = capturing != 0; }

}  // extern "C"

// Stands for the CUDA runtime (libcudart): devices, memory, copies, streams, events, launches.
//
// Kernels do nothing, streams and events are numbers, every event has happened. Launches, waits of
// the host and copies from pageable memory are counted. Refused as by CUDA: launches beyond the
// limits, registering nothing or twice, freeing what was not allocated, more memory than there is.
#include <cstdio>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <string>
#include <unordered_map>

#include "log.h"
#include "memory.h"

using fake::Memory;
using fake::Place;

static std::atomic<uintptr_t> last_handle{0x1000};
static thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;

// What the cases read, by the names in fake.h.
EXPORT long fake_cuda_count(const char* name) {
  static const std::map<std::string, std::atomic<long>*> counters = {
      {"kernels", &fake::n_kernels},         {"triton_kernels", &fake::n_triton_kernels},
      {"matmuls", &fake::n_matmuls},         {"collectives", &fake::n_collectives},
      {"waits", &fake::n_waits},             {"pageable_copies", &fake::n_pageable_copies},
  };
  return *counters.at(name);
}

// The log of log.h.
EXPORT void fake_cuda_log(const char* path) {
  std::lock_guard<std::mutex> guard(fake::log_lock);
  if (fake::log_file) fclose(fake::log_file);
  fake::log_file = path ? fopen(path, "w") : nullptr;
}
EXPORT void fake_cuda_mark(const char* text) { fake::log("mark %s", text); }

static cudaError_t fail(cudaError_t error) { return last_error = error; }

template <class Handle>
static cudaError_t give_handle(Handle* handle) {
  *handle = (Handle)(last_handle += 16);
  return cudaSuccess;
}

static bool is_capturing = false;  // a graph

static cudaError_t wait() {
  fake::n_waits++;
  return cudaSuccess;
}

// Devices.

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = fake::n_devices();
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= fake::n_devices()) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "%s", fake::device_name());
  found->major = fake::capability() / 10;
  found->minor = fake::capability() % 10;
  found->totalGlobalMem = Memory::total_bytes();
  found->multiProcessorCount = fake::n_multiprocessors();
  found->warpSize = fake::WARP_SIZE;
  found->maxThreadsPerBlock = fake::BLOCK_THREADS;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = fake::BLOCK_THREADS;
  found->maxThreadsDim[2] = fake::BLOCK_DEPTH;
  found->maxGridSize[0] = fake::GRID_WIDTH;
  found->maxGridSize[1] = found->maxGridSize[2] = fake::GRID_HEIGHT;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->regsPerBlock = found->regsPerMultiprocessor = fake::BLOCK_REGISTERS;
  found->sharedMemPerBlock = fake::SHARED_BYTES;
  found->sharedMemPerBlockOptin = fake::optional_shared_bytes();
  found->sharedMemPerMultiprocessor = fake::multiprocessor_shared_bytes();
  found->reservedSharedMemPerBlock = 1024;
  found->totalConstMem = 65536;
  found->memPitch = 2147483647;
  found->textureAlignment = 512;
  found->memoryBusWidth = 6144;
  found->l2CacheSize = 60 << 20;
  found->asyncEngineCount = 3;
  found->concurrentKernels = found->cooperativeLaunch = found->clusterLaunch = 1;
  found->unifiedAddressing = found->managedMemory = found->memoryPoolsSupported = 1;
  found->canMapHostMemory = found->hostRegisterSupported = 1;
  found->canUseHostPointerForRegisteredMem = found->streamPrioritiesSupported = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = fake::capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = fake::capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = fake::n_multiprocessors(); break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = fake::SHARED_BYTES; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = fake::optional_shared_bytes(); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = fake::multiprocessor_shared_bytes();
      break;
    case cudaDevAttrWarpSize: *value = fake::WARP_SIZE; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = fake::BLOCK_THREADS; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = fake::BLOCK_REGISTERS; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxGridDimX: *value = fake::GRID_WIDTH; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = fake::GRID_HEIGHT; break;
    default: *value = 1;  // what is asked for is there
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* id, int n_bytes, int device) {
  snprintf(id, n_bytes, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() { return wait(); }

// Errors.

EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORT cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorHostMemoryAlreadyRegistered: return "host memory is already registered";
    case cudaErrorHostMemoryNotRegistered: return "host memory was not registered";
    case cudaErrorNotSupported: return "not supported by the fake device";
    default: return "unknown error";
  }
}
EXPORT const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// Memory.

EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = Memory::total_bytes();
  *free = *total - Memory::instance().used_bytes();
  return cudaSuccess;
}
EXPORT cudaError_t cudaMalloc(void** start, size_t n_bytes) {
  *start = n_bytes ? Memory::instance().allocate(n_bytes, Place::DEVICE) : nullptr;
  return *start || !n_bytes ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
EXPORT cudaError_t cudaFree(void* start) {
  bool is_known = !start || Memory::instance().release(start);
  return is_known ? cudaSuccess : fail(cudaErrorInvalidValue);
}
EXPORT cudaError_t cudaHostAlloc(void** start, size_t n_bytes, unsigned) {
  *start = Memory::instance().allocate(n_bytes, Place::PAGE_LOCKED);
  return *start ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
EXPORT cudaError_t cudaFreeHost(void* start) { return cudaFree(start); }
EXPORT cudaError_t cudaHostRegister(void* start, size_t n_bytes, unsigned) {
  Memory& memory = Memory::instance();
  if (!start || !n_bytes) return fail(cudaErrorInvalidValue);
  if (memory.place_of(start) != Place::PAGEABLE) return fail(cudaErrorHostMemoryAlreadyRegistered);
  memory.note(start, n_bytes, Place::REGISTERED);
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* start) {
  bool is_known = Memory::instance().forget(start, nullptr) == Place::REGISTERED;
  return is_known ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  Place place = Memory::instance().place_of(address);
  bool on_device = place == Place::DEVICE, is_known = place != Place::PAGEABLE;
  memset(found, 0, sizeof *found);
  found->type = on_device  ? cudaMemoryTypeDevice
                : is_known ? cudaMemoryTypeHost
                           : cudaMemoryTypeUnregistered;
  found->device = is_known ? 0 : -2;
  found->devicePointer = is_known ? (void*)address : nullptr;
  found->hostPointer = on_device ? nullptr : (void*)address;
  return cudaSuccess;
}

// Copies. A copy between the device and pageable memory blocks the host until all before it in the
// stream is done, even where it is called asynchronous.

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t n_bytes, cudaMemcpyKind) {
  fake::copy(to, from, n_bytes);
  return wait();
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n_bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  fake::log("copy %p %zu", (void*)stream, n_bytes);
  const void* on_host = kind == cudaMemcpyHostToDevice ? from : to;
  bool leaves = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToHost;
  if (leaves && Memory::instance().place_of(on_host) == Place::PAGEABLE) fake::n_pageable_copies++;
  fake::copy(to, from, n_bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; row++)
    fake::copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n_bytes,
                                       cudaStream_t) {
  fake::copy(to, from, n_bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* start, int value, size_t n_bytes) {
  fake::fill(start, value, n_bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* start, int value, size_t n_bytes, cudaStream_t stream) {
  fake::log("fill %p %zu", (void*)stream, n_bytes);
  fake::fill(start, value, n_bytes);
  return cudaSuccess;
}

// Streams and events.

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return give_handle(stream); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return give_handle(stream);
}
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return give_handle(stream);
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait(); }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  fake::log("wait %p %p", (void*)stream, (void*)event);
  return cudaSuccess;
}

// Graphs: of one stream at a time, empty; each start of one counts as a launch.

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  is_capturing = true;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  is_capturing = false;
  return give_handle(graph);
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph,
                                            const cudaGraphNode_t** nodes,
                                            const cudaGraphEdgeData** edges, size_t* n) {
  if (id) *id = is_capturing;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaStreamIsCapturing(stream, status);
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* n) {
  *n = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* ready, cudaGraph_t,
                                                 unsigned long long) {
  return give_handle(ready);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  fake::n_kernels++;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return give_handle(event); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return give_handle(event);
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  fake::log("record %p %p", (void*)stream, (void*)event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait(); }
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}

// Kernels of torch and torchao. Each is registered with its name as its library is loaded.

static std::unordered_map<const void*, const char*>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, const char*>;
  return *names;
}
EXPORT void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*,
                                   void*, void*, void*, int*) {
  kernel_names()[function] = name;
}

static cudaError_t launch(const void* function, dim3 grid, dim3 block, size_t shared_bytes,
                          cudaStream_t stream) {
  fake::n_kernels++;
  if (fake::log_file) {
    auto found = kernel_names().find(function);
    size_t n_threads = (size_t)grid.x * grid.y * grid.z * block.x * block.y * block.z;
    const char* name = found == kernel_names().end() ? "unknown" : found->second;
    fake::log("kernel %p %zu %s", (void*)stream, n_threads, name);
  }
  bool fits = fake::can_launch({grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes);
  return fits ? cudaSuccess : fail(cudaErrorInvalidConfiguration);
}
EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**,
                                    size_t shared_bytes, cudaStream_t stream) {
  return launch(function, grid, block, shared_bytes, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                       void**) {
  return launch(function, config->gridDim, config->blockDim, config->dynamicSmemBytes,
                config->stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**,
                                               size_t shared_bytes, cudaStream_t stream) {
  return launch(function, grid, block, shared_bytes, stream);
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = fake::BLOCK_THREADS;
  found->maxDynamicSharedSizeBytes = fake::optional_shared_bytes();
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = fake::capability();
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n_blocks, const void*, int,
                                                                 size_t) {
  *n_blocks = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n_blocks,
                                                                          const void*, int, size_t,
                                                                          unsigned) {
  *n_blocks = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int* n_clusters, const void*,
                                                  const cudaLaunchConfig_t*) {
  *n_clusters = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = (void*)symbol;
  return cudaSuccess;
}

// What nvcc writes around each "kernel<<<grid, block, shared, stream>>>".

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
static const int MOST_NESTED = 16;
static thread_local Configuration pushed[MOST_NESTED];
static thread_local int n_pushed = 0;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                            void* stream) {
  pushed[n_pushed++ % MOST_NESTED] = {grid, block, shared_bytes, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                              void* stream) {
  const Configuration& last = pushed[--n_pushed % MOST_NESTED];
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *(void**)stream = last.stream;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**,
                                      size_t shared_bytes, cudaStream_t stream) {
  return launch((const void*)kernel, grid, block, shared_bytes, stream);
}
EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[2];
  return handle;
}
EXPORT char __cudaInitModule(void**) { return 1; }

// torch asks for functions of the driver by name: those of driver.cpp, and one for all others.

static int is_not_supported() { return cudaErrorNotSupported; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void*)is_not_supported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// torch forbids CUDA in a fork, by a handler that only a child runs. Here forks may use the device,
// as long as their parent has not: so cases start at once, with everything imported.
EXPORT int __register_atfork(void (*prepare)(), void (*parent)(), void (*child)(), void* library) {
  using Register = int (*)(void (*)(), void (*)(), void (*)(), void*);
  static Register original = (Register)dlsym(RTLD_NEXT, "__register_atfork");
  return prepare || parent ? original(prepare, parent, child, library) : 0;
}

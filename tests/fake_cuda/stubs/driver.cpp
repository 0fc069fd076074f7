// Stands for the CUDA driver (libcuda): what Triton calls, and torch's expandable segments.
//
// Modules load and functions launch, but do nothing. Launches are counted, and refused beyond the
// limits; so is the address of a host tensor as an argument of a kernel.
#include <cstdio>
#include <cuda.h>
#include <map>
#include <string>

#include "log.h"
#include "memory.h"

using fake::Memory;
using fake::Place;

static std::atomic<uintptr_t> last_handle{0x100000};

template <class Handle>
static CUresult give_handle(Handle* handle) {
  *handle = (Handle)(last_handle += 16);
  return CUDA_SUCCESS;
}

// Devices and contexts: there is one context.

static const CUcontext CONTEXT = (CUcontext)0x10;
EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int* count) {
  *count = fake::n_devices();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char* name, int n_bytes, CUdevice) {
  snprintf(name, n_bytes, "%s", fake::device_name());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = fake::capability() / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = fake::capability() % 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = fake::SHARED_BYTES; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = fake::optional_shared_bytes();
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = fake::multiprocessor_shared_bytes();
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = fake::n_multiprocessors(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = fake::BLOCK_REGISTERS; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = fake::BLOCK_THREADS; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = fake::WARP_SIZE; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 3201000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 6144; break;
    default: *value = 1;  // what is asked for is there
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  if (flags) *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_INVALID_VALUE   ? "invalid argument"
          : error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory"
                                              : "error of the fake driver";
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  return cuGetErrorString(error, text);
}

// Kernels.

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) { return give_handle(module); }
EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
  return give_handle(module);
}
EXPORT CUresult cuModuleLoad(CUmodule* module, const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  fclose(file);
  return give_handle(module);
}
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
static std::map<CUfunction, std::string>& function_names() {
  static auto* names = new std::map<CUfunction, std::string>;
  return *names;
}
EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  give_handle(function);
  function_names()[*function] = name;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS                ? 64
           : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? fake::BLOCK_THREADS
                                                                  : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int* n_clusters, CUfunction, const CUlaunchConfig*) {
  *n_clusters = 16;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n_blocks, CUfunction, int,
                                                            size_t) {
  *n_blocks = 2;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                       const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                       const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

static CUresult launch(CUfunction function, fake::Size grid, fake::Size block,
                       unsigned shared_bytes, CUstream stream) {
  fake::n_triton_kernels++;
  if (fake::log_file) {
    size_t n_threads = (size_t)grid.x * grid.y * grid.z * block.x * block.y * block.z;
    fake::log("kernel %p %zu %s", (void*)stream, n_threads, function_names()[function].c_str());
  }
  bool fits = fake::can_launch(grid, block, shared_bytes);
  return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**,
                                 void**) {
  return launch(function, {config->gridDimX, config->gridDimY, config->gridDimZ},
                {config->blockDimX, config->blockDimY, config->blockDimZ},
                config->sharedMemBytes, config->hStream);
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared_bytes, CUstream stream, void**,
                               void**) {
  return launch(function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes,
                stream);
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                          unsigned grid_z, unsigned block_x, unsigned block_y,
                                          unsigned block_z, unsigned shared_bytes,
                                          CUstream stream, void**) {
  return launch(function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes,
                stream);
}

// Triton asks this of each tensor it passes; of a tensor on the host the answer is an error.
EXPORT CUresult cuPointerGetAttribute(void* found, CUpointer_attribute, CUdeviceptr address) {
  if (Memory::instance().place_of((void*)address) == Place::PAGEABLE)
    return CUDA_ERROR_INVALID_VALUE;
  *(CUdeviceptr*)found = address;
  return CUDA_SUCCESS;
}

// Virtual memory, for expandable segments: addresses first, then memory mapped into them.

static std::mutex lock;
static std::map<CUmemGenericAllocationHandle, size_t> allocations;  // bytes of each
EXPORT CUresult cuMemGetAllocationGranularity(size_t* n_bytes, const CUmemAllocationProp*,
                                              CUmemAllocationGranularity_flags) {
  *n_bytes = 2 << 20;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* start, size_t n_bytes, size_t, CUdeviceptr,
                                    unsigned long long) {
  void* found = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *start = (CUdeviceptr)found;
  return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr start, size_t n_bytes) {
  munmap((void*)start, n_bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t n_bytes,
                            const CUmemAllocationProp*, unsigned long long) {
  if (!Memory::instance().take(n_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  give_handle(handle);
  std::lock_guard<std::mutex> guard(lock);
  allocations[*handle] = n_bytes;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = allocations.find(handle);
  if (found == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  Memory::instance().give_back(found->second);
  allocations.erase(found);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr start, size_t n_bytes, size_t, CUmemGenericAllocationHandle,
                         unsigned long long) {
  Memory::instance().note((void*)start, n_bytes, Place::DEVICE);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr start, size_t n_bytes) {
  for (size_t offset = 0; offset < n_bytes; offset += 2 << 20)  // each was mapped by itself
    Memory::instance().forget((void*)(start + offset), nullptr);
  madvise((void*)start, n_bytes, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}

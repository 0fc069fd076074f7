// What the stubs share: how functions become visible, counters, and settings of the fake device.
//
// Settings are environment variables, read at each use, so that a fork may change them:
//   FAKE_CUDA_DEVICES=1  FAKE_CUDA_CAPABILITY=90  FAKE_CUDA_NAME="NVIDIA H200"  FAKE_CUDA_MB=141000
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

// What a step is judged by; `fake_cuda_count` in runtime.cpp gives them to the cases.
inline std::atomic<long> n_kernels{0};          // launches of torch's own kernels
inline std::atomic<long> n_triton_kernels{0};   // launches of compiled kernels
inline std::atomic<long> n_matmuls{0};          // calls of cuBLAS and cuBLASLt
inline std::atomic<long> n_collectives{0};      // calls of NCCL that send
inline std::atomic<long> n_waits{0};            // calls that make the host wait for the device
inline std::atomic<long> n_pageable_copies{0};  // of those between device and pageable memory

inline const char* text_setting(const char* name, const char* otherwise) {
  const char* found = getenv(name);
  return found ? found : otherwise;
}

inline size_t setting(const char* name, size_t otherwise) {
  const char* found = getenv(name);
  return found ? strtoull(found, nullptr, 10) : otherwise;
}

inline int n_devices() { return setting("FAKE_CUDA_DEVICES", 1); }
inline const char* device_name() { return text_setting("FAKE_CUDA_NAME", "NVIDIA H200"); }
inline int capability() { return setting("FAKE_CUDA_CAPABILITY", 90); }
inline bool is_a100() { return capability() == 80; }

// Limits of sm_80 and sm_90 (CUDA C++ Programming Guide, "Compute Capabilities").
const unsigned WARP_SIZE = 32, BLOCK_THREADS = 1024, BLOCK_REGISTERS = 65536;
const unsigned BLOCK_DEPTH = 64, GRID_WIDTH = 2147483647, GRID_HEIGHT = 65535;
const unsigned SHARED_BYTES = 49152;
inline unsigned optional_shared_bytes() { return is_a100() ? 166912 : 232448; }
inline unsigned multiprocessor_shared_bytes() { return is_a100() ? 167936 : 233472; }
inline unsigned n_multiprocessors() { return is_a100() ? 108 : 132; }

struct Size {
  unsigned x, y, z;
};

// Whether a device of this kind would start a kernel with this grid, block and shared memory.
inline bool can_launch(Size grid, Size block, size_t shared_bytes) {
  bool grid_fits = grid.x && grid.y && grid.z && grid.x <= GRID_WIDTH && grid.y <= GRID_HEIGHT &&
                   grid.z <= GRID_HEIGHT;
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  bool block_fits = threads && threads <= BLOCK_THREADS && block.z <= BLOCK_DEPTH;
  return grid_fits && block_fits && shared_bytes <= optional_shared_bytes();
}

}  // namespace fake

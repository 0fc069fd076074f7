// A log of what the host asks of the device: one line a request, in the order of the host.
//
//   kernel STREAM THREADS NAME          of torch, its libraries, or a compiler
//   matmul STREAM M N K NAME
//   attention STREAM                    a graph of cuDNN
//   copy STREAM BYTES   fill STREAM BYTES
//   record STREAM EVENT   wait STREAM EVENT
//   group   end                         of messages that NCCL sends as one
//   all-gather STREAM BYTES COMMUNICATOR RANKS RANK -1
//       bytes of one rank's part of the larger buffer; so all-reduce, reduce-scatter, broadcast
//   send STREAM BYTES COMMUNICATOR RANKS RANK PEER
//       so recv; all ranks of a communicator call it the same
//   mark TEXT                           by fake_cuda_mark
//
// `fake_cuda_log(PATH)` begins a file, `fake_cuda_log(NULL)` ends it (runtime.cpp).
#pragma once
#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace fake {

inline std::FILE* log_file = nullptr;
inline std::mutex log_lock;

__attribute__((format(printf, 1, 2))) inline void log(const char* format, ...) {
  std::lock_guard<std::mutex> guard(log_lock);
  if (!log_file) return;
  va_list values;
  va_start(values, format);
  vfprintf(log_file, format, values);
  va_end(values);
  fputc('\n', log_file);
}

}  // namespace fake

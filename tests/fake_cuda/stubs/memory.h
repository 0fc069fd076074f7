// Memory of the fake device: host memory, of which only touched pages cost anything.
//
// The table knows every piece that is on the device, page-locked by CUDA, or registered by the
// caller. It counts what is on the device, so that a full device is full.
#pragma once
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>

#include "fake.h"

namespace fake {

enum class Place { PAGEABLE, PAGE_LOCKED, REGISTERED, DEVICE };

class Memory {
 public:
  static Memory& instance() {
    static Memory* memory = new Memory;  // never destroyed: libraries free memory as they unload
    return *memory;
  }

  static size_t total_bytes() { return setting("FAKE_CUDA_MB", 141000) * 1000 * 1000; }
  size_t used_bytes() { return used; }

  // Maps zeros; gives null where they do not fit.
  void* allocate(size_t n_bytes, Place place) {
    bool on_device = place == Place::DEVICE;
    if (on_device && !take(n_bytes)) return nullptr;
    void* start = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    note(start, n_bytes, place);
    return start;
  }

  // Gives false for what was not allocated here.
  bool release(void* start) {
    size_t n_bytes = 0;
    Place place = forget(start, &n_bytes);
    if (place == Place::DEVICE) give_back(n_bytes);
    if (place == Place::DEVICE || place == Place::PAGE_LOCKED) munmap(start, n_bytes);
    return place != Place::PAGEABLE;
  }

  // Counts bytes as in use; gives false where they do not fit.
  bool take(size_t n_bytes) {
    std::lock_guard<std::mutex> guard(lock);
    if (used + n_bytes > total_bytes()) return false;
    used += n_bytes;
    return true;
  }

  void give_back(size_t n_bytes) {
    std::lock_guard<std::mutex> guard(lock);
    used -= n_bytes;
  }

  void note(const void* start, size_t n_bytes, Place place) {
    std::lock_guard<std::mutex> guard(lock);
    pieces[(uintptr_t)start] = {n_bytes, place};
  }

  // Gives where the piece was.
  Place forget(const void* start, size_t* n_bytes) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = pieces.find((uintptr_t)start);
    if (found == pieces.end()) return Place::PAGEABLE;
    Piece piece = found->second;
    pieces.erase(found);
    if (n_bytes) *n_bytes = piece.n_bytes;
    return piece.place;
  }

  Place place_of(const void* address) {
    std::lock_guard<std::mutex> guard(lock);
    auto next = pieces.upper_bound((uintptr_t)address);
    if (next == pieces.begin()) return Place::PAGEABLE;
    auto& [start, piece] = *std::prev(next);
    return (uintptr_t)address < start + piece.n_bytes ? piece.place : Place::PAGEABLE;
  }

 private:
  struct Piece {
    size_t n_bytes;
    Place place;
  };
  std::mutex lock;
  std::map<uintptr_t, Piece> pieces;  // by address
  size_t used = 0;
};

// Copies up to FAKE_CUDA_COPY_LIMIT bytes; more is left out, so that large tensors cost no memory.
inline void copy(void* to, const void* from, size_t n_bytes) {
  static const size_t limit = setting("FAKE_CUDA_COPY_LIMIT", 1 << 20);
  if (n_bytes <= limit) memmove(to, from, n_bytes);
}

// Fills; whole pages of zeros are given back to the system instead.
inline void fill(void* start, int value, size_t n_bytes) {
  const uintptr_t PAGE = 4096;
  uintptr_t begin = (uintptr_t)start, end = begin + n_bytes;
  uintptr_t first_page = (begin + PAGE - 1) & ~(PAGE - 1), last_page = end & ~(PAGE - 1);
  if (value || last_page <= first_page) {
    memset(start, value, n_bytes);
    return;
  }
  memset(start, 0, first_page - begin);
  madvise((void*)first_page, last_page - first_page, MADV_DONTNEED);
  memset((void*)last_page, 0, end - last_page);
}

}  // namespace fake

// Stands for NCCL: communicators without a network; collectives are counted and move nothing.
//
// What a rank receives is what was in its memory. One number is received as 1: so peers that agree
// by a message agree.
#include <cstring>
#include <unistd.h>

#include "fake.h"
#include "log.h"

typedef int Result;
static const Result SUCCESS = 0;
static const int INT32 = 2, INT64 = 4, FP32 = 7;  // ncclDataType_t

struct UniqueId {
  char bytes[128];
};
struct Communicator {
  int n_ranks, rank;
  uint64_t id;  // the same on all its ranks
};
static Communicator* make_communicator(int n_ranks, int rank, const UniqueId& id) {
  Communicator* made = new Communicator{n_ranks, rank, 0};
  memcpy(&made->id, id.bytes, sizeof made->id);
  return made;
}

// Bytes of a value, by ncclDataType_t.
static size_t bytes_of(int type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return bytes[type];
}

static Result count(const char* kind, size_t n, int type, Communicator* communicator, void* stream,
                    int peer = -1) {
  fake::n_collectives++;
  size_t n_bytes = n * bytes_of(type);
  fake::log("%s %p %zu %lx %d %d %d", kind, stream, n_bytes, communicator->id,
            communicator->n_ranks, communicator->rank, peer);
  return SUCCESS;
}

EXPORT Result ncclGetVersion(int* version) {
  *version = 22907;
  return SUCCESS;
}
EXPORT const char* ncclGetErrorString(Result) { return "error of the fake NCCL"; }
EXPORT const char* ncclGetLastError(void*) { return "error of the fake NCCL"; }
EXPORT Result ncclGetUniqueId(UniqueId* id) {
  static std::atomic<uint32_t> n_made{0};
  uint64_t number = ((uint64_t)getpid() << 32) + ++n_made;
  memset(id, 7, sizeof *id);
  memcpy(id->bytes, &number, sizeof number);
  return SUCCESS;
}

EXPORT Result ncclCommInitRankConfig(Communicator** made, int n_ranks, UniqueId id, int rank,
                                     void*) {
  *made = make_communicator(n_ranks, rank, id);
  return SUCCESS;
}
EXPORT Result ncclCommInitRank(Communicator** made, int n_ranks, UniqueId id, int rank) {
  return ncclCommInitRankConfig(made, n_ranks, id, rank, nullptr);
}
EXPORT Result ncclCommInitRankScalable(Communicator** made, int n_ranks, int rank, int,
                                       UniqueId* ids, void*) {
  *made = make_communicator(n_ranks, rank, ids[0]);
  return SUCCESS;
}
EXPORT Result ncclCommCount(const Communicator* communicator, int* n_ranks) {
  *n_ranks = communicator->n_ranks;
  return SUCCESS;
}
EXPORT Result ncclCommUserRank(const Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return SUCCESS;
}
EXPORT Result ncclCommCuDevice(const Communicator*, int* device) {
  *device = 0;
  return SUCCESS;
}
EXPORT Result ncclCommGetAsyncError(Communicator*, Result* error) {
  *error = SUCCESS;
  return SUCCESS;
}
EXPORT Result ncclCommRegister(const Communicator*, void*, size_t, void** handle) {
  *handle = (void*)0x10;
  return SUCCESS;
}
EXPORT Result ncclMemAlloc(void** start, size_t n_bytes) {
  *start = malloc(n_bytes);
  return SUCCESS;
}
EXPORT Result ncclMemFree(void* start) {
  free(start);
  return SUCCESS;
}
EXPORT Result ncclRedOpCreatePreMulSum(int* operation, void*, int, int, void*) {
  *operation = 5;
  return SUCCESS;
}

EXPORT Result ncclGroupStart() {
  fake::log("group");
  return SUCCESS;
}
EXPORT Result ncclGroupEnd() {
  fake::log("end");
  return SUCCESS;
}
EXPORT Result ncclAllReduce(const void*, void*, size_t n, int type, int, Communicator* communicator,
                            void* stream) {
  return count("all-reduce", n, type, communicator, stream);
}
EXPORT Result ncclBroadcast(const void*, void*, size_t n, int type, int, Communicator* communicator,
                            void* stream) {
  return count("broadcast", n, type, communicator, stream);
}
EXPORT Result ncclBcast(void*, size_t n, int type, int, Communicator* communicator, void* stream) {
  return count("broadcast", n, type, communicator, stream);
}
EXPORT Result ncclReduce(const void*, void*, size_t n, int type, int, int,
                         Communicator* communicator, void* stream) {
  return count("reduce", n, type, communicator, stream);
}
EXPORT Result ncclAllGather(const void*, void*, size_t n, int type, Communicator* communicator,
                            void* stream) {
  return count("all-gather", n, type, communicator, stream);
}
EXPORT Result ncclReduceScatter(const void*, void*, size_t n, int type, int,
                                Communicator* communicator, void* stream) {
  return count("reduce-scatter", n, type, communicator, stream);
}
EXPORT Result ncclAlltoAll(const void*, void*, size_t n, int type, Communicator* communicator,
                           void* stream) {
  return count("all-to-all", n, type, communicator, stream);
}
EXPORT Result ncclSend(const void*, size_t n, int type, int peer, Communicator* communicator,
                       void* stream) {
  return count("send", n, type, communicator, stream, peer);
}
EXPORT Result ncclRecv(void* start, size_t n, int type, int peer, Communicator* communicator,
                       void* stream) {
  if (n == 1 && type == INT32) *(int32_t*)start = 1;
  if (n == 1 && type == INT64) *(int64_t*)start = 1;
  if (n == 1 && type == FP32) *(float*)start = 1;
  return count("recv", n, type, communicator, stream, peer);
}

// Stands for NCCL: communicators without a network; collectives are counted and move nothing.
//
// What a rank receives is what was in its memory. One number is received as 1: so peers that agree
// by a message agree.
#include <cstring>

#include "fake.h"

typedef int Result;
static const Result SUCCESS = 0;
static const int INT32 = 2, INT64 = 4, FP32 = 7;  // ncclDataType_t

struct Communicator {
  int n_ranks, rank;
};
struct UniqueId {
  char bytes[128];
};

static Result count() {
  fake::n_collectives++;
  return SUCCESS;
}

EXPORT Result ncclGetVersion(int* version) {
  *version = 22907;
  return SUCCESS;
}
EXPORT const char* ncclGetErrorString(Result) { return "error of the fake NCCL"; }
EXPORT const char* ncclGetLastError(void*) { return "error of the fake NCCL"; }
EXPORT Result ncclGetUniqueId(UniqueId* id) {
  memset(id, 7, sizeof *id);
  return SUCCESS;
}

EXPORT Result ncclCommInitRankConfig(Communicator** made, int n_ranks, UniqueId, int rank, void*) {
  *made = new Communicator{n_ranks, rank};
  return SUCCESS;
}
EXPORT Result ncclCommInitRank(Communicator** made, int n_ranks, UniqueId id, int rank) {
  return ncclCommInitRankConfig(made, n_ranks, id, rank, nullptr);
}
EXPORT Result ncclCommInitRankScalable(Communicator** made, int n_ranks, int rank, int, UniqueId*,
                                       void*) {
  *made = new Communicator{n_ranks, rank};
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

EXPORT Result ncclAllReduce() { return count(); }
EXPORT Result ncclBroadcast() { return count(); }
EXPORT Result ncclBcast() { return count(); }
EXPORT Result ncclReduce() { return count(); }
EXPORT Result ncclAllGather() { return count(); }
EXPORT Result ncclReduceScatter() { return count(); }
EXPORT Result ncclAlltoAll() { return count(); }
EXPORT Result ncclSend() { return count(); }
EXPORT Result ncclRecv(void* start, size_t n, int type, int, Communicator*, void*) {
  if (n == 1 && type == INT32) *(int32_t*)start = 1;
  if (n == 1 && type == INT64) *(int64_t*)start = 1;
  if (n == 1 && type == FP32) *(float*)start = 1;
  return count();
}

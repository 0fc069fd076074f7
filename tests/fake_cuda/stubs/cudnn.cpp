// Stands for cuDNN, whose attention is a graph that one engine runs: it is counted, computes nothing
// and needs no workspace. FAKE_CUDNN_VERSION below torch's own makes torch refuse it.
#include "fake.h"
#include "log.h"

typedef int Status;
static const Status SUCCESS = 0;
static const int INT64 = 3, BACKEND_DESCRIPTOR = 15, INT32 = 23;  // cudnnBackendAttributeType_t

EXPORT size_t cudnnGetVersion() { return fake::setting("FAKE_CUDNN_VERSION", 92400); }
EXPORT size_t cudnnGetCudartVersion() { return 13000; }
EXPORT Status cudnnGetProperty(int part, int* value) {
  size_t version = cudnnGetVersion();
  *value = part == 0 ? version / 10000 : part == 1 ? version / 100 % 100 : version % 100;
  return SUCCESS;
}
EXPORT const char* cudnnGetErrorString(Status status) {
  return status == SUCCESS ? "success" : "not supported";
}
EXPORT void cudnnGetLastErrorString(char* text, size_t size) {
  if (size) *text = 0;
}
EXPORT Status cudnnCreate(void** handle) {
  *handle = malloc(64);
  return SUCCESS;
}
EXPORT Status cudnnDestroy(void* handle) {
  free(handle);
  return SUCCESS;
}
EXPORT Status cudnnSetStream(void* handle, void* stream) {
  *(void**)handle = stream;
  return SUCCESS;
}
EXPORT Status cudnnGetStream(void*, void** stream) {
  *stream = nullptr;
  return SUCCESS;
}
EXPORT Status cudnnBackendCreateDescriptor(int, void** descriptor) {
  *descriptor = malloc(64);
  return SUCCESS;
}
EXPORT Status cudnnBackendDestroyDescriptor(void* descriptor) {
  free(descriptor);
  return SUCCESS;
}
EXPORT Status cudnnBackendFinalize(void*) { return SUCCESS; }
EXPORT Status cudnnBackendSetAttribute(void*, int, int, int64_t, const void*) { return SUCCESS; }
// One engine, without notes or knobs; sizes are 0.
EXPORT Status cudnnBackendGetAttribute(void*, int, int type, int64_t most, int64_t* n,
                                       void* values) {
  if (type == INT64 && values && most > 0) *(int64_t*)values = 0;
  if (type == INT32 && values && most > 0) *(int32_t*)values = 0;
  if (n) *n = type == INT64 || type == INT32 || type == BACKEND_DESCRIPTOR;
  return SUCCESS;
}
EXPORT Status cudnnBackendExecute(void* handle, void*, void*) {
  fake::n_matmuls++;
  fake::log("attention %p", *(void**)handle);
  return SUCCESS;
}

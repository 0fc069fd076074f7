// Stands for cuBLAS and cuBLASLt: matmuls are counted and compute nothing.
//
// fp8 matmuls are refused where cuBLASLt would refuse them ("cublasLtMatmul()", requirements of
// FP8 kernels): both types must be fp8 and not both e5m2, A transposed and B not, dimensions and
// leading dimensions multiples of 16, addresses multiples of 16 bytes.
//
// The few types are declared here, so that 630 MB of NVIDIA's packages are not needed.
#include <cstring>
#include <initializer_list>

#include "fake.h"
#include "log.h"

typedef int Status;
static const Status SUCCESS = 0, NOT_SUPPORTED = 15;
static const int VERSION = 130101;

// A handle holds its stream.
static Status make_handle(void** handle) {
  *handle = calloc(1, 64);
  return SUCCESS;
}

EXPORT Status cublasCreate_v2(void** handle) { return make_handle(handle); }
EXPORT Status cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return SUCCESS;
}
EXPORT Status cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return SUCCESS;
}
EXPORT Status cublasSetStream_v2(void* handle, void* stream) {
  *(void**)handle = stream;
  return SUCCESS;
}
EXPORT Status cublasGetStream_v2(void* handle, void** stream) {
  *stream = *(void**)handle;
  return SUCCESS;
}
EXPORT Status cublasGetVersion_v2(void*, int* version) {
  *version = VERSION;
  return SUCCESS;
}
EXPORT const char* cublasGetStatusString(Status status) {
  return status == NOT_SUPPORTED ? "not supported" : "success";
}
// Of all matmuls of cuBLAS, whose functions build.py writes.
EXPORT long fake_cuda_count_matmul(void* handle, int m, int n, int k, const char* name) {
  fake::n_matmuls++;
  fake::log("matmul %p %d %d %d %s", *(void**)handle, m, n, k, name);
  return SUCCESS;
}

// cuBLASLt: descriptors of a matmul and of its matrices.

struct Matmul {
  bool transposes_a = false, transposes_b = false;
};
struct Matrix {
  int type;
  uint64_t rows, columns;
  int64_t leading;
};
struct Algorithm {
  uint64_t bits[8];
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};
static const int TRANSPOSES_A = 3, TRANSPOSES_B = 4;  // cublasLtMatmulDescAttributes_t
static const int E4M3 = 28, E5M2 = 29;                // cudaDataType
static const uint64_t FP8_MULTIPLE = 16;

EXPORT size_t cublasLtGetVersion() { return VERSION; }
EXPORT size_t cublasLtGetCudartVersion() { return 13000; }
EXPORT const char* cublasLtGetStatusString(Status status) { return cublasGetStatusString(status); }
EXPORT Status cublasLtCreate(void** handle) { return make_handle(handle); }
EXPORT Status cublasLtMatmulPreferenceCreate(void** preference) { return make_handle(preference); }
EXPORT Status cublasLtMatmulPreferenceDestroy(void* preference) {
  free(preference);
  return SUCCESS;
}
EXPORT Status cublasLtMatmulDescCreate(Matmul** matmul, int, int) {
  *matmul = new Matmul;
  return SUCCESS;
}
EXPORT Status cublasLtMatmulDescDestroy(Matmul* matmul) {
  delete matmul;
  return SUCCESS;
}
EXPORT Status cublasLtMatmulDescSetAttribute(Matmul* matmul, int attribute, const void* value,
                                             size_t) {
  if (attribute == TRANSPOSES_A) matmul->transposes_a = *(const int*)value;
  if (attribute == TRANSPOSES_B) matmul->transposes_b = *(const int*)value;
  return SUCCESS;
}
EXPORT Status cublasLtMatrixLayoutCreate(Matrix** matrix, int type, uint64_t rows, uint64_t columns,
                                         int64_t leading) {
  *matrix = new Matrix{type, rows, columns, leading};
  return SUCCESS;
}
EXPORT Status cublasLtMatrixLayoutDestroy(Matrix* matrix) {
  delete matrix;
  return SUCCESS;
}

static bool is_fp8(const Matrix* matrix) { return matrix->type == E4M3 || matrix->type == E5M2; }

static Status judge(const Matmul* matmul, const Matrix* a, const Matrix* b, const Matrix* c) {
  if (!is_fp8(a) && !is_fp8(b)) return SUCCESS;
  bool types_fit = is_fp8(a) && is_fp8(b) && !(a->type == E5M2 && b->type == E5M2);
  if (!types_fit || !matmul->transposes_a || matmul->transposes_b) return NOT_SUPPORTED;
  for (const Matrix* each : {a, b, c})
    if (each->rows % FP8_MULTIPLE || each->columns % FP8_MULTIPLE || each->leading % FP8_MULTIPLE)
      return NOT_SUPPORTED;
  return SUCCESS;
}
EXPORT Status cublasLtMatmulAlgoGetHeuristic(void*, Matmul* matmul, Matrix* a, Matrix* b, Matrix* c,
                                             Matrix*, void*, int, Algorithm* found, int* n_found) {
  memset(found, 0, sizeof *found);
  Status status = judge(matmul, a, b, c);
  *n_found = status == SUCCESS;
  return status;
}
EXPORT Status cublasLtMatmul(void*, Matmul* matmul, const void*, const void* a_start, Matrix* a,
                             const void* b_start, Matrix* b, const void*, const void*, Matrix* c,
                             void* d_start, Matrix*, const void*, void*, size_t, void* stream) {
  fake::n_matmuls++;
  uint64_t inner = a->rows * a->columns / c->rows;
  fake::log("matmul %p %zu %zu %zu %s", stream, (size_t)c->rows, (size_t)c->columns, (size_t)inner,
            is_fp8(a) ? "cublasLt fp8" : "cublasLt");
  uintptr_t addresses = (uintptr_t)a_start | (uintptr_t)b_start | (uintptr_t)d_start;
  bool is_misaligned = (is_fp8(a) || is_fp8(b)) && addresses % FP8_MULTIPLE;
  return is_misaligned ? NOT_SUPPORTED : judge(matmul, a, b, c);
}

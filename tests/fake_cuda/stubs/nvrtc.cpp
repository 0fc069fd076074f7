// Stands for NVRTC, with which torch compiles a few kernels at their first call, such as exp2 and
// gcd: every program compiles, to nothing.
#include "fake.h"

typedef int Result;
static const Result SUCCESS = 0;

EXPORT Result nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return SUCCESS;
}
EXPORT Result nvrtcGetNumSupportedArchs(int* count) {
  *count = 2;
  return SUCCESS;
}
EXPORT Result nvrtcGetSupportedArchs(int* capabilities) {
  capabilities[0] = 80;
  capabilities[1] = 90;
  return SUCCESS;
}
EXPORT Result nvrtcCreateProgram(void** program) {
  *program = (void*)0x10;
  return SUCCESS;
}
EXPORT Result nvrtcCompileProgram() { return SUCCESS; }
EXPORT Result nvrtcDestroyProgram(void** program) {
  *program = nullptr;
  return SUCCESS;
}
EXPORT Result nvrtcAddNameExpression() { return SUCCESS; }
EXPORT Result nvrtcGetLoweredName(void*, const char*, const char** name) {
  *name = "kernel";
  return SUCCESS;
}
EXPORT const char* nvrtcGetErrorString(Result) { return "error of the fake NVRTC"; }

// Every text is empty: one byte, its end.

static Result measure(size_t* n_bytes) {
  *n_bytes = 1;
  return SUCCESS;
}
static Result write(char* text) {
  *text = 0;
  return SUCCESS;
}
EXPORT Result nvrtcGetPTXSize(void*, size_t* n_bytes) { return measure(n_bytes); }
EXPORT Result nvrtcGetPTX(void*, char* text) { return write(text); }
EXPORT Result nvrtcGetCUBINSize(void*, size_t* n_bytes) { return measure(n_bytes); }
EXPORT Result nvrtcGetCUBIN(void*, char* text) { return write(text); }
EXPORT Result nvrtcGetProgramLogSize(void*, size_t* n_bytes) { return measure(n_bytes); }
EXPORT Result nvrtcGetProgramLog(void*, char* text) { return write(text); }

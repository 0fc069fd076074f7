// Stands for NVML (libnvidia-ml), which torch asks about links when it makes expandable segments
// and when memory runs out. There are no links, and no other process.
#include "fake.h"

static const int SUCCESS = 0, NOT_SUPPORTED = 3;

EXPORT int nvmlInit_v2() { return SUCCESS; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = (void*)0x10;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* n_processes, void*) {
  *n_processes = 0;
  return SUCCESS;
}
struct FabricInfo {  // nvmlGpuFabricInfo_v2_t
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;  // 0: there is no fabric
};
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, FabricInfo* found) {
  found->state = 0;
  return SUCCESS;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }

// NVML (libnvidia-ml), which Ray, vLLM, torch and our nvidia-smi ask for cards, memory and processes; cuBLAS and cuDNN.
//
// NVML lists all cards of the machine, whatever CUDA_VISIBLE_DEVICES is. A handle is the card's number + 1. The results
// are 0 success, 2 invalid argument, 3 not supported, 6 not found, 7 insufficient size.
#include "cards.h"

typedef unsigned N;
static int card(void* handle) { return (int)(uintptr_t)handle - 1; }
static N give(void** handle, long card) { return card < 0 || card >= n_cards() ? 6 : (*handle = (void*)(card + 1), 0); }
static N give(char* out, unsigned n, const std::string& text) { return snprintf(out, n, "%s", text.c_str()), 0; }
static N give(int* out, int value) { return *out = value, 0; }

// ---- The machine
API N nvmlInit_v2() { return 0; }
ALSO(nvmlInitWithFlags, nvmlInit_v2) ALSO(nvmlShutdown, nvmlInit_v2)
API N nvmlSystemGetCudaDriverVersion_v2(int* version) { return give(version, 13000); }
API N nvmlDeviceGetCount_v2(int* n) { return give(n, n_cards()); }
API N nvmlDeviceGetHandleByIndex_v2(unsigned i, void** handle) { return give(handle, i) ? 2 : 0; }
API N nvmlDeviceGetHandleByPciBusId_v2(const char* text, void** handle) {
  unsigned bus = 0; return sscanf(text, "%*x:%x", &bus), give(handle, (long)bus - FIRST_BUS);
}

// ---- A card
API N nvmlDeviceGetName(void*, char* out, unsigned n) { return give(out, n, CARD_NAME); }
API N nvmlDeviceGetUUID(void* handle, char* out, unsigned n) { return give(out, n, uuid_text(card(handle))); }
API N nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) { return give(major, 9), give(minor, 0); }
API N nvmlDeviceGetP2PStatus(void*, void*, int, int* status) { return give(status, 0); }
struct Memory { long total, free, used; };
API N nvmlDeviceGetMemoryInfo(void* handle, Memory* out) {
  long used = used_bytes(card(handle)); return *out = {card_bytes(), card_bytes() - used, used}, 0;
}
struct Process { unsigned pid; long used; };
API N nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* n, Process* out) {
  unsigned room = std::exchange(*n, 0);
  for (Row& row : rows()) {
    if (!alive(row) || row.used[card(handle)] <= 0) continue;
    if (*n < room) out[*n] = {(unsigned)row.pid, row.used[card(handle)]};
    ++*n;
  }
  return *n > room ? 7 : 0;
}
API N nvmlDeviceGetNvLinkRemoteDeviceType() { return 3; }
ALSO(nvmlDeviceGetNvLinkRemotePciInfo_v2, nvmlDeviceGetNvLinkRemoteDeviceType)

// ---- cuBLAS and cuDNN: the calls whose results torch reads. The others are stubs; values.cpp writes the products.
API int cublasCreate_v2(void** handle) { *handle = (void*)8; return 0; }
ALSO(cublasLtCreate, cublasCreate_v2) ALSO(cudnnCreate, cublasCreate_v2)
API int cublasGetMathMode(void*, int* mode) { return give(mode, 0); }
ALSO(cublasGetPointerMode_v2, cublasGetMathMode)
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, char* out, int* n) {
  return memset(out, 0, 64), give(n, 1);
}

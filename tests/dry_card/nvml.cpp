// NVML (libnvidia-ml), which Ray, vLLM, torch and our nvidia-smi ask for cards, memory and processes.
//
// It lists all cards of the machine, whatever CUDA_VISIBLE_DEVICES is. A handle is the card's number + 1. The results
// are 0 success, 2 invalid argument, 6 not found, 7 insufficient size.
#include "cards.h"

typedef unsigned N;
static int card(void* handle) { return (int)(uintptr_t)handle - 1; }
static N give(char* out, unsigned n, const std::string& text) { return snprintf(out, n, "%s", text.c_str()), 0; }
static N find(void** handle, long card, N error) {
  return card < 0 || card >= n_cards() ? error : (*handle = (void*)(card + 1), 0);
}
API N nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }
API N nvmlDeviceGetCount_v2(int* n) { *n = n_cards(); return 0; }
API N nvmlDeviceGetHandleByIndex_v2(unsigned i, void** handle) { return find(handle, i, 2); }
API N nvmlDeviceGetHandleByPciBusId_v2(const char* text, void** handle) {
  unsigned bus = 0; return sscanf(text, "%*x:%x", &bus), find(handle, (long)bus - FIRST_BUS, 6);
}
API N nvmlDeviceGetName(void*, char* out, unsigned n) { return give(out, n, CARD_NAME); }
API N nvmlDeviceGetUUID(void* handle, char* out, unsigned n) { return give(out, n, uuid_text(card(handle))); }
API N nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) { *major = 9, *minor = 0; return 0; }
API N nvmlDeviceGetP2PStatus(void*, void*, int, int* status) { *status = 0; return 0; }
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

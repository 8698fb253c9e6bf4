// The CUDA driver as torch, vLLM's sleep mode and Triton use it (libcuda), with the ways in which programs find calls,
// and as Ray, vLLM and nvidia-smi ask it for cards, memory and processes (libnvidia-ml, NVML).
//
// Its error codes have the runtime's numbers. An unknown call succeeds without an effect.
#include "cards.h"

#include <cuda.h>
#include <dlfcn.h>

typedef CUresult R;
static const R OK = CUDA_SUCCESS;
static CUcontext context(int device) { return (CUcontext)(uintptr_t)(device + 1); }

// ---- Devices and contexts
API R cuDriverGetVersion(int* version) { *version = CUDA_VERSION; return OK; }
ALSO(cudaDriverGetVersion, cuDriverGetVersion) ALSO(cudaRuntimeGetVersion, cuDriverGetVersion)
API R cuDeviceGet(CUdevice* out, int device) { *out = device; return OK; }
API R cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) { *out = context(device); return (R)ready(); }
API R cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return *flags = 0, *active = has_context[visible()[device]], OK;
}
API R cuCtxGetCurrent(CUcontext* out) { *out = initialized ? context(current) : nullptr; return OK; }
API R cuCtxSetCurrent(CUcontext in) { current = in ? (int)(uintptr_t)in - 1 : current; return OK; }
extern "C" const char* cudaGetErrorString(R);
API R cuGetErrorString(R error, const char** text) { *text = cudaGetErrorString(error); return OK; }

// Handles of modules and functions are never read; a launch does nothing.
API R cuFuncGetAttribute(int* value, CUfunction_attribute name, CUfunction) {
  *value = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : name == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return OK;
}

// ---- Memory: addresses are reserved, and memory is mapped to them (expandable segments; vLLM's sleep mode).
// The handle of memory is a Block.
API R cuMemGetAllocationGranularity(size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *n = PAGE, OK;
}
API R cuMemAddressReserve(CUdeviceptr* out, size_t n, size_t, CUdeviceptr, unsigned long long) {
  return *out = (CUdeviceptr)new_addresses(n), (R)ready();
}
API R cuMemCreate(CUmemGenericAllocationHandle* out, size_t n, const CUmemAllocationProp* wanted, unsigned long long) {
  TRY((R)ready()); int device = wanted->location.id;
  if (charge(device, n)) return last_error = cudaSuccess, CUDA_ERROR_OUT_OF_MEMORY;  // not an error of the runtime
  return *out = (CUmemGenericAllocationHandle) new Block{(long)n, device, new_memory(n), MAPPED}, OK;
}
API R cuMemRelease(CUmemGenericAllocationHandle handle) {
  auto* memory = (Block*)handle;
  close(memory->fd);  // a mapping stays valid
  return (R)charge(memory->device, -memory->size);
}
API R cuMemMap(CUdeviceptr at, size_t n, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  auto* memory = (Block*)handle; LOCK;
  map_memory(n, memory->fd, (void*)at, offset), blocks[at] = {(long)n, memory->device, -1, MAPPED}; return OK;
}
API R cuMemUnmap(CUdeviceptr at, size_t n) {
  LOCK; unmap_memory((void*)at, n), blocks.erase(blocks.lower_bound(at), blocks.lower_bound(at + n));
  return OK;
}
API R cuPointerGetAttribute(void* out, CUpointer_attribute name, CUdeviceptr p) {
  LOCK; bool known = name == CU_POINTER_ATTRIBUTE_DEVICE_POINTER && block_of((void*)p) != blocks.end();
  return known ? *(CUdeviceptr*)out = p, OK : CUDA_ERROR_INVALID_VALUE;
}

// ---- How programs find a call. LD_PRELOAD makes this library the first
static R no_effect() { return OK; }
API R cuGetProcAddress_v2(const char* name, void** out, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  *out = dlsym(RTLD_DEFAULT, name);
  if (!*out) dry_card_note((std::string(name) + " (unknown driver call)").c_str()), *out = (void*)no_effect;
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return OK;
}
API R cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long, int* result) {
  if (result) *result = cudaDriverEntryPointSuccess;
  return cuGetProcAddress_v2(name, out, 0, 0, nullptr);
}

// ---- NVML lists all cards of the machine, whatever CUDA_VISIBLE_DEVICES is. A handle is the card's number + 1. The
// results are 0 success, 2 invalid argument, 6 not found, 7 insufficient size.
typedef unsigned N;
static int card(void* handle) { return (int)(uintptr_t)handle - 1; }
static N give(char* out, unsigned n, const std::string& text) { return snprintf(out, n, "%s", text.c_str()), 0; }
static N find(void** handle, long card, N error) {
  return card < 0 || card >= n_cards() ? error : (*handle = (void*)(card + 1), 0);
}
API N nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = CUDA_VERSION; return 0; }
API N nvmlDeviceGetCount_v2(int* n) { *n = n_cards(); return 0; }
API N nvmlDeviceGetHandleByIndex_v2(unsigned i, void** handle) { return find(handle, i, 2); }
API N nvmlDeviceGetHandleByPciBusId_v2(const char* text, void** handle) {
  unsigned bus = 0; return sscanf(text, "%*x:%x", &bus), find(handle, (long)bus - FIRST_BUS, 6);
}
API N nvmlDeviceGetName(void*, char* out, unsigned n) { return give(out, n, CARD_NAME); }
API N nvmlDeviceGetUUID(void* handle, char* out, unsigned n) { return give(out, n, uuid_text(card(handle))); }
API N nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) { *major = 9, *minor = 0; return 0; }
struct Memory { long total, free, used; };
API N nvmlDeviceGetMemoryInfo(void* handle, Memory* out) {
  long used = used_bytes(card(handle)); return *out = {card_bytes(), card_bytes() - used, used}, 0;
}
struct Process { unsigned pid; long used; };
API N nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* n, Process* out) {
  unsigned room = std::exchange(*n, 0);
  for (auto [pid, used] : users(card(handle))) {
    if ((*n)++ < room) *out++ = {(unsigned)pid, used};
  }
  return *n > room ? 7 : 0;
}

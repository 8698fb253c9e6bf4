// The CUDA driver (libcuda) as torch, vLLM's sleep mode and Triton use it, and the ways in which programs find calls.
//
// Its error codes have the runtime's numbers. An unknown call succeeds without an effect. Not shown: whether the binary
// of a kernel can be loaded, and multicast memory.
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

// ---- Kernels. Handles of modules and functions are never read.
API R cuFuncGetAttribute(int* value, CUfunction_attribute name, CUfunction) {
  *value = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : name == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return OK;
}
static R launch(unsigned x, unsigned y, unsigned z) {
  return x && y && z && y < 65536 && z < 65536 ? (R)ready() : CUDA_ERROR_INVALID_VALUE;
}
API R cuLaunchKernel(CUfunction, unsigned x, unsigned y, unsigned z, unsigned, unsigned, unsigned, unsigned, CUstream,
                     void**, void**) { return launch(x, y, z); }
API R cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction, void**, void**) {
  return launch(c->gridDimX, c->gridDimY, c->gridDimZ);
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

// ---- How programs find a call: by a name that may lack its version. LD_PRELOAD makes this library the first
static R no_effect() { return OK; }
API R cuGetProcAddress_v2(const char* name, void** out, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  *out = nullptr;
  for (const char* version : {"_v4", "_v3", "_v2", ""}) {
    if (!*out) *out = dlsym(RTLD_DEFAULT, (std::string(name) + version).c_str());
  }
  if (!*out) dry_card_note((std::string(name) + " (unknown driver call)").c_str()), *out = (void*)no_effect;
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return OK;
}
API R cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long, int* result) {
  if (result) *result = cudaDriverEntryPointSuccess;
  return cuGetProcAddress_v2(name, out, 0, 0, nullptr);
}

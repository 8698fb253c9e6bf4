// The CUDA runtime (libcudart): devices, memory, streams, events, kernels.
//
// Device memory is host memory. A kernel does nothing; hooks/ writes the results of torch's operations. Copies are made
// at once, or, with DRY_CARD_LATE=1, as late as the waits of the program allow. environment.py makes stubs for calls
// that only have to succeed.
#include "cards.h"

typedef cudaError_t E;
static const E OK = cudaSuccess;

// ---- Devices
static bool exists(int device) { return device >= 0 && device < (int)visible().size(); }
API E cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int device) {
  static const auto& listed = *new std::map<int, int>{  // what torch, vLLM and Triton ask for; any other attribute is 1
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxRegistersPerBlock, 65536}, {cudaDevAttrClockRate, 1980000}, {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrMemoryClockRate, 2619000}, {cudaDevAttrGlobalMemoryBusWidth, 5120}, {cudaDevAttrIntegrated, 0},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0}, {cudaDevAttrComputeMode, 0}};
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  *value = name == cudaDevAttrPciBusId ? FIRST_BUS + visible()[device] : listed.count(name) ? listed.at(name) : 1;
  return OK;
}
ALSO(cuDeviceGetAttribute, cudaDeviceGetAttribute)  // names and error codes have the same numbers
API E cudaGetDeviceCount(int* n) {
  *n = (int)visible().size();
  return forked ? fail(cudaErrorInitializationError) : *n ? OK : fail(cudaErrorNoDevice);
}
API E cudaGetDevice(int* device) { *device = current; return ready(false); }
API E cudaSetDevice(int device) { return exists(device) ? current = device, ready() : fail(cudaErrorInvalidDevice); }
API E cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  TRY(ready(false)); if (!exists(device)) return fail(cudaErrorInvalidDevice); memset(p, 0, sizeof *p);
  strcpy(p->name, CARD_NAME);
  p->uuid = uuid(visible()[device]), p->pciBusID = FIRST_BUS + visible()[device], p->totalGlobalMem = card_bytes();
  p->major = 9, p->multiProcessorCount = 132, p->warpSize = 32, p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535, p->maxBlocksPerMultiProcessor = 32;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472, p->l2CacheSize = 50 * MIB, p->memoryBusWidth = 5120; return OK;
}
API E cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0, *greatest = -5; return OK; }
API E cudaDeviceCanAccessPeer(int* can) { *can = 0; return OK; }  // so vLLM reduces with NCCL, not with kernels
API E cudaDeviceGetPCIBusId(char* text, int n, int device) {
  return snprintf(text, n, "0000:%02x:00.0", FIRST_BUS + visible()[device]), OK;
}
API E cudaGetLastError() { return std::exchange(last_error, OK); }
API E cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorString(E error) {
  static auto& texts = *new std::map<E, std::string>{{OK, "no error"}, {cudaErrorMemoryAllocation, "out of memory"}};
  LOCK; return texts.emplace(error, "CUDA error " + std::to_string(error)).first->second.c_str();
}
ALSO(cudaGetErrorName, cudaGetErrorString)

// ---- Streams and events. A stream is a queue of copies that are not made yet; it is empty unless DRY_CARD_LATE=1.
struct Stream { size_t issued = 0; std::deque<std::function<void()>> late; size_t made() { return issued - late.size(); } };
struct Event { Stream* stream = nullptr; size_t issued = 0; };
static auto& streams = *new std::set<Stream*>;
static Stream* known(void* s) { return streams.count((Stream*)s) ? (Stream*)s : nullptr; }  // not a default stream
static E catch_up(void* stream, size_t until = ~0ul) {  // make the first `until` copies of a stream
  LOCK;
  for (Stream* s = known(stream); s && !s->late.empty() && s->made() < until; s->late.pop_front()) s->late.front()();
  return ready();
}
API void dry_card_use_stream(void* stream) { catch_up(stream); }  // an operation runs on it now
static E copy(void* to, const void* from, size_t n, void* stream) {
  static bool late = setting("LATE"); LOCK; Stream* s = known(stream); launched[COPY]++;
  auto now = [=] { memcpy(to, from, n); };
  s && late ? s->late.push_back(now) : now(); if (s) s->issued++;
  return ready();
}
API E cudaStreamCreate(cudaStream_t* out) {  // never deleted: an event may refer to it
  LOCK; *out = (cudaStream_t)*streams.insert(new Stream).first; return ready();
}
ALSO(cudaStreamCreateWithFlags, cudaStreamCreate) ALSO(cudaStreamCreateWithPriority, cudaStreamCreate)
API E cudaStreamSynchronize(cudaStream_t stream) { return catch_up(stream); }
ALSO(cudaStreamQuery, cudaStreamSynchronize)
API E cudaDeviceSynchronize() { LOCK; for (Stream* s : streams) catch_up(s); return ready(); }
API E cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) { *s = cudaStreamCaptureStatusNone; return OK; }
ALSO(cudaStreamGetCaptureInfo, cudaStreamIsCapturing)
API E cudaEventCreate(cudaEvent_t* event) { *event = (cudaEvent_t) new Event; return ready(); }
ALSO(cudaEventCreateWithFlags, cudaEventCreate) ALSO(cudaIpcOpenEventHandle, cudaEventCreate)
API E cudaEventDestroy(cudaEvent_t event) { delete (Event*)event; return OK; }
API E cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  LOCK; Stream* s = known(stream); *(Event*)event = {s, s ? s->issued : 0};
  return ready();
}
ALSO(cudaEventRecordWithFlags, cudaEventRecord)
API E cudaEventSynchronize(cudaEvent_t event) { return catch_up(((Event*)event)->stream, ((Event*)event)->issued); }
API E cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned) { return cudaEventSynchronize(event); }
API E cudaEventQuery(cudaEvent_t event) {
  LOCK; Stream* s = known(((Event*)event)->stream);
  return s && s->made() < ((Event*)event)->issued ? cudaErrorNotReady : ready();
}
API E cudaEventElapsedTime(float* ms) { *ms = 1; return OK; }  // Triton divides by it

// ---- Device memory
API E cudaMalloc(void** out, size_t n) {
  *out = nullptr; TRY(ready()); if (!n) return OK; TRY(charge(current, pages(n)));
  int fd = new_memory(pages(n)); *out = map_memory(pages(n), fd);
  if (setting("POISON")) memset(*out, 0xff, n);  // NaN in each floating-point type
  LOCK; blocks[(uintptr_t)*out] = {pages(n), current, fd, DEVICE}; return OK;
}
API E cudaFree(void* p) {  // a block of any kind
  LOCK; auto found = blocks.find((uintptr_t)p); if (!p) return ready();
  if (found == blocks.end()) return fail(cudaErrorInvalidValue);
  auto [size, device, fd, kind] = found->second; blocks.erase(found);
  if (kind != REGISTERED) unmap_memory(p, size);
  return kind == DEVICE ? close(fd), charge(device, -size) : OK;
}
ALSO(cudaFreeHost, cudaFree) ALSO(cudaHostUnregister, cudaFree) ALSO(cudaIpcCloseMemHandle, cudaFree)
API E cudaMemGetInfo(size_t* free, size_t* total) {
  TRY(ready()); *total = card_bytes(), *free = std::max(0l, card_bytes() - used_bytes(visible()[current]));
  return OK;
}
API E cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  LOCK; auto found = block_of(p); bool known = found != blocks.end(), host = !known || found->second.kind <= REGISTERED;
  auto type = !known ? cudaMemoryTypeUnregistered : host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  int device = known ? found->second.device : cudaInvalidDeviceId;
  *out = {type, device, known ? (void*)p : nullptr, host ? (void*)p : nullptr}; return ready(false);
}
API E cudaMemcpy(void* to, void* from, size_t n) { return copy(to, from, n, nullptr); }
API E cudaMemcpyAsync(void* to, void* from, size_t n, int, void* stream) { return copy(to, from, n, stream); }
API E cudaMemcpyPeerAsync(void* to, int, void* from, int, size_t n, void* stream) { return copy(to, from, n, stream); }
API E cudaMemsetAsync(void* to, int value, size_t n, void* stream) {
  TRY(catch_up(stream)); launched[FILL]++; return memset(to, value, n), OK;
}
API E cudaMemset(void* to, int value, size_t n) { return cudaMemsetAsync(to, value, n, nullptr); }

// ---- Page-locked host memory
static E pin(void* p, long n, Kind kind) {
  LOCK; TRY(ready());
  if (block_of(p) != blocks.end()) return fail(cudaErrorHostMemoryAlreadyRegistered);
  blocks[(uintptr_t)p] = {n, current, -1, kind}; return OK;
}
API E cudaHostRegister(void* p, size_t n) { return n && p ? pin(p, n, REGISTERED) : fail(cudaErrorInvalidValue); }
API E cudaHostAlloc(void** out, size_t n) {
  *out = mmap(nullptr, n = std::max(n, 1ul), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  E error = *out == MAP_FAILED ? fail(cudaErrorMemoryAllocation) : pin(*out, n, PINNED);
  if (error) munmap(*out, n);
  return error;
}
API E cudaHostGetDevicePointer(void** out, void* p) { *out = p; return OK; }

// ---- CUDA IPC: the handle names a file descriptor of the process that owns the memory
union Handle { struct { int pid, fd; long size; } memory; cudaIpcMemHandle_t bytes; };
API E cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* p) {
  LOCK; auto found = block_of(p);
  if (found == blocks.end() || found->second.kind != DEVICE) return fail(cudaErrorInvalidValue);  // as for cuMemMap
  Handle handle{{getpid(), found->second.fd, found->second.size}}; return *out = handle.bytes, OK;
}
API E cudaIpcOpenMemHandle(void** out, Handle handle, unsigned) {
  TRY(ready()); auto [pid, from, size] = handle.memory;
  if (pid == getpid()) return fail(cudaErrorDeviceUninitialized);  // as CUDA does
  int fd = open(("/proc/" + std::to_string(pid) + "/fd/" + std::to_string(from)).c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return fail(cudaErrorInvalidValue);
  *out = map_memory(size, fd), close(fd); LOCK; blocks[(uintptr_t)*out] = {size, current, -1, FOREIGN};
  return OK;
}

// ---- Kernels: `kernel<<<grid, block>>>(...)` compiles to this call, and to a launch if its result is 0
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block) {
  bool good = grid.x && grid.y && grid.z && grid.y < 65536 && grid.z < 65536 && block.x * block.y * block.z - 1 < 1024;
  launched[KERNEL]++; return good ? ready() : fail(cudaErrorInvalidConfiguration), 1;
}
API E cudaLaunchKernelExC() { launched[KERNEL]++; return ready(); }
ALSO(cuLaunchKernel, cudaLaunchKernelExC) ALSO(cuLaunchKernelEx, cudaLaunchKernelExC)  // Triton's launchers
API long dry_card_launches(int kind) { return launched[kind]; }
API E cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  *out = {}; out->maxThreadsPerBlock = 1024, out->numRegs = 32, out->maxDynamicSharedSizeBytes = 232448;
  out->ptxVersion = out->binaryVersion = 90; return OK;
}
API E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int block, size_t) {
  return *n = std::clamp(2048 / std::max(block, 1), 1, 32), OK;
}
ALSO(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, cudaOccupancyMaxActiveBlocksPerMultiprocessor)

// ---- cuBLAS and cuDNN: torch reads one result. The other calls are stubs; hooks/ writes the products.
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, char* out, int* n) {
  return memset(out, 0, 64), *n = 1, 0;
}

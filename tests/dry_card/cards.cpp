// A fake CUDA driver and runtime without a GPU: "device" memory is host memory, kernels do nothing.
// One library is preloaded, and is also libcuda.so.1 and libnvidia-ml.so.1. See README.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <pthread.h>
#include <set>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))
typedef cudaError_t E;
typedef CUresult R;
static const E OK = cudaSuccess;

// ---------------------------------------------------------------- state
struct Block { size_t size; int dev; int fd; int kind; };  // kind: 0 device, 1 pinned, 2 registered, 3 opened by IPC, 4 mapped
struct Table { struct { int pid; long used[16]; } row[128]; };
static std::recursive_mutex& mu() { static auto* m = new std::recursive_mutex; return *m; }
static std::map<uintptr_t, Block>& blocks() { static auto* m = new std::map<uintptr_t, Block>; return *m; }
static thread_local int current = 0;
static thread_local E last_error = cudaSuccess;
static bool initialised = false, forked = false;
static long env_long(const char* name, long otherwise) { const char* v = getenv(name); return v && *v ? atol(v) : otherwise; }
static bool verbose() { static bool v = env_long("DRY_CARD_VERBOSE", 0); return v; }
static size_t total_bytes() { static size_t n = (size_t)(atof(getenv("DRY_CARD_GIB") ? getenv("DRY_CARD_GIB") : "79") * (1ul << 30)); return n; }
API void dry_card_note(const char* name) {
  if (!verbose()) return;
  static auto* seen = new std::set<std::string>; std::lock_guard<std::recursive_mutex> l(mu());
  if (seen->insert(name).second) fprintf(stderr, "[dry_card %d] %s\n", getpid(), name);
}
static int physical() { return (int)env_long("DRY_CARD_COUNT", 1); }
static void uuid_of(int i, unsigned char* u) {  // cards of machines with different names differ
  static unsigned name = [] { unsigned h = 0; for (const char* s = getenv("DRY_CARD_MACHINE"); s && *s; s++) h = h * 131 + *s; return h; }();
  for (int k = 0; k < 16; k++) u[k] = (unsigned char)(0xf0 + (k == 15 ? i : 0));
  u[12] = name >> 8; u[13] = name;
}
static std::string uuid_text(int i) {
  unsigned char u[16]; uuid_of(i, u); char t[64];
  snprintf(t, sizeof t, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
  return t;
}
static std::vector<int>& visible() {  // physical number of each device of this process; read once, as CUDA does
  static auto* v = [] {
    auto* out = new std::vector<int>; const char* s = getenv("CUDA_VISIBLE_DEVICES");
    if (!s) { for (int i = 0; i < physical(); i++) out->push_back(i); return out; }
    std::string text = s; size_t at = 0;
    while (at <= text.size()) {
      size_t end = text.find(',', at); if (end == std::string::npos) end = text.size();
      std::string part = text.substr(at, end - at); at = end + 1;
      while (!part.empty() && part[0] == ' ') part.erase(0, 1);
      int found = -1;
      if (part.rfind("GPU-", 0) == 0) { for (int i = 0; i < physical(); i++) if (uuid_text(i) == part) found = i; }
      else if (!part.empty() && part.find_first_not_of("0123456789 ") == std::string::npos) found = atoi(part.c_str());
      if (found < 0 || found >= physical()) break;
      out->push_back(found);
    }
    return out;
  }();
  return *v;
}
static int count() { return (int)visible().size(); }
static Table* table() {
  static Table* t = [] {
    char name[64]; const char* s = getenv("DRY_CARD_MACHINE"); snprintf(name, sizeof name, "/dry-card.%d.%s", getuid(), s ? s : "0");
    int fd = shm_open(name, O_RDWR | O_CREAT, 0600); if (ftruncate(fd, sizeof(Table))) {}
    auto* m = (Table*)mmap(0, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); close(fd); return m;
  }();
  return t;
}
static auto* my_row() {
  Table* t = table(); static int at = -1;
  if (at >= 0 && t->row[at].pid == getpid()) return &t->row[at];
  for (int i = 0; i < 128; i++) if (t->row[i].pid == getpid()) { at = i; return &t->row[i]; }
  for (int i = 0; i < 128; i++) {
    int pid = t->row[i].pid;
    if ((pid == 0 || kill(pid, 0) != 0) && __sync_bool_compare_and_swap(&t->row[i].pid, pid, getpid())) {
      memset(t->row[i].used, 0, sizeof t->row[i].used); at = i; return &t->row[i];
    }
  }
  fprintf(stderr, "[dry_card] no free row\n"); abort();
}
static size_t used_on(int phys) {
  size_t n = 0; Table* t = table();
  for (auto& r : t->row) if (r.pid && kill(r.pid, 0) == 0) n += r.used[phys];
  return n;
}
static const long CONTEXT = 500l << 20;  // of a process on a card
static std::atomic<bool> made[16];  // contexts, by physical card
static E ready(bool context = true) {
  if (forked) return last_error = cudaErrorInitializationError;
  if (!count()) return last_error = cudaErrorNoDevice;
  if (!initialised) {
    std::lock_guard<std::recursive_mutex> l(mu());
    if (!initialised) {
      initialised = true;
      if (verbose()) fprintf(stderr, "[dry_card %d] initialised, %d devices\n", getpid(), count());
      pthread_atfork(nullptr, nullptr, [] { forked = true; if (verbose()) fprintf(stderr, "[dry_card %d] forked from a process with CUDA\n", getpid()); });
    }
  }
  int p = visible()[current];
  if (context && !made[p].exchange(true)) __sync_fetch_and_add(&my_row()->used[p], CONTEXT);
  return OK;
}
#define READY do { E e_ = ready(); if (e_) return e_; } while (0)
#define READY0 do { E e_ = ready(false); if (e_) return e_; } while (0)  // calls that make no context
#define READYR do { E e_ = ready(); if (e_) return e_ == cudaErrorNoDevice ? CUDA_ERROR_NO_DEVICE : CUDA_ERROR_NOT_INITIALIZED; } while (0)
static E fail(E e) { last_error = e; return e; }
static Block* find(const void* p, uintptr_t* start = nullptr) {
  auto& b = blocks(); auto it = b.upper_bound((uintptr_t)p); if (it == b.begin()) return nullptr;
  --it; if ((uintptr_t)p >= it->first + it->second.size) return nullptr;
  if (start) *start = it->first;
  return &it->second;
}
static char* window() {  // addresses are never used twice, so a use after free ends in a fault
  static std::atomic<char*> next{(char*)mmap(0, 16ul << 40, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)};
  return next.load();
}
static char* addresses(size_t size) {
  static std::atomic<size_t> at{2ul << 20}; static char* base = window();
  size_t rounded = ((size + (2ul << 20) - 1) >> 21 << 21) + (2ul << 20);
  return (char*)(((uintptr_t)base + at.fetch_add(rounded) + (2ul << 20) - 1) >> 21 << 21);
}
static E charge(int dev, long n) {
  int p = visible()[dev]; std::lock_guard<std::recursive_mutex> l(mu());
  if (n > 0 && used_on(p) + n > total_bytes()) return fail(cudaErrorMemoryAllocation);
  __sync_fetch_and_add(&my_row()->used[p], n); return OK;
}
static E device_malloc(void** out, size_t size, int dev) {
  READY; if (!size) { *out = nullptr; return OK; }
  size_t rounded = (size + (2ul << 20) - 1) >> 21 << 21;
  if (E e = charge(dev, rounded)) return e;
  int fd = memfd_create("dry_card", MFD_CLOEXEC); if (ftruncate(fd, rounded)) {}
  char* at = addresses(rounded);
  void* m = mmap(at, rounded, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0);
  if (m == MAP_FAILED) { perror("[dry_card] mmap"); close(fd); return fail(cudaErrorMemoryAllocation); }
  static bool poison = env_long("DRY_CARD_POISON", 0);
  if (poison) memset(m, 0xff, size);  // nan in every float dtype
  std::lock_guard<std::recursive_mutex> l(mu()); blocks()[(uintptr_t)m] = {rounded, dev, fd, 0}; *out = m; return OK;
}
static E device_free(void* p) {
  if (!p) return OK;
  std::lock_guard<std::recursive_mutex> l(mu()); auto it = blocks().find((uintptr_t)p);
  if (it == blocks().end() || it->second.kind != 0) return fail(cudaErrorInvalidValue);
  charge(it->second.dev, -(long)it->second.size); close(it->second.fd);
  mmap(p, it->second.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  blocks().erase(it); return OK;
}
static long pinned_bytes = 0;
static E pin(void* p, size_t n, int kind) {
  std::lock_guard<std::recursive_mutex> l(mu()); long limit = env_long("DRY_CARD_PINNED_MIB", 0) << 20;
  if (limit && pinned_bytes + (long)n > limit) return fail(cudaErrorMemoryAllocation);
  pinned_bytes += n; blocks()[(uintptr_t)p] = {n, current, -1, kind}; return OK;
}

// ---------------------------------------------------------------- streams: copies on them can be late
// With DRY_CARD_LATE=1 a copy on a stream other than the default one is made only when something waits for it.
struct Op { void* dst; const void* src; size_t n; };
struct Stream { int dev; int priority; unsigned long id; std::vector<Op> late; bool capturing = false; };
struct Event { double t = 0; bool recorded = false; Stream* stream = nullptr; size_t upto = 0; };
static std::set<Stream*>& streams() { static auto* s = new std::set<Stream*>; return *s; }
static void run_late(Stream* s) {
  std::vector<Op> ops; { std::lock_guard<std::recursive_mutex> l(mu()); if (!streams().count(s)) return; ops.swap(s->late); }
  for (auto& op : ops) memcpy(op.dst, op.src, op.n);
}
static void run_all_late() { std::vector<Stream*> all; { std::lock_guard<std::recursive_mutex> l(mu()); all.assign(streams().begin(), streams().end()); } for (auto* s : all) run_late(s); }
static bool is_own(cudaStream_t s) { return s && s != (cudaStream_t)1 && s != (cudaStream_t)2; }
API void dry_card_use_stream(void* s) { if (is_own((cudaStream_t)s)) run_late((Stream*)s); }  // something runs on it now
static double now_ms() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec * 1e-6; }
static E copy(void* d, const void* s, size_t n, cudaStream_t st, bool async) {
  READY; static bool late = env_long("DRY_CARD_LATE", 0);
  if (!n) return OK;
  if (late && async && is_own(st)) { std::lock_guard<std::recursive_mutex> l(mu()); ((Stream*)st)->late.push_back({d, s, n}); return OK; }
  if (is_own(st)) run_late((Stream*)st);
  memcpy(d, s, n); return OK;
}
static E new_stream(cudaStream_t* s, int priority) {
  READY; static std::atomic<unsigned long> id{10}; auto* n = new Stream{current, priority, id++};
  std::lock_guard<std::recursive_mutex> l(mu()); streams().insert(n); *s = (cudaStream_t)n; return OK;
}

// ---------------------------------------------------------------- runtime: devices
API E cudaGetDeviceCount(int* n) { if (forked) return fail(cudaErrorInitializationError); *n = count(); return *n ? OK : fail(cudaErrorNoDevice); }
API E cudaGetDevice(int* d) { READY0; *d = current; return OK; }
API E cudaSetDevice(int d) { if (forked) return fail(cudaErrorInitializationError); if (d < 0 || d >= count()) return fail(cudaErrorInvalidDevice); current = d; READY; return OK; }
API E cudaInitDevice(int, unsigned, unsigned) { READY; return OK; }
API E cudaSetDeviceFlags(unsigned) { return OK; }
API E cudaGetDeviceFlags(unsigned* f) { *f = 0; return OK; }
API E cudaSetValidDevices(int*, int) { return OK; }
static int capability() { return (int)env_long("DRY_CARD_CC", 90); }
API E cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (d < 0 || d >= count()) return fail(cudaErrorInvalidDevice);
  READY0; memset(p, 0, sizeof *p); snprintf(p->name, sizeof p->name, "NVIDIA H100 80GB HBM3"); uuid_of(visible()[d], (unsigned char*)&p->uuid);
  p->totalGlobalMem = total_bytes(); p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32; p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->totalConstMem = 65536;
  p->major = capability() / 10; p->minor = capability() % 10; p->textureAlignment = 512; p->multiProcessorCount = 132; p->unifiedAddressing = 1; p->managedMemory = 1;
  p->concurrentKernels = 1; p->pciBusID = 0x10 + visible()[d]; p->asyncEngineCount = 3; p->memoryBusWidth = 5120; p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048; p->sharedMemPerMultiprocessor = 233472; p->regsPerMultiprocessor = 65536; p->sharedMemPerBlockOptin = 232448;
  p->canMapHostMemory = 1; p->cooperativeLaunch = 1; p->streamPrioritiesSupported = 1; p->maxBlocksPerMultiProcessor = 32; p->reservedSharedMemPerBlock = 1024; p->memoryPoolsSupported = 1;
  return OK;
}
static int attribute(int a) {
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return capability() / 10;
    case cudaDevAttrComputeCapabilityMinor: return capability() % 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrPciBusId: return 0x10;
    case cudaDevAttrPciDeviceId: case cudaDevAttrPciDomainId: case cudaDevAttrIntegrated: case cudaDevAttrComputeMode: return 0;
    default: return 1;
  }
}
API E cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) { if (d >= count()) return fail(cudaErrorInvalidDevice); *v = a == cudaDevAttrPciBusId ? 0x10 + visible()[d] : attribute(a); return OK; }
API E cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return OK; }
API E cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return OK; }
API E cudaDeviceEnablePeerAccess(int, unsigned) { return OK; }
API E cudaDeviceDisablePeerAccess(int) { return OK; }
API E cudaDeviceGetP2PAttribute(int* v, cudaDeviceP2PAttr, int, int) { *v = 1; return OK; }
API E cudaDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", 0x10 + visible()[d]); return OK; }
API E cudaDeviceGetByPCIBusId(int* d, const char* s) { unsigned dom, bus; sscanf(s, "%x:%x", &dom, &bus); for (int i = 0; i < count(); i++) if (visible()[i] + 0x10 == (int)bus) { *d = i; return OK; } return fail(cudaErrorInvalidDevice); }
API E cudaDeviceSynchronize() { READY; run_all_late(); return OK; }
API E cudaDeviceReset() { return OK; }
API E cudaDeviceGetLimit(size_t* v, cudaLimit) { *v = 1024; return OK; }
API E cudaDeviceSetLimit(cudaLimit, size_t) { return OK; }
API E cudaGetLastError() { E e = last_error; last_error = OK; return e; }
API E cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(E e) { return e == OK ? "cudaSuccess" : e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : e == cudaErrorInitializationError ? "cudaErrorInitializationError" : e == cudaErrorNoDevice ? "cudaErrorNoDevice" : e == cudaErrorInvalidDevice ? "cudaErrorInvalidDevice" : "cudaError(fake)"; }
API const char* cudaGetErrorString(E e) {
  switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    default: return "fake error";
  }
}
API E cudaRuntimeGetVersion(int* v) { *v = CUDART_VERSION; return OK; }
API E cudaDriverGetVersion(int* v) { *v = CUDART_VERSION; return OK; }
API E cudaGetDriverEntryPointByVersion(const char* s, void** f, unsigned v, unsigned long long fl, cudaDriverEntryPointQueryResult* r) {
  CUdriverProcAddressQueryResult q; R e = cuGetProcAddress(s, f, v, fl, &q); if (r) *r = e ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess; return e ? fail(cudaErrorUnknown) : OK;
}
API E cudaGetDriverEntryPoint(const char* s, void** f, unsigned long long fl, cudaDriverEntryPointQueryResult* r) { return cudaGetDriverEntryPointByVersion(s, f, 13000, fl, r); }
// ---------------------------------------------------------------- runtime: memory
API E cudaMalloc(void** p, size_t n) { return device_malloc(p, n, current); }
API E cudaMallocAsync(void** p, size_t n, cudaStream_t) { return device_malloc(p, n, current); }
API E cudaMallocFromPoolAsync(void** p, size_t n, cudaMemPool_t, cudaStream_t) { return device_malloc(p, n, current); }
API E cudaMallocManaged(void** p, size_t n, unsigned) { return device_malloc(p, n, current); }
API E cudaMallocPitch(void** p, size_t* pitch, size_t w, size_t h) { *pitch = w; return device_malloc(p, w * h, current); }
API E cudaFree(void* p) { READY; return device_free(p); }
API E cudaFreeAsync(void* p, cudaStream_t) { return device_free(p); }
API E cudaMemGetInfo(size_t* f, size_t* t) { READY; *t = total_bytes(); size_t u = used_on(visible()[current]); *f = u > *t ? 0 : *t - u; return OK; }
API E cudaHostAlloc(void** p, size_t n, unsigned) {
  READY; size_t r = (n + 4095) & ~4095ul; void* m = mmap(0, r ? r : 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); if (m == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  if (E e = pin(m, r ? r : 4096, 1)) { munmap(m, r); return e; }
  *p = m; return OK;
}
API E cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
API E cudaFreeHost(void* p) { if (!p) return OK; std::lock_guard<std::recursive_mutex> l(mu()); auto it = blocks().find((uintptr_t)p); if (it == blocks().end()) return fail(cudaErrorInvalidValue); pinned_bytes -= it->second.size; munmap(p, it->second.size); blocks().erase(it); return OK; }
API E cudaHostRegister(void* p, size_t n, unsigned) { READY; if (!n || !p) return fail(cudaErrorInvalidValue); { std::lock_guard<std::recursive_mutex> l(mu()); if (find(p)) return fail(cudaErrorHostMemoryAlreadyRegistered); } return pin(p, n, 2); }
API E cudaHostUnregister(void* p) { std::lock_guard<std::recursive_mutex> l(mu()); auto it = blocks().find((uintptr_t)p); if (it == blocks().end()) return fail(cudaErrorHostMemoryNotRegistered); pinned_bytes -= it->second.size; blocks().erase(it); return OK; }
API E cudaHostGetDevicePointer(void** d, void* h, unsigned) { *d = h; return OK; }
API E cudaHostGetFlags(unsigned* f, void*) { *f = 0; return OK; }
API E cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  READY0; std::lock_guard<std::recursive_mutex> l(mu()); Block* b = find(p); memset(a, 0, sizeof *a);
  if (!b) { a->type = cudaMemoryTypeUnregistered; a->device = -2; a->hostPointer = (void*)p; return OK; }
  bool host = b->kind == 1 || b->kind == 2; a->type = host ? cudaMemoryTypeHost : cudaMemoryTypeDevice; a->device = b->dev; a->devicePointer = (void*)p; a->hostPointer = host ? (void*)p : nullptr; return OK;
}
API E cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) { return copy(d, s, n, 0, false); }
API E cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) { return copy(d, s, n, st, true); }
API E cudaMemcpyPeer(void* d, int, const void* s, int, size_t n) { return copy(d, s, n, 0, false); }
API E cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) { return copy(d, s, n, st, true); }
API E cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t st) { READY; for (size_t i = 0; i < h; i++) copy((char*)d + i * dp, (const char*)s + i * sp, w, st, true); return OK; }
API E cudaMemcpy2D(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind k) { return cudaMemcpy2DAsync(d, dp, s, sp, w, h, k, 0); }
API E cudaMemcpyToSymbol(const void* d, const void* s, size_t n, size_t o, cudaMemcpyKind) { memcpy((char*)d + o, s, n); return OK; }
API E cudaMemcpyToSymbolAsync(const void* d, const void* s, size_t n, size_t o, cudaMemcpyKind, cudaStream_t) { memcpy((char*)d + o, s, n); return OK; }
API E cudaMemcpyFromSymbol(void* d, const void* s, size_t n, size_t o, cudaMemcpyKind) { memcpy(d, (const char*)s + o, n); return OK; }
API E cudaMemset(void* d, int v, size_t n) { READY; memset(d, v, n); return OK; }
API E cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t s) { READY; dry_card_use_stream(s); memset(d, v, n); return OK; }
API E cudaMemset2DAsync(void* d, size_t p, int v, size_t w, size_t h, cudaStream_t) { for (size_t i = 0; i < h; i++) memset((char*)d + i * p, v, w); return OK; }
API E cudaGetSymbolAddress(void** p, const void* s) { *p = (void*)s; return OK; }
API E cudaGetSymbolSize(size_t* n, const void*) { *n = 0; return OK; }
struct IpcData { int pid, fd; size_t size; };
API E cudaIpcGetMemHandle(cudaIpcMemHandle_t* h, void* p) {
  std::lock_guard<std::recursive_mutex> l(mu()); Block* b = find(p); if (!b || b->kind != 0) return fail(cudaErrorInvalidValue);  // as with cuMemMap: not shareable
  memset(h, 0, sizeof *h); IpcData d{getpid(), b->fd, b->size}; memcpy(h, &d, sizeof d); return OK;
}
API E cudaIpcOpenMemHandle(void** p, cudaIpcMemHandle_t h, unsigned) {
  READY; IpcData d; memcpy(&d, &h, sizeof d); if (d.pid == getpid()) return fail(cudaErrorDeviceUninitialized);
  char path[64]; snprintf(path, sizeof path, "/proc/%d/fd/%d", d.pid, d.fd); int fd = open(path, O_RDWR | O_CLOEXEC); if (fd < 0) return fail(cudaErrorInvalidValue);
  void* m = mmap(addresses(d.size), d.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0); close(fd); if (m == MAP_FAILED) return fail(cudaErrorInvalidValue);
  std::lock_guard<std::recursive_mutex> l(mu()); blocks()[(uintptr_t)m] = {d.size, current, -1, 3}; *p = m; return OK;
}
API E cudaIpcCloseMemHandle(void* p) { std::lock_guard<std::recursive_mutex> l(mu()); auto it = blocks().find((uintptr_t)p); if (it == blocks().end()) return fail(cudaErrorInvalidValue); mmap(p, it->second.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0); blocks().erase(it); return OK; }
API E cudaIpcGetEventHandle(cudaIpcEventHandle_t* h, cudaEvent_t) { memset(h, 0, sizeof *h); return OK; }
API E cudaIpcOpenEventHandle(cudaEvent_t* e, cudaIpcEventHandle_t) { *e = (cudaEvent_t)new Event; return OK; }
API E cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) { *p = (cudaMemPool_t)1; return OK; }
API E cudaDeviceGetMemPool(cudaMemPool_t* p, int) { *p = (cudaMemPool_t)1; return OK; }
// ---------------------------------------------------------------- runtime: streams and events
API E cudaStreamCreate(cudaStream_t* s) { return new_stream(s, 0); }
API E cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return new_stream(s, 0); }
API E cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int p) { return new_stream(s, p); }
API E cudaStreamDestroy(cudaStream_t s) { run_late((Stream*)s); std::lock_guard<std::recursive_mutex> l(mu()); streams().erase((Stream*)s); return OK; }
API E cudaStreamSynchronize(cudaStream_t s) { READY; dry_card_use_stream(s); return OK; }
API E cudaStreamQuery(cudaStream_t s) { READY; dry_card_use_stream(s); return OK; }
API E cudaStreamGetPriority(cudaStream_t s, int* p) { *p = is_own(s) ? ((Stream*)s)->priority : 0; return OK; }
API E cudaStreamGetFlags(cudaStream_t, unsigned* f) { *f = 1; return OK; }
API E cudaStreamGetId(cudaStream_t s, unsigned long long* id) { *id = is_own(s) ? ((Stream*)s)->id : 0; return OK; }
API E cudaStreamGetDevice(cudaStream_t s, int* d) { *d = is_own(s) ? ((Stream*)s)->dev : current; return OK; }
API E cudaStreamWaitEvent(cudaStream_t, cudaEvent_t e, unsigned) { READY; auto* ev = (Event*)e; if (ev->stream) run_late(ev->stream); return OK; }
API E cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* c) { *c = is_own(s) && ((Stream*)s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; return OK; }
API E cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* c, unsigned long long* id, cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** ed, size_t* n) {
  cudaStreamIsCapturing(s, c); if (id) *id = 1; if (g) *g = (cudaGraph_t)1; if (d) *d = nullptr; if (ed) *ed = nullptr; if (n) *n = 0; return OK;
}
API E cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) { if (is_own(s)) ((Stream*)s)->capturing = true; return OK; }
API E cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) { if (is_own(s)) ((Stream*)s)->capturing = false; *g = (cudaGraph_t)1; return OK; }
API E cudaGraphInstantiate(cudaGraphExec_t* e, cudaGraph_t, unsigned long long) { *e = (cudaGraphExec_t)1; return OK; }
API E cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t, unsigned long long) { *e = (cudaGraphExec_t)1; return OK; }
API E cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* n) { *n = 1; return OK; }
API E cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return OK; }
API E cudaEventCreate(cudaEvent_t* e) { READY; *e = (cudaEvent_t)new Event; return OK; }
API E cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
API E cudaEventDestroy(cudaEvent_t e) { delete (Event*)e; return OK; }
API E cudaEventRecord(cudaEvent_t e, cudaStream_t s) { READY; auto* ev = (Event*)e; ev->t = now_ms(); ev->recorded = true; ev->stream = is_own(s) ? (Stream*)s : nullptr; return OK; }
API E cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API E cudaEventQuery(cudaEvent_t e) { READY; auto* ev = (Event*)e; if (ev->stream && streams().count(ev->stream) && !ev->stream->late.empty()) return cudaErrorNotReady; return OK; }
API E cudaEventSynchronize(cudaEvent_t e) { READY; auto* ev = (Event*)e; if (ev->stream) run_late(ev->stream); return OK; }
API E cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { if (!((Event*)a)->recorded || !((Event*)b)->recorded) return fail(cudaErrorInvalidResourceHandle); *ms = (float)(((Event*)b)->t - ((Event*)a)->t); if (*ms <= 0) *ms = 1e-4f; return OK; }
API E cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* d) { f(d); return OK; }
API E cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* d, unsigned) { f(s, OK, d); return OK; }
// ---------------------------------------------------------------- runtime: kernels
struct Pushed { dim3 g, b; size_t sm; void* st; };
static thread_local std::vector<Pushed> pushed;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t sm, void* st) {
  if (!g.x || !g.y || !g.z || !b.x || b.x * b.y * b.z > 1024 || g.y > 65535 || g.z > 65535) { fprintf(stderr, "[dry_card] invalid launch grid %u %u %u block %u %u %u\n", g.x, g.y, g.z, b.x, b.y, b.z); last_error = cudaErrorInvalidConfiguration; }
  pushed.push_back({g, b, sm, st}); return 0;
}
API E __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* sm, void* st) { if (pushed.empty()) return fail(cudaErrorMissingConfiguration); auto& p = pushed.back(); *g = p.g; *b = p.b; *sm = p.sm; *(void**)st = p.st; pushed.pop_back(); return OK; }
API void** __cudaRegisterFatBinary(void*) { static void* h; return &h; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
API E __cudaGetKernel(cudaKernel_t* k, const void* f) { *k = (cudaKernel_t)f; return OK; }
API E __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t s) { READY; dry_card_use_stream(s); return last_error == cudaErrorInvalidConfiguration ? last_error : OK; }
API E __cudaLaunchKernel_ptsz(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { READY; return OK; }
API E cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t s) { READY; dry_card_use_stream(s); return last_error == cudaErrorInvalidConfiguration ? last_error : OK; }
API E cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void*, void**) { READY; dry_card_use_stream(c->stream); return OK; }
API E cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { READY; return OK; }
API E cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) { memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->ptxVersion = capability(); a->binaryVersion = capability(); a->maxDynamicSharedSizeBytes = 232448; return OK; }
API E cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return OK; }
API E cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return OK; }
API E cudaFuncGetName(const char** n, const void*) { *n = "fake"; return OK; }
API E cudaGetFuncBySymbol(cudaFunction_t* f, const void* s) { *f = (cudaFunction_t)s; return OK; }
API E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int b, size_t) { *n = b > 0 ? (2048 / b > 32 ? 32 : 2048 / b) : 1; if (*n < 1) *n = 1; return OK; }
API E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f, int b, size_t s, unsigned) { return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, b, s); }
API E cudaOccupancyAvailableDynamicSMemPerBlock(size_t* n, const void*, int, int) { *n = 49152; return OK; }
API E cudaOccupancyMaxActiveClusters(int* n, const void*, const cudaLaunchConfig_t*) { *n = 64; return OK; }

// ---------------------------------------------------------------- driver
API R cuInit(unsigned) { if (forked) return CUDA_ERROR_NOT_INITIALIZED; return count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
API R cuDriverGetVersion(int* v) { *v = CUDA_VERSION; return CUDA_SUCCESS; }
API R cuDeviceGetCount(int* n) { *n = count(); return CUDA_SUCCESS; }
API R cuDeviceGet(CUdevice* d, int i) { if (i >= count()) return CUDA_ERROR_INVALID_DEVICE; *d = i; return CUDA_SUCCESS; }
API R cuDeviceGetName(char* s, int n, CUdevice) { snprintf(s, n, "NVIDIA H100 80GB HBM3"); return CUDA_SUCCESS; }
API R cuDeviceGetUuid(CUuuid* u, CUdevice d) { uuid_of(visible()[d], (unsigned char*)u); return CUDA_SUCCESS; }
API R cuDeviceTotalMem(size_t* n, CUdevice) { *n = total_bytes(); return CUDA_SUCCESS; }
API R cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice d) { return (R)cudaDeviceGetAttribute(v, (cudaDeviceAttr)a, d); }
API R cuDeviceComputeCapability(int* a, int* b, CUdevice) { *a = capability() / 10; *b = capability() % 10; return CUDA_SUCCESS; }
API R cuDeviceGetPCIBusId(char* s, int n, CUdevice d) { return (R)cudaDeviceGetPCIBusId(s, n, d); }
API R cuDeviceCanAccessPeer(int* v, CUdevice, CUdevice) { *v = 1; return CUDA_SUCCESS; }
API R cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) { READYR; *c = (CUcontext)(uintptr_t)(d + 1); return CUDA_SUCCESS; }
API R cuDevicePrimaryCtxGetState(CUdevice d, unsigned* f, int* active) { *f = 0; *active = made[visible()[d]]; return CUDA_SUCCESS; }
API R cuCtxGetCurrent(CUcontext* c) { *c = initialised ? (CUcontext)(uintptr_t)(current + 1) : nullptr; return CUDA_SUCCESS; }
API R cuCtxSetCurrent(CUcontext c) { if (c) current = (int)(uintptr_t)c - 1; return CUDA_SUCCESS; }
API R cuCtxPushCurrent(CUcontext c) { return cuCtxSetCurrent(c); }
API R cuCtxPopCurrent(CUcontext* c) { if (c) cuCtxGetCurrent(c); return CUDA_SUCCESS; }
API R cuCtxGetDevice(CUdevice* d) { *d = current; return CUDA_SUCCESS; }
API R cuCtxSynchronize() { run_all_late(); return CUDA_SUCCESS; }
API R cuModuleLoadData(CUmodule* m, const void*) { READYR; *m = (CUmodule)1; return CUDA_SUCCESS; }
API R cuModuleLoadDataEx(CUmodule* m, const void* i, unsigned, CUjit_option*, void**) { return cuModuleLoadData(m, i); }
API R cuModuleLoad(CUmodule* m, const char* i) { return cuModuleLoadData(m, i); }
API R cuModuleGetFunction(CUfunction* f, CUmodule, const char*) { *f = (CUfunction)1; return CUDA_SUCCESS; }
API R cuLibraryLoadData(CUlibrary* l, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) { *l = (CUlibrary)1; return CUDA_SUCCESS; }
API R cuLibraryGetKernel(CUkernel* k, CUlibrary, const char*) { *k = (CUkernel)1; return CUDA_SUCCESS; }
API R cuKernelGetFunction(CUfunction* f, CUkernel) { *f = (CUfunction)1; return CUDA_SUCCESS; }
API R cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) { *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0; return CUDA_SUCCESS; }
API R cuLaunchKernel(CUfunction, unsigned gx, unsigned gy, unsigned gz, unsigned, unsigned, unsigned, unsigned, CUstream s, void**, void**) { READYR; dry_card_use_stream(s); if (!gx || !gy || !gz || gy > 65535 || gz > 65535) return CUDA_ERROR_INVALID_VALUE; return CUDA_SUCCESS; }
API R cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction, void**, void**) { READYR; dry_card_use_stream(c->hStream); if (!c->gridDimX || !c->gridDimY || !c->gridDimZ || c->gridDimY > 65535 || c->gridDimZ > 65535) return CUDA_ERROR_INVALID_VALUE; return CUDA_SUCCESS; }
API R cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) { *n = 8; return CUDA_SUCCESS; }
API R cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) { *n = 64; return CUDA_SUCCESS; }
API R cuPointerGetAttribute(void* out, CUpointer_attribute a, CUdeviceptr p) {
  std::lock_guard<std::recursive_mutex> l(mu()); uintptr_t start; Block* b = find((void*)p, &start); if (!b) return CUDA_ERROR_INVALID_VALUE;
  bool host = b->kind == 1 || b->kind == 2;
  if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned*)out = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  else if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || a == CU_POINTER_ATTRIBUTE_HOST_POINTER) *(CUdeviceptr*)out = p;
  else if (a == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int*)out = b->dev;
  else if (a == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) *(CUdeviceptr*)out = start;
  else if (a == CU_POINTER_ATTRIBUTE_RANGE_SIZE) *(size_t*)out = b->size;
  else if (a == CU_POINTER_ATTRIBUTE_CONTEXT) *(CUcontext*)out = (CUcontext)(uintptr_t)(b->dev + 1);
  else *(unsigned*)out = 0;
  return CUDA_SUCCESS;
}
API R cuMemGetAddressRange(CUdeviceptr* base, size_t* n, CUdeviceptr p) { std::lock_guard<std::recursive_mutex> l(mu()); uintptr_t start; Block* b = find((void*)p, &start); if (!b) return CUDA_ERROR_NOT_FOUND; if (base) *base = start; if (n) *n = b->size; return CUDA_SUCCESS; }
API R cuMemGetInfo(size_t* f, size_t* t) { return (R)cudaMemGetInfo(f, t); }
API R cuMemAlloc(CUdeviceptr* p, size_t n) { return (R)cudaMalloc((void**)p, n); }
API R cuMemFree(CUdeviceptr p) { return (R)cudaFree((void*)p); }
API R cuMemcpyHtoD(CUdeviceptr d, const void* s, size_t n) { memcpy((void*)d, s, n); return CUDA_SUCCESS; }
API R cuMemcpyDtoH(void* d, CUdeviceptr s, size_t n) { memcpy(d, (void*)s, n); return CUDA_SUCCESS; }
API R cuMemcpyAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream st) { return (R)cudaMemcpyAsync((void*)d, (void*)s, n, cudaMemcpyDefault, st); }
API R cuMemsetD8Async(CUdeviceptr d, unsigned char v, size_t n, CUstream) { memset((void*)d, v, n); return CUDA_SUCCESS; }
API R cuMemsetD32Async(CUdeviceptr d, unsigned v, size_t n, CUstream) { for (size_t i = 0; i < n; i++) ((unsigned*)d)[i] = v; return CUDA_SUCCESS; }
API R cuGetErrorString(R r, const char** s) { *s = r == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : r == CUDA_SUCCESS ? "no error" : "fake driver error"; return CUDA_SUCCESS; }
API R cuGetErrorName(R, const char** s) { *s = "CUDA_ERROR_FAKE"; return CUDA_SUCCESS; }
API R cuStreamSynchronize(CUstream s) { return (R)cudaStreamSynchronize(s); }
API R cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* c) { return (R)cudaStreamIsCapturing(s, (cudaStreamCaptureStatus*)c); }
API R cuStreamWriteValue32(CUstream, CUdeviceptr a, cuuint32_t v, unsigned) { *(unsigned*)a = v; return CUDA_SUCCESS; }
API R cuStreamWaitValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned) { return CUDA_SUCCESS; }
// virtual memory: expandable segments, and vLLM's sleep mode
API R cuMemGetAllocationGranularity(size_t* g, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { *g = 2ul << 20; return CUDA_SUCCESS; }
struct Phys { size_t size; int dev, fd; };
API R cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) { READYR; *p = (CUdeviceptr)addresses(n); return CUDA_SUCCESS; }
API R cuMemAddressFree(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
API R cuMemCreate(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp* prop, unsigned long long) {
  READYR; int dev = prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? prop->location.id : current; if (charge(dev, n)) { last_error = OK; return CUDA_ERROR_OUT_OF_MEMORY; }
  int fd = memfd_create("dry_card", MFD_CLOEXEC); if (ftruncate(fd, n)) {} *h = (CUmemGenericAllocationHandle) new Phys{n, dev, fd}; return CUDA_SUCCESS;
}
API R cuMemRelease(CUmemGenericAllocationHandle h) { auto* p = (Phys*)h; charge(p->dev, -(long)p->size); close(p->fd); delete p; return CUDA_SUCCESS; }
API R cuMemMap(CUdeviceptr p, size_t n, size_t off, CUmemGenericAllocationHandle h, unsigned long long) {
  auto* ph = (Phys*)h; void* m = mmap((void*)p, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, ph->fd, off); if (m == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::recursive_mutex> l(mu()); blocks()[p] = {n, ph->dev, -1, 4}; return CUDA_SUCCESS;
}
API R cuMemUnmap(CUdeviceptr p, size_t n) { mmap((void*)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0); std::lock_guard<std::recursive_mutex> l(mu()); auto& b = blocks(); for (auto it = b.lower_bound(p); it != b.end() && it->first < p + n;) it = b.erase(it); return CUDA_SUCCESS; }
API R cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
API R cuMulticastGetGranularity(size_t* g, const CUmulticastObjectProp*, CUmulticastGranularity_flags) { *g = 2ul << 20; return CUDA_SUCCESS; }
static R unknown_call() { return CUDA_SUCCESS; }
#undef cuGetProcAddress
API R cuGetProcAddress_v2(const char* s, void** f, int, cuuint64_t, CUdriverProcAddressQueryResult* q) {
  Dl_info me; dladdr((void*)&cuInit, &me); void* self = dlopen(me.dli_fname, RTLD_NOW | RTLD_NOLOAD); std::string name = s;
  *f = nullptr; for (const char* suffix : {"_v4", "_v3", "_v2", ""}) if (!*f) *f = dlsym(self, (name + suffix).c_str());
  if (!*f) { dry_card_note((name + " (unknown driver call)").c_str()); *f = (void*)unknown_call; }
  if (q) *q = CU_GET_PROC_ADDRESS_SUCCESS; return CUDA_SUCCESS;
}
API R cuGetProcAddress(const char* s, void** f, int v, cuuint64_t fl) { return cuGetProcAddress_v2(s, f, v, fl, nullptr); }

// ---------------------------------------------------------------- NVML
typedef unsigned N;
static int nv(void* h) { return (int)(uintptr_t)h - 1; }
API N nvmlInit_v2() { return 0; }
API N nvmlInit() { return 0; }
API N nvmlInitWithFlags(unsigned) { return 0; }
API N nvmlShutdown() { return 0; }
API const char* nvmlErrorString(N) { return "fake"; }
API N nvmlSystemGetDriverVersion(char* s, unsigned n) { snprintf(s, n, "580.65.06"); return 0; }
API N nvmlSystemGetCudaDriverVersion(int* v) { *v = 13000; return 0; }
API N nvmlSystemGetCudaDriverVersion_v2(int* v) { *v = 13000; return 0; }
API N nvmlDeviceGetCount_v2(unsigned* n) { *n = physical(); return 0; }
API N nvmlDeviceGetCount(unsigned* n) { *n = physical(); return 0; }
API N nvmlDeviceGetHandleByIndex_v2(unsigned i, void** h) { if ((int)i >= physical()) return 2; *h = (void*)(uintptr_t)(i + 1); return 0; }
API N nvmlDeviceGetHandleByIndex(unsigned i, void** h) { return nvmlDeviceGetHandleByIndex_v2(i, h); }
API N nvmlDeviceGetHandleByUUID(const char* u, void** h) { for (int i = 0; i < physical(); i++) if (uuid_text(i) == u) { *h = (void*)(uintptr_t)(i + 1); return 0; } return 6; }
API N nvmlDeviceGetHandleByPciBusId_v2(const char* s, void** h) { unsigned d, b; sscanf(s, "%x:%x", &d, &b); *h = (void*)(uintptr_t)(b - 0x10 + 1); return 0; }
API N nvmlDeviceGetName(void*, char* s, unsigned n) { snprintf(s, n, "NVIDIA H100 80GB HBM3"); return 0; }
API N nvmlDeviceGetUUID(void* h, char* s, unsigned n) { snprintf(s, n, "%s", uuid_text(nv(h)).c_str()); return 0; }
API N nvmlDeviceGetIndex(void* h, unsigned* i) { *i = nv(h); return 0; }
API N nvmlDeviceGetMinorNumber(void* h, unsigned* i) { *i = nv(h); return 0; }
API N nvmlDeviceGetCudaComputeCapability(void*, int* a, int* b) { *a = capability() / 10; *b = capability() % 10; return 0; }
struct NvMem { unsigned long long total, free, used; };
API N nvmlDeviceGetMemoryInfo(void* h, NvMem* m) { m->total = total_bytes(); m->used = used_on(nv(h)); m->free = m->total - m->used; return 0; }
struct NvMem2 { unsigned version; unsigned long long total, reserved, free, used; };
API N nvmlDeviceGetMemoryInfo_v2(void* h, NvMem2* m) { m->total = total_bytes(); m->reserved = 0; m->used = used_on(nv(h)); m->free = m->total - m->used; return 0; }
struct NvProc { unsigned pid; unsigned long long used; unsigned a, b; };
API N nvmlDeviceGetComputeRunningProcesses_v3(void* h, unsigned* n, NvProc* out) {
  unsigned at = 0, room = *n; for (auto& r : table()->row) if (r.pid && kill(r.pid, 0) == 0 && r.used[nv(h)] > 0) { if (at < room && out) out[at] = {(unsigned)r.pid, (unsigned long long)r.used[nv(h)], ~0u, ~0u}; at++; }
  *n = at; return at > room ? 7 : 0;
}
API N nvmlDeviceGetComputeRunningProcesses(void* h, unsigned* n, NvProc* o) { return nvmlDeviceGetComputeRunningProcesses_v3(h, n, o); }
API N nvmlDeviceGetComputeRunningProcesses_v2(void* h, unsigned* n, NvProc* o) { return nvmlDeviceGetComputeRunningProcesses_v3(h, n, o); }
API N nvmlDeviceGetGraphicsRunningProcesses_v3(void*, unsigned* n, NvProc*) { *n = 0; return 0; }
API N nvmlDeviceGetP2PStatus(void*, void*, int, int* s) { *s = 0; return 0; }
API N nvmlDeviceGetTopologyCommonAncestor(void*, void*, int* s) { *s = 0; return 0; }
API N nvmlDeviceGetNvLinkState(void*, unsigned, int* s) { *s = 1; return 0; }
API N nvmlDeviceGetUtilizationRates(void*, unsigned* u) { u[0] = u[1] = 50; return 0; }
API N nvmlDeviceGetTemperature(void*, int, unsigned* t) { *t = 40; return 0; }
API N nvmlDeviceGetPowerUsage(void*, unsigned* p) { *p = 100000; return 0; }
API N nvmlDeviceGetMigMode(void*, unsigned* a, unsigned* b) { *a = *b = 0; return 0; }
API N nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int* t) { *t = 0xff; return 0; }
API N nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
API N nvmlDeviceGetNvLinkRemotePciInfo(void*, unsigned, void*) { return 3; }
API N nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 3; }
API N nvmlDeviceGetGpuFabricInfo(void*, void*) { return 3; }
API N nvmlDeviceGetMemoryAffinity(void*, unsigned, unsigned long*, int) { return 3; }
API N nvmlDeviceGetCpuAffinity(void*, unsigned n, unsigned long* s) { for (unsigned i = 0; i < n; i++) s[i] = 0; s[0] = 3; return 0; }
API R cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API R cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API R cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API R cuLibraryUnload(CUlibrary) { return CUDA_SUCCESS; }
API R cuMemHostGetDevicePointer(CUdeviceptr* d, void* h, unsigned) { *d = (CUdeviceptr)h; return CUDA_SUCCESS; }
API R cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**) { return CUDA_SUCCESS; }
API R cuEventCreate(CUevent* e, unsigned) { return (R)cudaEventCreate(e); }
API R cuEventRecord(CUevent e, CUstream s) { return (R)cudaEventRecord(e, s); }
API R cuEventSynchronize(CUevent e) { return (R)cudaEventSynchronize(e); }
API R cuEventElapsedTime(float* t, CUevent a, CUevent b) { return (R)cudaEventElapsedTime(t, a, b); }
API R cuEventDestroy(CUevent) { return CUDA_SUCCESS; }
API R cuStreamCreate(CUstream* s, unsigned) { return (R)cudaStreamCreate(s); }
API R cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API R cuCtxGetLimit(size_t* v, CUlimit) { *v = 1 << 20; return CUDA_SUCCESS; }

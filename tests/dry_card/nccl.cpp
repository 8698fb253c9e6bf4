// A fake NCCL for processes of one machine: collectives over shared memory, made when they are called.
// The dtypes and functions are those that torch and vLLM call. See README.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))
static const int SUCCESS = 0, SYSTEM_ERROR = 2, INVALID = 4;
static const size_t SLOT = 64ul << 20;
extern "C" void dry_card_use_stream(void*) __attribute__((weak));
extern "C" int cudaGetDevice(int*) __attribute__((weak));
struct Mail { std::atomic<uint64_t> sent, taken; };  // of one (from, to): one message piece at a time
struct Head { std::atomic<uint32_t> arrived, generation, joined; std::atomic<int> dead; int64_t note[64][2]; Mail mail[64][64]; };
struct Comm { std::string name; int rank, n, device; Head* head; char* slots; int splits = 0; std::atomic<bool> aborted{false}; };
static size_t length(int n) { return sizeof(Head) + (size_t)n * SLOT + (size_t)n * n * SLOT; }
static thread_local const char* last = "";
static int depth_of(int d) { static thread_local int depth = 0; depth += d; return depth; }
static std::vector<std::function<int()>>& queue() { static thread_local std::vector<std::function<int()>> q; return q; }

static bool wait_until(Comm* c, const std::function<bool()>& done) {
  for (long i = 0; !done(); i++) {
    if (c->aborted) return false;
    if (i > 200) usleep(i > 5000 ? 500 : 20);
  }
  return true;
}
static bool barrier(Comm* c) {
  uint32_t g = c->head->generation.load();
  if (c->head->arrived.fetch_add(1) + 1 == (uint32_t)c->n) { c->head->arrived = 0; c->head->generation++; return true; }
  return wait_until(c, [&] { return c->head->generation.load() != g; });
}
static int open_comm(Comm** out, int n, const std::string& name, int rank) {
  int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600); if (fd < 0) return SYSTEM_ERROR;
  if (ftruncate(fd, length(n))) return SYSTEM_ERROR;
  char* m = (char*)mmap(0, length(n), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0); close(fd);
  if (m == MAP_FAILED) return SYSTEM_ERROR;
  int device = 0; if (cudaGetDevice) cudaGetDevice(&device);
  auto* c = new Comm; c->name = name; c->rank = rank; c->n = n; c->device = device; c->head = (Head*)m; c->slots = m + sizeof(Head);
  c->head->joined++; if (!wait_until(c, [&] { return c->head->joined.load() >= (uint32_t)n; }) || !barrier(c)) return SYSTEM_ERROR;
  if (rank == 0) shm_unlink(name.c_str());
  *out = c; return SUCCESS;
}
static size_t size_of(int t) { switch (t) { case 0: case 1: case 10: case 11: return 1; case 6: case 9: return 2; case 2: case 3: case 7: return 4; default: return 8; } }
static float half_to(uint16_t h) { uint32_t s = (h & 0x8000u) << 16, e = (h >> 10) & 31, m = h & 1023; if (e == 31) { uint32_t u = s | 0x7f800000u | (m << 13); float f; memcpy(&f, &u, 4); return f; } float f = e ? __builtin_ldexpf(1024 + m, (int)e - 25) : __builtin_ldexpf(m, -24); return s ? -f : f; }
static double get(const char* p, size_t i, int t) {
  switch (t) {
    case 0: return ((int8_t*)p)[i]; case 1: return ((uint8_t*)p)[i]; case 2: return ((int32_t*)p)[i]; case 3: return ((uint32_t*)p)[i];
    case 4: return (double)((int64_t*)p)[i]; case 5: return (double)((uint64_t*)p)[i]; case 6: return half_to(((uint16_t*)p)[i]);
    case 7: return ((float*)p)[i]; case 8: return ((double*)p)[i];
    case 9: { uint32_t u = (uint32_t)((uint16_t*)p)[i] << 16; float f; memcpy(&f, &u, 4); return f; }
  }
  return 0;
}
static void put(char* p, size_t i, int t, double v) {
  switch (t) {
    case 0: ((int8_t*)p)[i] = v; break; case 1: ((uint8_t*)p)[i] = v; break; case 2: ((int32_t*)p)[i] = v; break; case 3: ((uint32_t*)p)[i] = v; break;
    case 4: ((int64_t*)p)[i] = v; break; case 5: ((uint64_t*)p)[i] = v; break; case 7: ((float*)p)[i] = v; break; case 8: ((double*)p)[i] = v; break;
    case 6: ((_Float16*)p)[i] = (_Float16)v; break;
    case 9: { float f = v; uint32_t u; memcpy(&u, &f, 4); if ((u & 0x7fffffff) <= 0x7f800000) u += 0x7fff + ((u >> 16) & 1); ((uint16_t*)p)[i] = u >> 16; break; }
  }
}
static std::vector<double>& premul() { static auto* v = new std::vector<double>; return *v; }
static void reduce(Comm* c, char* out, size_t from, size_t n, int t, int op) {  // elements [from, from + n) of every slot
  double factor = op >= 5 ? premul()[op - 5] : 1;
  for (size_t i = 0; i < n; i++) {
    if ((t == 4 || t == 5) && op == 0) { int64_t v = 0; for (int r = 0; r < c->n; r++) v += ((int64_t*)(c->slots + r * SLOT))[from + i]; ((int64_t*)out)[i] = v; continue; }
    double v = 0;
    for (int r = 0; r < c->n; r++) {
      double x = get(c->slots + r * SLOT, from + i, t) * factor;
      v = r == 0 ? x : op == 1 ? v * x : op == 2 ? (x > v ? x : v) : op == 3 ? (x < v ? x : v) : v + x;
    }
    put(out, i, t, op == 4 ? v / c->n : v);
  }
}
static int later(Comm* c, void* stream, std::function<int()> f) {
  if (!c) { last = "no communicator"; return INVALID; }
  auto g = [stream, f] { if (dry_card_use_stream) dry_card_use_stream(stream); return f(); };
  if (depth_of(0) > 0) { queue().push_back(g); return SUCCESS; }
  return g();
}
API int ncclGroupStart() { depth_of(1); return SUCCESS; }
API int ncclGroupEnd() {
  if (depth_of(-1) > 0) return SUCCESS;
  std::vector<std::function<int()>> q; q.swap(queue()); int r = SUCCESS; for (auto& f : q) { int e = f(); if (e) r = e; } return r;
}
API int ncclGroupSimulateEnd(void*) { return SUCCESS; }
API int ncclGetVersion(int* v) { *v = 22907; return SUCCESS; }
API const char* ncclGetErrorString(int r) { return r == 0 ? "no error" : "fake NCCL error"; }
API const char* ncclGetLastError(void*) { return last; }
struct Id { char b[128]; };
API int ncclGetUniqueId(Id* id) {
  memset(id, 0, sizeof *id); static std::atomic<int> k{0}; uint64_t r = 0; int fd = open("/dev/urandom", O_RDONLY); if (read(fd, &r, 8)) {} close(fd);
  const char* machine = getenv("DRY_CARD_MACHINE"); snprintf(id->b, 128, "/dry-card.%d.%.40s.nccl-%d-%d-%016lx", getuid(), machine ? machine : "0", getpid(), k++, r); return SUCCESS;
}
API int ncclCommInitRankConfig(Comm** out, int n, Id id, int rank, void*) {
  if (depth_of(0) > 0) { *out = nullptr; queue().push_back([=] { return open_comm(out, n, id.b, rank); }); return SUCCESS; }
  return open_comm(out, n, id.b, rank);
}
API int ncclCommInitRank(Comm** out, int n, Id id, int rank) { return ncclCommInitRankConfig(out, n, id, rank, nullptr); }
API int ncclCommInitRankScalable(Comm** out, int n, int rank, int, Id* ids, void*) { return ncclCommInitRankConfig(out, n, ids[0], rank, nullptr); }
API int ncclCommSplit(Comm* c, int color, int key, Comm** out, void*) {
  c->head->note[c->rank][0] = color; c->head->note[c->rank][1] = key; if (!barrier(c)) return SYSTEM_ERROR;
  int n = 0, rank = 0; for (int r = 0; r < c->n; r++) if (c->head->note[r][0] == color) { n++; if (c->head->note[r][1] < key || (c->head->note[r][1] == key && r < c->rank)) rank++; }
  int at = c->splits++; if (!barrier(c)) return SYSTEM_ERROR;
  if (color < 0) { *out = nullptr; return SUCCESS; }
  return open_comm(out, n, c->name + "-s" + std::to_string(at) + "-" + std::to_string(color), rank);
}
API int ncclCommDestroy(Comm*) { return SUCCESS; }
API int ncclCommFinalize(Comm*) { return SUCCESS; }
API int ncclCommAbort(Comm* c) { if (c) c->aborted = true; return SUCCESS; }
API int ncclCommRevoke(Comm* c, int) { if (c) c->aborted = true; return SUCCESS; }
API int ncclCommGetAsyncError(Comm*, int* e) { *e = SUCCESS; return SUCCESS; }
API int ncclCommCount(Comm* c, int* n) { *n = c->n; return SUCCESS; }
API int ncclCommUserRank(Comm* c, int* r) { *r = c->rank; return SUCCESS; }
API int ncclCommCuDevice(Comm* c, int* d) { *d = c->device; return SUCCESS; }
API int ncclCommRegister(Comm*, void*, size_t, void** h) { *h = (void*)1; return SUCCESS; }
API int ncclCommDeregister(Comm*, void*) { return SUCCESS; }
API int ncclCommWindowRegister(Comm*, void*, size_t, void** w, int) { *w = (void*)1; return SUCCESS; }
API int ncclCommWindowDeregister(Comm*, void*) { return SUCCESS; }
API int ncclRedOpCreatePreMulSum(int* op, void* scalar, int t, int, Comm*) { premul().push_back(get((char*)scalar, 0, t)); *op = 4 + (int)premul().size(); return SUCCESS; }
API int ncclRedOpDestroy(int, Comm*) { return SUCCESS; }
#define CHECK(x) do { if (!(x)) { last = "aborted"; return SYSTEM_ERROR; } } while (0)
API int ncclAllReduce(const void* s, void* d, size_t n, int t, int op, Comm* c, void* st) {
  return later(c, st, [=] { size_t z = size_of(t), per = SLOT / z;
    for (size_t a = 0; a < n; a += per) { size_t k = n - a < per ? n - a : per; memcpy(c->slots + c->rank * SLOT, (char*)s + a * z, k * z); CHECK(barrier(c)); reduce(c, (char*)d + a * z, 0, k, t, op); CHECK(barrier(c)); }
    return (int)SUCCESS; });
}
API int ncclReduce(const void* s, void* d, size_t n, int t, int op, int root, Comm* c, void* st) {
  return later(c, st, [=] { size_t z = size_of(t), per = SLOT / z;
    for (size_t a = 0; a < n; a += per) { size_t k = n - a < per ? n - a : per; memcpy(c->slots + c->rank * SLOT, (char*)s + a * z, k * z); CHECK(barrier(c)); if (c->rank == root) reduce(c, (char*)d + a * z, 0, k, t, op); CHECK(barrier(c)); }
    return (int)SUCCESS; });
}
API int ncclBroadcast(const void* s, void* d, size_t n, int t, int root, Comm* c, void* st) {
  return later(c, st, [=] { size_t z = size_of(t), total = n * z;
    for (size_t a = 0; a < total; a += SLOT) { size_t k = total - a < SLOT ? total - a : SLOT; if (c->rank == root) memcpy(c->slots, (char*)s + a, k); CHECK(barrier(c)); if (c->rank != root || s != d) memcpy((char*)d + a, c->slots, k); CHECK(barrier(c)); }
    return (int)SUCCESS; });
}
API int ncclBcast(void* b, size_t n, int t, int root, Comm* c, void* st) { return ncclBroadcast(b, b, n, t, root, c, st); }
API int ncclAllGather(const void* s, void* d, size_t n, int t, Comm* c, void* st) {
  return later(c, st, [=] { size_t total = n * size_of(t);
    for (size_t a = 0; a < total; a += SLOT) { size_t k = total - a < SLOT ? total - a : SLOT; memcpy(c->slots + c->rank * SLOT, (char*)s + a, k); CHECK(barrier(c)); for (int r = 0; r < c->n; r++) memcpy((char*)d + r * total + a, c->slots + r * SLOT, k); CHECK(barrier(c)); }
    return (int)SUCCESS; });
}
API int ncclReduceScatter(const void* s, void* d, size_t n, int t, int op, Comm* c, void* st) {
  return later(c, st, [=] { size_t z = size_of(t), per = SLOT / z / c->n;
    for (size_t a = 0; a < n; a += per) { size_t k = n - a < per ? n - a : per; for (int r = 0; r < c->n; r++) memcpy(c->slots + c->rank * SLOT + r * k * z, (char*)s + (r * n + a) * z, k * z); CHECK(barrier(c)); reduce(c, (char*)d + a * z, c->rank * k, k, t, op); CHECK(barrier(c)); }
    return (int)SUCCESS; });
}
static char* box(Comm* c, int from, int to) { return c->slots + (size_t)c->n * SLOT + ((size_t)from * c->n + to) * SLOT; }
API int ncclSend(const void* s, size_t n, int t, int peer, Comm* c, void* st) {
  auto f = [=] { size_t total = n * size_of(t); auto& m = c->head->mail[c->rank][peer];
    for (size_t a = 0; a < total || (!total && !a); a += SLOT) { size_t k = total - a < SLOT ? total - a : SLOT; CHECK(wait_until(c, [&] { return m.sent == m.taken; })); memcpy(box(c, c->rank, peer), (char*)s + a, k); m.sent++; if (!total) break; }
    return (int)SUCCESS; };
  if (depth_of(0) > 0) { queue().insert(queue().begin(), [=] { if (dry_card_use_stream) dry_card_use_stream(st); return f(); }); return SUCCESS; }  // before the receives
  return later(c, st, f);
}
API int ncclRecv(void* d, size_t n, int t, int peer, Comm* c, void* st) {
  return later(c, st, [=] { size_t total = n * size_of(t); auto& m = c->head->mail[peer][c->rank];
    for (size_t a = 0; a < total || (!total && !a); a += SLOT) { size_t k = total - a < SLOT ? total - a : SLOT; CHECK(wait_until(c, [&] { return m.sent != m.taken; })); memcpy((char*)d + a, box(c, peer, c->rank), k); m.taken++; if (!total) break; }
    return (int)SUCCESS; });
}
API int ncclMemAlloc(void** p, size_t n) { extern int cudaMalloc(void**, size_t) __asm__("cudaMalloc"); return cudaMalloc(p, n); }
API int ncclMemFree(void* p) { extern int cudaFree(void*) __asm__("cudaFree"); return cudaFree(p); }

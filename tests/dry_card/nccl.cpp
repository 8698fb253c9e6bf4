// NCCL for the processes of one machine. What a rank gives is a file in shared memory, which other ranks read.
//
// In a collective each rank writes its file and waits for those of all ranks. So all have read the files of the
// collective before, and a rank removes its own. It runs in the calling thread and returns when the data is there; real
// NCCL returns at once and works on the stream.
#include "cards.h"

#include <cuda_bf16.h>

extern "C" void dry_card_use_stream(void* stream);
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID = 4 };  // ncclResult_t
enum { SUM, PROD, MAX, MIN, AVG, FIRST_OF_USER };  // ncclRedOp_t
#define CHECK(good) if (!(good)) return (int)SYSTEM_ERROR

struct Comm {
  std::string name;
  int rank, n, round = 0;  // of collectives
  std::map<int, int> sent, received;  // messages, by rank
  std::atomic<bool> aborted{false};
  std::string file(int round, int rank) { return name + "-" + std::to_string(round) + "-" + std::to_string(rank); }
  std::string message(int from, int to, int number) { return file(number, from) + "-to-" + std::to_string(to); }
  int put(const std::string& file, const void* data, size_t n) {
    std::ofstream out(file + ".part", std::ios::binary);
    out.write((const char*)data, n), out.close();
    bool good = out && !rename((file + ".part").c_str(), file.c_str());  // it appears when it is complete
    return good ? SUCCESS : (perror("[dry_card] /dev/shm"), SYSTEM_ERROR);
  }
  int get(const std::string& file, void* to, size_t n, size_t first = 0) {
    std::ifstream in(file, std::ios::binary);
    for (long i = 0; !in.is_open(); i++, in.open(file, std::ios::binary)) {
      CHECK(!aborted);
      if (i > 20) usleep(std::min(i, 500l));  // the ranks share few cores
    }
    CHECK(in.seekg(first).read((char*)to, n));
    return SUCCESS;
  }
};

// ---- Reductions, in double precision for floating-point types, in int64 for integers
static auto& factors = *new std::vector<double>;  // of ncclRedOpCreatePreMulSum
static double wide(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T> static std::conditional_t<std::is_integral_v<T>, int64_t, double> wide(T x) { return x; }
template <class T> static int reduce_as(Comm* c, size_t first, void* out, size_t n, int op) {
  std::vector<T> part(n);
  std::vector<decltype(wide(T()))> sum(n);
  for (int r = 0; r < c->n; r++) {
    TRY(c->get(c->file(c->round, r), part.data(), n * sizeof(T), first * sizeof(T)));
    for (size_t i = 0; i < n; i++) {
      auto x = wide(part[i]), &s = sum[i];
      if (op >= FIRST_OF_USER) x *= factors[op - FIRST_OF_USER];
      s = !r ? x : op == PROD ? s * x : op == MAX ? std::max(s, x) : op == MIN ? std::min(s, x) : s + x;
    }
  }
  for (size_t i = 0; i < n; i++) ((T*)out)[i] = T(op == AVG ? sum[i] / c->n : sum[i]);
  return SUCCESS;
}
struct Type { size_t size; int (*reduce)(Comm* c, size_t first, void* out, size_t n, int op); };
template <class T> constexpr Type type_of = {sizeof(T), reduce_as<T>};
constexpr Type TYPES[] = {  // ncclDataType_t; without a reduction: uint64, float16 and two of 8 bits
    type_of<int8_t>, type_of<uint8_t>, type_of<int32_t>, type_of<uint32_t>, type_of<int64_t>, {8}, {2},
    type_of<float>, type_of<double>, type_of<__nv_bfloat16>, {1}, {1}};
API int ncclRedOpCreatePreMulSum(int* op, void* x, int type) {
  bool two_bytes = TYPES[type].size == 2, four_bytes = TYPES[type].size == 4;
  factors.push_back(two_bytes ? wide(*(__nv_bfloat16*)x) : four_bytes ? *(float*)x : *(double*)x);
  return *op = FIRST_OF_USER + (int)factors.size() - 1, SUCCESS;
}

// ---- Collectives. Their parameters begin with DATA, and end with ON.
#define DATA const void* from, char* to, size_t n, int type
#define ON Comm* c, void* stream
static int collective(const void* from, size_t bytes, ON, std::function<int()> read) {
  dry_card_use_stream(stream);
  TRY(c->put(c->file(++c->round, c->rank), from, bytes));
  TRY(read());
  return unlink(c->file(c->round - 1, c->rank).c_str()), SUCCESS;
}
static int gather(DATA, int first, int last, ON) {  // from the ranks `first` to `last`
  size_t bytes = n * TYPES[type].size;
  return collective(from, first <= c->rank && c->rank <= last ? bytes : 0, c, stream, [=] {
    for (int r = 0; r < c->n; r++) {
      bool wanted = first <= r && r <= last;
      TRY(c->get(c->file(c->round, r), wanted ? to + (r - first) * bytes : to, wanted ? bytes : 0));
    }
    return (int)SUCCESS;
  });
}
static int reduce(DATA, size_t part, size_t first, int op, ON) {  // the result has `part` elements from `first` on
  auto call = TYPES[type].reduce;
  if (!call) return fprintf(stderr, "[dry_card] no reduction of ncclDataType_t %d\n", type), INVALID;
  return collective(from, n * TYPES[type].size, c, stream, [=] { return call(c, first, to, part, op); });
}
API int ncclAllGather(DATA, ON) { return gather(from, to, n, type, 0, c->n - 1, c, stream); }
API int ncclAlltoAll(DATA, ON) {  // n elements for each rank
  size_t bytes = n * TYPES[type].size;
  return collective(from, c->n * bytes, c, stream, [=] {
    for (int r = 0; r < c->n; r++) TRY(c->get(c->file(c->round, r), to + r * bytes, bytes, c->rank * bytes));
    return (int)SUCCESS;
  });
}
API int ncclBroadcast(DATA, int root, ON) { return gather(from, to, n, type, root, root, c, stream); }
API int ncclBcast(char* data, size_t n, int type, int root, ON) {
  return ncclBroadcast(data, data, n, type, root, c, stream);
}
API int ncclAllReduce(DATA, int op, ON) { return reduce(from, to, n, type, n, 0, op, c, stream); }
API int ncclReduceScatter(DATA, int op, ON) {
  return reduce(from, to, n * c->n, type, n, c->rank * n, op, c, stream);
}
API int ncclReduce(DATA, int op, int root, ON) {
  return reduce(from, to, n, type, c->rank == root ? n : 0, 0, op, c, stream);
}

// ---- Messages. In a group a rank receives at the end, so that two ranks can send to each other.
static thread_local int depth = 0;
static thread_local std::vector<std::function<int()>> receives;
API int ncclGroupStart() { depth++; return SUCCESS; }
API int ncclGroupEnd() {
  if (--depth) return SUCCESS;
  for (auto& receive : std::exchange(receives, {})) TRY(receive());
  return SUCCESS;
}
API int ncclSend(const void* from, size_t n, int type, int peer, ON) {
  dry_card_use_stream(stream);
  return c->put(c->message(c->rank, peer, c->sent[peer]++), from, n * TYPES[type].size);
}
API int ncclRecv(void* to, size_t n, int type, int peer, ON) {
  auto receive = [=] {
    dry_card_use_stream(stream);
    std::string file = c->message(peer, c->rank, c->received[peer]++);
    TRY(c->get(file, to, n * TYPES[type].size));
    return unlink(file.c_str()), (int)SUCCESS;
  };
  return depth ? receives.push_back(receive), SUCCESS : receive();
}

// ---- Communicators
static int join(Comm** out, int n, const std::string& name, int rank) {
  *out = new Comm{name, rank, n};  // never deleted: a thread may still wait in it
  return ncclAllGather(nullptr, nullptr, 0, 0, *out, nullptr);  // wait for all ranks
}
struct Id { char text[128]; };
API int ncclGetUniqueId(Id* out) {
  static std::random_device random;  // a process number alone may come again
  std::string name = segment("nccl") + "-" + std::to_string(getpid()) + "-" + std::to_string(random());
  return snprintf(out->text, sizeof out->text, "%s", name.c_str()), SUCCESS;
}
API int ncclCommInitRank(Comm** out, int n, Id id, int rank) { return join(out, n, id.text, rank); }
ALSO(ncclCommInitRankConfig, ncclCommInitRank)
API int ncclCommSplit(Comm* c, int color, int key, Comm** out) {
  std::array<int, 3> own{color, key, c->rank};
  std::vector<std::array<int, 3>> all(c->n);
  TRY(ncclAllGather(own.data(), (char*)all.data(), sizeof own, 0, c, nullptr));
  int n = std::count_if(all.begin(), all.end(), [&](auto& one) { return one[0] == color; });
  int rank = std::count_if(all.begin(), all.end(), [&](auto& one) { return one[0] == color && one < own; });
  return *out = nullptr, color < 0 ? SUCCESS : join(out, n, c->file(c->round, color) + "-split", rank);
}
API int ncclCommAbort(Comm* c) { c->aborted = true; return SUCCESS; }
API int ncclCommGetAsyncError(Comm*, int* error) { *error = SUCCESS; return SUCCESS; }
API int ncclCommCount(Comm* c, int* n) { *n = c->n; return SUCCESS; }
API int ncclGetVersion(int* version) { *version = 22907; return SUCCESS; }
API const char* ncclGetErrorString(int result) { return result ? "an error of the stand-in for NCCL" : "no error"; }
API const char* ncclGetLastError(Comm*) { return ""; }

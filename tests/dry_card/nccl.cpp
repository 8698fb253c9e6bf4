// NCCL for the processes of one machine. The ranks of a communicator share a board with addresses of their memory.
//
// A collective puts the address of its data on the board, waits for all ranks, reads what it needs from their memory
// (process_vm_readv, which a container has to allow), and waits until all have read. It runs in the calling thread and
// returns when the data is there; real NCCL returns at once and works on the stream. Not shown: deadlocks of operations
// that wait for each other on the card, transports, and the memory that NCCL takes.
#include "cards.h"

#include <cuda_bf16.h>
#include <sys/prctl.h>
#include <sys/uio.h>

extern "C" void dry_card_use_stream(void* stream);
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID = 4 };  // ncclResult_t
enum { SUM, PROD, MAX, MIN, AVG, FIRST_OF_USER };  // ncclRedOp_t
constexpr int MAX_RANKS = 64;
#define CHECK(good) if (!(good)) return (int)SYSTEM_ERROR

struct Entry { int pid, color, key; const char* data; };  // of a rank; color and key of ncclCommSplit
struct Mail { std::atomic<uint64_t> sent, taken; const char* data; };  // from one rank to another, one at a time
struct Board {
  std::atomic<uint32_t> joined, arrived, generation;
  Entry ranks[MAX_RANKS];
  Mail mail[MAX_RANKS][MAX_RANKS];
};
struct Comm {
  std::string name;
  int rank, n, splits = 0;
  Board* board = nullptr;
  std::atomic<bool> aborted{false};
  std::vector<char> outbox[MAX_RANKS];  // what was sent to each rank last: the program may write its own memory again
  bool wait(const std::function<bool()>& done) {
    for (long i = 0; !done(); i++) {
      if (aborted) return false;
      if (i > 20) usleep(std::min(i, 500l));  // the ranks share few cores
    }
    return true;
  }
  bool barrier() {
    uint32_t before = board->generation;
    if (++board->arrived < (uint32_t)n) return wait([&] { return board->generation != before; });
    board->arrived = 0, board->generation++;
    return true;
  }
  bool read(int from_rank, void* to, const char* from, size_t n) {
    for (ssize_t done = 0; n; n -= done, from += done, to = (char*)to + done) {  // a call reads 2 GiB at most
      iovec here{to, n}, there{(void*)from, n};
      done = process_vm_readv(board->ranks[from_rank].pid, &here, 1, &there, 1, 0);
      if (done <= 0) return perror("[dry_card] cannot read memory of another rank"), false;
    }
    return true;
  }
};

// ---- Groups: between ncclGroupStart and ncclGroupEnd operations are collected
static thread_local int depth = 0;
static thread_local std::deque<std::function<int()>> collected;
API int ncclGroupStart() { depth++; return SUCCESS; }
API int ncclGroupEnd() {
  int result = SUCCESS;
  if (--depth) return result;
  for (auto& operation : std::exchange(collected, {})) result = std::max(result, operation());
  return result;
}
static int submit(std::function<int()> operation) {
  return depth ? collected.push_back(operation), SUCCESS : operation();
}

// ---- Communicators
static int join(Comm** out, int n, const std::string& name, int rank) {
  auto* c = *out = new Comm{name, rank, n};  // never deleted: a thread may still wait in it
  int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  CHECK(fd >= 0 && !ftruncate(fd, sizeof(Board)));
  c->board = (Board*)mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(c->board != MAP_FAILED);
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // some kernels admit the parent alone as a reader
  close(fd), c->board->ranks[rank].pid = getpid(), c->board->joined++;
  CHECK(c->wait([&] { return c->board->joined >= (uint32_t)n; }) && c->barrier());
  if (rank == 0) shm_unlink(name.c_str());  // the mappings stay
  return SUCCESS;
}
struct Id { char text[128]; };
API int ncclGetUniqueId(Id* out) {
  static std::random_device random;  // a process number alone may come again
  std::string name = segment("nccl") + "-" + std::to_string(getpid()) + "-" + std::to_string(random());
  return snprintf(out->text, sizeof out->text, "%s", name.c_str()), SUCCESS;
}
API int ncclCommInitRank(Comm** out, int n, Id id, int rank) {
  return submit([=] { return join(out, n, id.text, rank); });
}
ALSO(ncclCommInitRankConfig, ncclCommInitRank)
API int ncclCommSplit(Comm* c, int color, int key, Comm** out) {
  Entry* all = c->board->ranks;
  all[c->rank].color = color, all[c->rank].key = key;
  CHECK(c->barrier());
  auto before = [&](int r) { return all[r].key < key || (all[r].key == key && r < c->rank); };
  int n = 0, rank = 0;
  for (int r = 0; r < c->n; r++) {
    if (all[r].color == color) n++, rank += before(r);
  }
  std::string name = c->name + "-" + std::to_string(c->splits++) + "-" + std::to_string(color);
  CHECK(c->barrier());
  return *out = nullptr, color < 0 ? (int)SUCCESS : join(out, n, name, rank);
}
API int ncclCommDestroy(Comm* c) { return munmap(c->board, sizeof(Board)), SUCCESS; }
API int ncclCommAbort(Comm* c) { c->aborted = true; return SUCCESS; }
API int ncclCommGetAsyncError(Comm*, int* error) { *error = SUCCESS; return SUCCESS; }
API int ncclCommCount(Comm* c, int* n) { *n = c->n; return SUCCESS; }
API int ncclGetVersion(int* version) { *version = 22907; return SUCCESS; }
API const char* ncclGetErrorString(int result) { return result ? "an error of the stand-in for NCCL" : "no error"; }
API const char* ncclGetLastError(Comm*) { return ""; }

// ---- Reductions, in double precision for floating-point types, in int64 for integers
static auto& factors = *new std::vector<double>;  // of ncclRedOpCreatePreMulSum
static double wide(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T> static std::conditional_t<std::is_integral_v<T>, int64_t, double> wide(T x) { return x; }
template <class T> static int reduce_as(Comm* c, size_t first, void* out, size_t n, int op) {
  std::vector<T> part(n);
  std::vector<decltype(wide(T()))> sum(n);
  for (int r = 0; r < c->n; r++) {
    CHECK(c->read(r, part.data(), c->board->ranks[r].data + first * sizeof(T), n * sizeof(T)));
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
static int exchange(const void* from, char* to, size_t bytes, ON, std::function<int(char*)> take) {
  return submit([=] {
    dry_card_use_stream(stream);
    c->board->ranks[c->rank].data = (const char*)from;
    CHECK(c->barrier());
    std::vector<char> result(bytes);
    int error = take(result.data());
    CHECK(c->barrier());  // the result may take the place of the data
    return memcpy(to, result.data(), bytes), error;
  });
}
static int gather(DATA, int first, int last, ON) {  // from the ranks `first` to `last`
  size_t bytes = n * TYPES[type].size;
  return exchange(from, to, bytes * (last - first + 1), c, stream, [=](char* out) {
    for (int r = first; r <= last; r++, out += bytes) CHECK(c->read(r, out, c->board->ranks[r].data, bytes));
    return (int)SUCCESS;
  });
}
static int reduce(DATA, size_t first, int op, ON) {  // n elements, which begin at `first` in the data of each rank
  auto call = TYPES[type].reduce;
  if (!call) return fprintf(stderr, "[dry_card] no reduction of ncclDataType_t %d\n", type), INVALID;
  return exchange(from, to, n * TYPES[type].size, c, stream, [=](char* out) { return call(c, first, out, n, op); });
}
API int ncclAllGather(DATA, ON) { return gather(from, to, n, type, 0, c->n - 1, c, stream); }
API int ncclBroadcast(DATA, int root, ON) { return gather(from, to, n, type, root, root, c, stream); }
API int ncclBcast(char* data, size_t n, int type, int root, ON) {
  return ncclBroadcast(data, data, n, type, root, c, stream);
}
API int ncclAllReduce(DATA, int op, ON) { return reduce(from, to, n, type, 0, op, c, stream); }
API int ncclReduceScatter(DATA, int op, ON) { return reduce(from, to, n, type, c->rank * n, op, c, stream); }
API int ncclReduce(DATA, int op, int root, ON) {
  return reduce(from, to, c->rank == root ? n : 0, type, 0, op, c, stream);
}

// ---- Messages. A sender goes on at once, but it has to live until its message is taken.
API int ncclSend(const char* from, size_t n, int type, int peer, ON) {
  auto send = [=] {
    dry_card_use_stream(stream);
    Mail& mail = c->board->mail[c->rank][peer];
    CHECK(c->wait([&] { return mail.sent == mail.taken; }));
    c->outbox[peer].assign(from, from + n * TYPES[type].size);
    mail.data = c->outbox[peer].data(), mail.sent++;
    return (int)SUCCESS;
  };
  // In a group the sends come first, so that two ranks can send to each other.
  return depth ? collected.push_front(send), SUCCESS : send();
}
API int ncclRecv(char* to, size_t n, int type, int peer, ON) {
  return submit([=] {
    dry_card_use_stream(stream);
    Mail& mail = c->board->mail[peer][c->rank];
    CHECK(c->wait([&] { return mail.sent != mail.taken; }) && c->read(peer, to, mail.data, n * TYPES[type].size));
    mail.taken++;
    return (int)SUCCESS;
  });
}

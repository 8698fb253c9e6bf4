// NCCL for the processes of one machine: each communicator is a piece of shared memory.
//
// A collective copies the data into the slot of its rank, waits for all ranks, and reads what it needs. It runs in the
// calling thread and returns when the data is there; real NCCL returns at once and works on the stream. Not shown:
// deadlocks of operations that wait for each other on the card, transports, and the memory that NCCL takes.
#include "cards.h"

extern "C" void dry_card_use_stream(void* stream);
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID = 4 };  // ncclResult_t
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16, FP8_A, FP8_B };  // ncclDataType_t
enum { SUM, PROD, MAX, MIN, AVG, FIRST_OF_USER };  // ncclRedOp_t
constexpr size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
constexpr size_t SLOT = 32 * MIB;  // longer data goes in pieces
constexpr int MAX_RANKS = 64;
#define CHECK(good) if (!(good)) return (int)SYSTEM_ERROR

struct Mailbox { std::atomic<uint64_t> sent, taken; };  // from one rank to another; it holds one piece
struct Board {
  std::atomic<uint32_t> joined, arrived, generation;
  int split[MAX_RANKS][2];  // color and key of each rank in ncclCommSplit
  Mailbox mail[MAX_RANKS][MAX_RANKS];
};
struct Comm {
  std::string name;
  int rank, n, splits = 0;
  Board* board = nullptr;  // followed by a slot for each rank, then by one for each mailbox
  std::atomic<bool> aborted{false};
  size_t length() { return sizeof(Board) + (size_t)n * (n + 1) * SLOT; }
  char* slot(int rank) { return (char*)(board + 1) + rank * SLOT; }
  char* box(int from, int to) { return slot(n + from * n + to); }
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
};

// ---- Groups: between ncclGroupStart and ncclGroupEnd operations are collected
static thread_local int depth = 0;
static thread_local std::vector<std::function<int()>> collected;
static int submit(std::function<int()> operation, bool first = false) {
  if (!depth) return operation();
  return collected.insert(first ? collected.begin() : collected.end(), operation), SUCCESS;
}
API int ncclGroupStart() { depth++; return SUCCESS; }
API int ncclGroupEnd() {
  int result = SUCCESS;
  if (--depth) return result;
  for (auto& operation : std::exchange(collected, {})) result = std::max(result, operation());
  return result;
}

// ---- Communicators
static int join(Comm** out, int n, const std::string& name, int rank) {
  auto* c = new Comm{name, rank, n};
  int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  CHECK(fd >= 0 && !ftruncate(fd, c->length()));
  c->board = (Board*)mmap(nullptr, c->length(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  CHECK(c->board != MAP_FAILED);
  close(fd), c->board->joined++;
  CHECK(c->wait([&] { return c->board->joined >= (uint32_t)n; }) && c->barrier());
  if (rank == 0) shm_unlink(name.c_str());  // the mappings stay
  return *out = c, SUCCESS;
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
API int ncclCommSplit(Comm* c, int color, int key, Comm** out, void*) {
  auto& split = c->board->split;
  split[c->rank][0] = color, split[c->rank][1] = key;
  CHECK(c->barrier());
  int n = 0, rank = 0;
  for (int r = 0; r < c->n; r++) {
    if (split[r][0] == color) n++, rank += split[r][1] < key || (split[r][1] == key && r < c->rank);
  }
  std::string name = c->name + "-" + std::to_string(c->splits++) + "-" + std::to_string(color);
  CHECK(c->barrier());
  return *out = nullptr, color < 0 ? (int)SUCCESS : join(out, n, name, rank);
}
API int ncclCommDestroy(Comm* c) { return munmap(c->board, c->length()), SUCCESS; }
API int ncclCommAbort(Comm* c) { c->aborted = true; return SUCCESS; }  // never deleted: a thread may still wait in it
API int ncclCommGetAsyncError(Comm*, int* error) { *error = SUCCESS; return SUCCESS; }
API int ncclCommCount(Comm* c, int* n) { *n = c->n; return SUCCESS; }
API int ncclCommUserRank(Comm* c, int* rank) { *rank = c->rank; return SUCCESS; }
API int ncclGetVersion(int* version) { *version = 22907; return SUCCESS; }
API const char* ncclGetErrorString(int result) { return result ? "an error of the stand-in for NCCL" : "no error"; }
API const char* ncclGetLastError(Comm*) { return ""; }

// ---- Reductions, in double precision for floating-point types, in int64 for integers
struct BFloat16 {
  uint16_t bits;
  operator double() const { uint32_t wide = (uint32_t)bits << 16; float f; return memcpy(&f, &wide, 4), f; }
  BFloat16& operator=(double value) {  // rounds to even; a NaN stays one
    float f = (float)value;
    uint32_t wide;
    memcpy(&wide, &f, 4);
    return bits = (wide + (f == f ? 0x7fff + (wide >> 16 & 1) : 0)) >> 16, *this;
  }
};
static auto& factors = *new std::vector<double>;  // of ncclRedOpCreatePreMulSum
template <class T, class Wide = double> static int reduce_as(Comm* c, char* out, size_t n, int op) {
  for (size_t i = 0; i < n; i++) {
    Wide sum = 0;
    for (int r = 0; r < c->n; r++) {
      Wide x = (Wide)((T*)c->slot(r))[i];
      if (op >= FIRST_OF_USER) x = (Wide)(x * factors[op - FIRST_OF_USER]);
      sum = !r ? x : op == PROD ? sum * x : op == MAX ? std::max(sum, x) : op == MIN ? std::min(sum, x) : sum + x;
    }
    ((T*)out)[i] = op == AVG ? sum / c->n : sum;
  }
  return SUCCESS;
}
static int reduce(Comm* c, char* out, size_t n, int type, int op) {
  switch (type) {
    case INT8: return reduce_as<int8_t, int64_t>(c, out, n, op);
    case UINT8: return reduce_as<uint8_t, int64_t>(c, out, n, op);
    case INT32: return reduce_as<int32_t, int64_t>(c, out, n, op);
    case INT64: return reduce_as<int64_t, int64_t>(c, out, n, op);
    case FLOAT: return reduce_as<float>(c, out, n, op);
    case DOUBLE: return reduce_as<double>(c, out, n, op);
    case BFLOAT16: return reduce_as<BFloat16>(c, out, n, op);
  }
  return fprintf(stderr, "[dry_card] no reduction of ncclDataType_t %d\n", type), INVALID;
}
API int ncclRedOpCreatePreMulSum(int* op, void* x, int type, int, Comm*) {
  factors.push_back(type == BFLOAT16 ? (double)*(BFloat16*)x : type == DOUBLE ? *(double*)x : *(float*)x);
  return *op = FIRST_OF_USER + (int)factors.size() - 1, SUCCESS;
}

// ---- Collectives: for each piece all ranks fill their slots, wait, and read what they need
typedef std::function<int(size_t first_byte, size_t n)> Take;
static int exchange(Comm* c, const void* from, size_t n, size_t size, void* stream, Take take) {
  return submit([=] {
    dry_card_use_stream(stream);
    for (size_t at = 0; at < n; at += SLOT / size) {
      size_t piece = std::min(SLOT / size, n - at);
      if (from) memcpy(c->slot(c->rank), (char*)from + at * size, piece * size);
      CHECK(c->barrier());
      int error = take(at * size, piece);
      CHECK(c->barrier());
      if (error) return error;
    }
    return (int)SUCCESS;
  });
}
API int ncclReduce(const void* from, char* to, size_t n, int type, int op, int root, Comm* c, void* stream) {
  return exchange(c, from, n, SIZES[type], stream, [=](size_t at, size_t n) {
    return root >= 0 && root != c->rank ? (int)SUCCESS : reduce(c, to + at, n, type, op);
  });
}
API int ncclAllReduce(const void* from, char* to, size_t n, int type, int op, Comm* c, void* stream) {
  return ncclReduce(from, to, n, type, op, -1, c, stream);
}
API int ncclReduceScatter(const char* from, char* to, size_t n, int type, int op, Comm* c, void* stream) {
  int error = SUCCESS;
  for (int r = 0; r < c->n; r++) {
    error = std::max(error, ncclReduce(from + r * n * SIZES[type], to, n, type, op, r, c, stream));
  }
  return error;
}
API int ncclBroadcast(const void* from, char* to, size_t n, int type, int root, Comm* c, void* stream) {
  return exchange(c, from, n, SIZES[type], stream, [=](size_t at, size_t n) {
    return memcpy(to + at, c->slot(root), n * SIZES[type]), (int)SUCCESS;
  });
}
API int ncclBcast(char* data, size_t n, int type, int root, Comm* c, void* stream) {
  return ncclBroadcast(data, data, n, type, root, c, stream);
}
API int ncclAllGather(const void* from, char* to, size_t n, int type, Comm* c, void* stream) {
  int error = SUCCESS;
  for (int r = 0; r < c->n; r++) {
    error = std::max(error, ncclBroadcast(from, to + r * n * SIZES[type], n, type, r, c, stream));
  }
  return error;
}

// ---- Messages. In a group the sends come first, so that two ranks can send to each other.
static int message(Comm* c, bool sends, char* data, size_t bytes, int from, int to, void* stream) {
  return submit([=] {
    dry_card_use_stream(stream);
    Mailbox& mail = c->board->mail[from][to];
    for (size_t at = 0; at < bytes; at += SLOT) {
      CHECK(c->wait([&] { return (mail.sent == mail.taken) == sends; }));
      memcpy(sends ? c->box(from, to) : data + at, sends ? data + at : c->box(from, to), std::min(SLOT, bytes - at));
      (sends ? mail.sent : mail.taken)++;
    }
    return (int)SUCCESS;
  }, sends);
}
API int ncclSend(char* from, size_t n, int type, int peer, Comm* c, void* stream) {
  return message(c, true, from, n * SIZES[type], c->rank, peer, stream);
}
API int ncclRecv(char* to, size_t n, int type, int peer, Comm* c, void* stream) {
  return message(c, false, to, n * SIZES[type], peer, c->rank, stream);
}

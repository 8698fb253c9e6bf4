// The machine that the other files share: its cards, the memory that processes use of them, and blocks of memory.
//
// A card is a number, a UUID and an amount of memory. How much each process uses of each card stands in shared memory,
// so free memory and nvidia-smi are right across processes.
#pragma once
#include <bits/stdc++.h>
#include <driver_types.h>  // types without the declarations of the calls, which would fix all their parameters
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector_types.h>

#define API extern "C"
// Give a call a second name. A call may leave out the last parameters of its callers.
#define ALSO(name, call) __asm__(".globl " #name "\n.type " #name ", @function\n.set " #name ", " #call);
constexpr long MIB = 1 << 20, PAGE = 2 * MIB;  // CUDA gives out memory in pages of 2 MiB
constexpr long CONTEXT = 500 * MIB;            // memory that a process needs on a card before its first allocation
constexpr int MAX_CARDS = 16, FIRST_BUS = 0x10;  // PCI bus of card 0
constexpr char CARD_NAME[] = "NVIDIA H100 80GB HBM3";

inline auto& mutex = *new std::recursive_mutex;  // never destroyed: libraries free memory while the process exits
#define LOCK std::lock_guard<std::recursive_mutex> lock_(mutex)

// ---- Settings: the variables DRY_CARD_<name>; environment.py sets the first three
inline std::string text_setting(const char* name) {
  const char* text = getenv((std::string("DRY_CARD_") + name).c_str()); return text ? text : "";
}
inline double setting(const char* name) { return atof(text_setting(name).c_str()); }
inline int n_cards() { return (int)setting("COUNT"); }
inline long card_bytes() { return (long)(setting("GIB") * 1024 * MIB); }
inline std::string machine() { return text_setting("MACHINE"); }
inline std::string segment(const std::string& name) {  // a file in the folder that environment.remove_segments() removes
  std::string folder = "/dev/shm/dry-card." + std::to_string(getuid()) + "." + machine() + "/";
  return mkdir(folder.c_str(), 0700), folder + name;
}
API inline void dry_card_note(const char* text) {  // report something once, with DRY_CARD_VERBOSE=1
  static auto& seen = *new std::set<std::string>; LOCK;
  if (setting("VERBOSE") && seen.insert(text).second) fprintf(stderr, "[dry_card %d] %s\n", getpid(), text);
}
// ---- What this process has launched; dry_card_launches reads it
enum Launch { KERNEL, PRODUCT, COPY, FILL };
inline std::atomic<long> launched[4];  // PRODUCT: of cuBLAS, a call each
[[noreturn]] inline void stop(const char* problem) { perror((std::string("[dry_card] ") + problem).c_str()); abort(); }

// ---- Cards. The last 48 bits of a UUID are a hash of the machine's name and the number of the card.
inline uint64_t uuid_number(int card) { return std::hash<std::string>()(machine()) << 24 >> 16 | card; }
inline CUuuid uuid(int card) {
  uint64_t number = htobe64(uuid_number(card));
  CUuuid made{}; return memcpy(made.bytes + 8, &number, 8), made;
}
inline std::string uuid_text(int card) {
  char text[48]; snprintf(text, sizeof text, "GPU-00000000-0000-0000-0000-%012lx", uuid_number(card)); return text;
}
inline std::vector<int>& visible() {  // the card of each device of this process; read once, as CUDA does
  static auto& cards = *[] {
    auto* found = new std::vector<int>; const char* list = getenv("CUDA_VISIBLE_DEVICES");
    std::stringstream parts(list ? list : "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15");
    for (std::string part; std::getline(parts >> std::ws, part, ',');) {
      int card = 0;
      while (card < n_cards() && part != std::to_string(card) && part != uuid_text(card)) card++;
      if (card == n_cards()) break;  // CUDA ignores an unknown card and all that follow it
      found->push_back(card);
    }
    return found;
  }();
  return cards;
}

// ---- Used memory. Each process has a file with the bytes that it uses of each card.
inline long* own_bytes() {
  static long* own = nullptr;
  static int owner = 0;  // a forked child needs another file
  if (std::exchange(owner, getpid()) == getpid()) return own;
  int fd = open(segment("memory-" + std::to_string(owner)).c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  if (fd < 0 || ftruncate(fd, MAX_CARDS * sizeof(long))) stop("/dev/shm");
  own = (long*)mmap(nullptr, MAX_CARDS * sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return close(fd), own;
}
inline std::map<int, long> users(int card) {  // bytes by process
  std::map<int, long> found;
  for (const auto& file : std::filesystem::directory_iterator(segment(""))) {
    int pid = 0; long used = 0; if (sscanf(file.path().filename().c_str(), "memory-%d", &pid) != 1) continue;
    std::ifstream(file.path()).seekg(card * sizeof used).read((char*)&used, sizeof used);
    if (used > 0 && !kill(pid, 0)) found[pid] = used;
  }
  return found;
}
inline long used_bytes(int card) {
  long sum = 0;
  for (auto [pid, used] : users(card)) sum += used;
  return sum;
}

// ---- This process: its current device, its last error, whether it has a context on a card
inline thread_local int current = 0;
inline thread_local cudaError_t last_error = cudaSuccess;
inline std::atomic<bool> initialized{false}, forked{false};
inline bool has_context[MAX_CARDS];
inline cudaError_t fail(cudaError_t error) { return last_error = error; }
inline cudaError_t ready(bool with_context = true) {  // each call that needs a card begins with it
  if (forked) return fail(cudaErrorInitializationError);  // CUDA cannot be used in a child of a process that used it
  if (visible().empty()) return fail(cudaErrorNoDevice);
  auto in_child = [] { forked = true; dry_card_note("forked after CUDA was initialized"); };
  if (!initialized.exchange(true)) pthread_atfork(nullptr, nullptr, in_child);
  int card = visible()[current];
  LOCK; if (with_context && !std::exchange(has_context[card], true)) own_bytes()[card] += CONTEXT;
  return cudaSuccess;
}
#define TRY(call) if (auto error_ = (call)) return error_
inline cudaError_t charge(int device, long bytes) {
  LOCK; int card = visible()[device];
  if (bytes > 0 && used_bytes(card) + bytes > card_bytes()) return fail(cudaErrorMemoryAllocation);
  return own_bytes()[card] += bytes, cudaSuccess;
}

// ---- Blocks of memory that CUDA has heard of, by address. A memfd is memory that another process can map.
enum Kind { PINNED, REGISTERED, DEVICE, FOREIGN, MAPPED };  // host memory; of another process; by cuMemMap
struct Block { long size; int device, fd; Kind kind; };
inline auto& blocks = *new std::map<uintptr_t, Block>;
inline auto block_of(const void* address) {  // the entry of `blocks` that contains the address, or end()
  auto found = blocks.upper_bound((uintptr_t)address); if (found == blocks.begin()) return blocks.end();
  return (uintptr_t)address < (--found)->first + found->second.size ? found : blocks.end();
}
inline long pages(long size) { return (size + PAGE - 1) / PAGE * PAGE; }
inline void unmap_memory(void* at, long size) {
  mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
inline void* new_addresses(long size) {  // never used again, so that a use after free is a fault
  static void* window = mmap(nullptr, 16l << 40, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  static std::atomic<uintptr_t> next{((uintptr_t)window / PAGE + 1) * PAGE};
  return (void*)next.fetch_add(pages(size) + PAGE);
}
inline int new_memory(long size) {
  int fd = memfd_create("dry_card", MFD_CLOEXEC);
  return fd < 0 || ftruncate(fd, size) ? (stop("memory"), -1) : fd;
}
inline void* map_memory(long size, int fd, void* at = nullptr, long offset = 0) {
  at = at ? at : new_addresses(size);
  at = mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, offset);
  return at == MAP_FAILED ? (stop("mmap"), nullptr) : at;
}

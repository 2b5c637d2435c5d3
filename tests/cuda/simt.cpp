// The SIMT machine of simt.h: fibres, barriers, exchange among lanes, asynchronous copies.
#include "simt.h"

#include <dlfcn.h>

#include <memory>
#include <new>
#include <numeric>
#include <vector>

#ifdef __SANITIZE_THREAD__
extern "C" {
void* __tsan_create_fiber(unsigned);
void __tsan_switch_to_fiber(void*, unsigned);
void* __tsan_get_current_fiber();
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#define TF_MACHINE __attribute__((no_sanitize("thread")))
#else
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#define TF_MACHINE
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

// Saves the callee-saved registers on the stack of one fibre, and restores those of the other from
// its stack (System V ABI for x86-64).
extern "C" void simt_switch(void** save, void* load);
asm(R"(
.text
.globl simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");

// Receives a launch: mangled kernel name, grid, threads, bytes of shared memory, and the bytes of
// the parameter.
using Take = void (*)(const char*, unsigned, unsigned, int, size_t, const void*, size_t);
static Take taker = nullptr;
extern "C" __attribute__((visibility("default"))) void simt_take_launches(Take take) {
  taker = take;
}

namespace simt {
namespace {

// The limits of all GPUs from sm_80 on.
constexpr unsigned kMostBlocksDown = 65535;
constexpr size_t kMostShared = 99 << 10;
constexpr size_t kStack = 256 << 10;
constexpr int kCopyBytes = 16;

struct Copy {
  void* to;
  const void* from;
  bool valid;
  int group;
};

struct Fibre {
  std::unique_ptr<char[]> stack{new char[kStack]};
  void* top = nullptr;
  bool done = false;
  unsigned thread = 0;
  int groups = 0;
  std::vector<Copy> copies;
  void* sanitizer = nullptr;
};

// Threads that wait for each other: those of a warp, or of a block.
struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
  char order = 0;  // synchronization address for ThreadSanitizer
};

struct WarpState {
  Meeting barrier, exchange;
  alignas(16) unsigned char in[32][kValueBytes], out[32][kValueBytes];
};

struct Machine {
  std::vector<Fibre>& fibres;
  size_t threads;
  std::vector<WarpState> warps;
  // Exactly the requested size, so that AddressSanitizer detects accesses beyond it.
  size_t shared_bytes;
  unsigned char* shared;
  dim3 index, grid;
  Meeting barrier;
  // Synchronization addresses for ThreadSanitizer: a block begins after the launch, and the launch
  // continues after its threads. There are two, because a thread that begins late is not ordered
  // after one that has ended.
  char launched = 0, finished = 0;
  const std::function<void()>* kernel;
  Fibre* running = nullptr;
  void* scheduler = nullptr;
  void* scheduler_sanitizer = nullptr;
  uint64_t progress = 0;
};
Machine* machine;

TF_MACHINE void switch_from(Fibre* from, Fibre* to) {
#ifdef __SANITIZE_THREAD__
  // 1: the switch itself orders nothing.
  __tsan_switch_to_fiber(to ? to->sanitizer : machine->scheduler_sanitizer, 1);
#endif
#ifdef __SANITIZE_ADDRESS__
  static const void* bottom;
  static size_t size;
  void* fake = nullptr;
  if (to)
    __sanitizer_start_switch_fiber(&fake, to->stack.get(), kStack);
  else
    __sanitizer_start_switch_fiber(from && from->done ? nullptr : &fake, bottom, size);
#endif
  simt_switch(from ? &from->top : &machine->scheduler, to ? to->top : machine->scheduler);
#ifdef __SANITIZE_ADDRESS__
  if (from)
    __sanitizer_finish_switch_fiber(fake, &bottom, &size);
  else
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

TF_MACHINE void wait_turn() { switch_from(machine->running, nullptr); }

TF_MACHINE void meet(Meeting& meeting, int count) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.generation;
    ++machine->progress;
  }
  while (meeting.generation == generation) wait_turn();
}

TF_MACHINE void enter() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  __tsan_acquire(&machine->launched);
  (*machine->kernel)();
  if (!machine->running->copies.empty()) {
    std::fprintf(stderr, "cp.async: a thread ends while its copies are under way\n");
    std::abort();
  }
  __tsan_release(&machine->finished);
  machine->running->done = true;
  ++machine->progress;
  for (;;) wait_turn();
}

TF_MACHINE void start(Fibre& fibre, unsigned thread) {
  fibre.done = false;
  fibre.thread = thread;
  fibre.groups = 0;
  fibre.copies.clear();
  void** top =
      reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(fibre.stack.get() + kStack) / 64 * 64);
  *--top = nullptr;  // in place of a return address: aligns the stack as after a call
  *--top = reinterpret_cast<void*>(&enter);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fibre.top = top;
#ifdef __SANITIZE_THREAD__
  if (fibre.sanitizer == nullptr) fibre.sanitizer = __tsan_create_fiber(0);  // slow, so only once
#endif
}

TF_MACHINE void run_block(unsigned& seed) {
  Machine& m = *machine;
  const unsigned warps = static_cast<unsigned>(m.warps.size());
  if (m.shared_bytes) std::memset(m.shared, 0xff, m.shared_bytes);  // NaN in every type
  m.barrier = {};
  for (WarpState& warp : m.warps) warp.barrier = warp.exchange = {};
  for (unsigned t = 0; t < m.threads; ++t) start(m.fibres[t], t);
  __tsan_release(&m.launched);
  for (int idle = 0;;) {
    const uint64_t before = m.progress;
    seed = seed * 1664525u + 1013904223u;
    bool left = false;
    for (unsigned w = 0; w < warps; ++w)
      for (unsigned lane = 0; lane < 32; ++lane) {
        Fibre& fibre = m.fibres[(w + (seed >> 16)) % warps * 32 + lane];
        if (fibre.done) continue;
        m.running = &fibre;
        switch_from(nullptr, &fibre);
        left |= !fibre.done;
      }
    if (!left) break;
    idle = m.progress == before ? idle + 1 : 0;
    if (idle > 2) {
      std::fprintf(stderr, "deadlock: a barrier or an exchange that not all threads reach\n");
      std::abort();
    }
  }
  __tsan_acquire(&m.finished);
}

}  // namespace

TF_MACHINE dim3 thread() { return machine->running->thread; }
TF_MACHINE dim3 block_index() { return machine->index; }
TF_MACHINE dim3 grid_size() { return machine->grid; }
TF_MACHINE unsigned char* shared_memory() { return machine->shared; }

TF_MACHINE void block_barrier() {
  Machine& m = *machine;
  __tsan_release(&m.barrier.order);
  meet(m.barrier, static_cast<int>(m.threads));
  __tsan_acquire(&m.barrier.order);
}

TF_MACHINE void warp_barrier() {
  WarpState& warp = machine->warps[machine->running->thread / 32];
  __tsan_release(&warp.barrier.order);
  meet(warp.barrier, 32);
  __tsan_acquire(&warp.barrier.order);
}

TF_MACHINE void exchange(const void* in, size_t in_bytes, void* out, size_t out_bytes,
                         Compute compute, const void* context) {
  const unsigned lane = machine->running->thread % 32;
  WarpState& warp = machine->warps[machine->running->thread / 32];
  for (size_t i = 0; i < in_bytes; ++i) warp.in[lane][i] = static_cast<const unsigned char*>(in)[i];
  if (warp.exchange.arrived == 31) compute(warp.in, warp.out, context);
  meet(warp.exchange, 32);
  for (size_t i = 0; i < out_bytes; ++i) static_cast<unsigned char*>(out)[i] = warp.out[lane][i];
}

void copy_later(void* to, const void* from, bool valid) {
  if (reinterpret_cast<uintptr_t>(to) % kCopyBytes != 0 ||
      (valid && reinterpret_cast<uintptr_t>(from) % kCopyBytes != 0)) {
    std::fprintf(stderr, "cp.async: an address that is no multiple of 16 bytes\n");
    std::abort();
  }
  std::memset(to, 0xff, kCopyBytes);  // in flight: a read returns NaN
  Fibre& fibre = *machine->running;
  fibre.copies.push_back({to, from, valid, fibre.groups});
}

TF_MACHINE void close_group() { ++machine->running->groups; }

void land(int pending) {
  Fibre& fibre = *machine->running;
  std::vector<Copy> rest;
  for (const Copy& copy : fibre.copies) {
    if (copy.group >= fibre.groups - pending)
      rest.push_back(copy);
    else if (copy.valid)
      std::memcpy(copy.to, copy.from, kCopyBytes);
    else
      std::memset(copy.to, 0, kCopyBytes);
  }
  fibre.copies.swap(rest);
}

TF_MACHINE void launch(const Called& called, dim3 grid, int threads, size_t shared,
                       const std::function<void()>& kernel) {
  if (grid.y > kMostBlocksDown || grid.z > kMostBlocksDown || shared > kMostShared) {
    std::fprintf(stderr, "launch: %u x %u blocks with %zu bytes of shared memory\n", grid.y, grid.z,
                 shared);
    std::abort();
  }
  if (taker != nullptr) {
    Dl_info found{};
    if (dladdr(called.kernel, &found) == 0 || found.dli_saddr != called.kernel) std::abort();
    return taker(found.dli_sname, grid.x, grid.y, threads, shared, called.parameter, called.bytes);
  }
  static std::vector<Fibre> fibres;  // static: the next launch reuses their stacks
  if (fibres.size() < static_cast<size_t>(threads)) fibres.resize(static_cast<size_t>(threads));
  constexpr std::align_val_t kAlign{128};
  unsigned char* memory =
      shared ? static_cast<unsigned char*>(::operator new(shared, kAlign)) : nullptr;
  Machine m{.fibres = fibres,
            .threads = static_cast<size_t>(threads),
            .warps = std::vector<WarpState>(static_cast<size_t>(threads / 32)),
            .shared_bytes = shared,
            .shared = memory,
            .index = {},
            .grid = grid,
            .barrier = {},
            .kernel = &kernel};
  machine = &m;
#ifdef __SANITIZE_THREAD__
  m.scheduler_sanitizer = __tsan_get_current_fiber();
#endif
  static unsigned seed = 1;
  std::vector<unsigned> order(size_t{grid.x} * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0u);
  for (size_t left = order.size(); left > 0; --left) {
    seed = seed * 1664525u + 1013904223u;
    std::swap(order[left - 1], order[(uint64_t{seed} * left) >> 32]);
    const unsigned block = order[left - 1];
    m.index = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    run_block(seed);
  }
  machine = nullptr;
  if (memory) ::operator delete(memory, kAlign);
}

}  // namespace simt

// Threads, scratch memory and processor detection for the native CPU operations; see native.h.

#include "native.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>

#include "xla/ffi/api/c_api.h"

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxserve {
namespace {

int CountProcessors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  int n = static_cast<int>(std::thread::hardware_concurrency());
  return n > 0 ? n : 1;
}

bool HasAmx() {
#if defined(JAXSERVE_X86) && defined(__linux__)
  if (!__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-int8") ||
      !__builtin_cpu_supports("amx-bf16")) {
    return false;
  }
  // Linux saves the tile registers only of processes that asked.
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Isa DetectIsa() {
#if defined(JAXSERVE_X86)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c")) {
    return Isa::kPlain;
  }
  for (bool has : {__builtin_cpu_supports("avx512f") != 0, __builtin_cpu_supports("avx512bw") != 0,
                   __builtin_cpu_supports("avx512vl") != 0, __builtin_cpu_supports("avx512dq") != 0,
                   __builtin_cpu_supports("avx512vnni") != 0}) {
    if (!has) return Isa::kAvx2;
  }
  if (!__builtin_cpu_supports("avx512vbmi")) return Isa::kAvx512;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512Vbmi;
  return HasAmx() ? Isa::kAmx : Isa::kAvx512Bf16;
#else
  return Isa::kPlain;
#endif
}

inline void Pause() {
#if defined(JAXSERVE_X86)
  _mm_pause();
#endif
}

// The caller's rounding mode comes from XLA, a worker's from the system; a result must not depend on
// who computed it.
constexpr unsigned kFlushSubnormals = 0x8040;  // MXCSR: flush to zero, denormals are zero

unsigned SetRoundingMode(unsigned mode) {
#if defined(JAXSERVE_X86)
  unsigned before = _mm_getcsr();
  _mm_setcsr(mode);
  return before;
#else
  return mode;
#endif
}

unsigned FlushSubnormals() {
#if defined(JAXSERVE_X86)
  return SetRoundingMode(_mm_getcsr() | kFlushSubnormals);
#else
  return 0;
#endif
}

// Fork-join on threads that wait for the next call by spinning a little and then sleep.
//
// A step makes some two hundred calls, tens of microseconds apart, and waking a sleeping thread
// costs as much as one of them: hence the spinning. Indices are claimed one by one, so a worker that
// is late, or whose processor does something else, holds nobody up: the caller takes them instead.
class Workers {
 public:
  Workers() : size_(CountProcessors()) {
    for (int i = 1; i < size_; ++i) std::thread([this, i] { Serve(i); }).detach();
  }

  int size() const { return size_; }

  void Run(int64_t count, internal::Task task, const void* context) {
    // Even rounds are open, odd ones closed. Close first: a late worker of the round before must not
    // read the new count and claim an index of the old round with it.
    uint32_t round = RoundOf(claim_.load(std::memory_order_relaxed)) + 2;
    claim_.store(uint64_t{round - 1} << 32, std::memory_order_seq_cst);
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    claim_.store(uint64_t{round} << 32, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    WorkOn(round, 0);
    while (done_.load(std::memory_order_acquire) < count) Pause();
  }

 private:
  // The half that holds the next index is the low one.
  static uint32_t RoundOf(uint64_t claim) { return static_cast<uint32_t>(claim >> 32); }

  // Claims and runs indices of `round` until none is left. A claim succeeds only while the round
  // lasts, and then the job read before it was that round's.
  void WorkOn(uint32_t round, int thread) {
    while (true) {
      uint64_t claim = claim_.load(std::memory_order_acquire);
      internal::Task task = task_.load(std::memory_order_relaxed);
      const void* context = context_.load(std::memory_order_relaxed);
      uint32_t index = static_cast<uint32_t>(claim);
      if (RoundOf(claim) != round || index >= count_.load(std::memory_order_relaxed)) return;
      if (!claim_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) continue;
      task(context, index, thread);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void Serve(int thread) {
    FlushSubnormals();
    uint32_t seen = 0;
    while (true) {
      uint32_t round = WaitForRoundAfter(seen);
      WorkOn(round, thread);
      seen = round;
    }
  }

  uint32_t WaitForRoundAfter(uint32_t seen) {
    using Clock = std::chrono::steady_clock;
    uint32_t round = seen;
    auto opened = [&] {
      round = RoundOf(claim_.load(std::memory_order_seq_cst));
      return round != seen && round % 2 == 0;
    };
    auto deadline = Clock::now() + kSpin;
    do {
      for (int i = 0; i < 64; ++i) {
        if (opened()) return round;
        Pause();
      }
    } while (Clock::now() < deadline);
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, opened);
    sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    return round;
  }

  static constexpr std::chrono::microseconds kSpin{200};
  const int size_;
  alignas(64) std::atomic<uint64_t> claim_{0};  // round in the high half, next index in the low
  std::atomic<internal::Task> task_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<uint32_t> count_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Never destroyed: workers may outlive main's statics.
Workers& TheWorkers() {
  static Workers* workers = new Workers;
  return *workers;
}

std::mutex owner_mutex;
void* shared_scratch = nullptr;
size_t shared_scratch_bytes = 0;

void* AlignedNew(size_t bytes) { return ::operator new(bytes, std::align_val_t{64}); }
void AlignedDelete(void* p) { ::operator delete(p, std::align_val_t{64}); }

}  // namespace

Isa BestIsa() {
  static const Isa best = DetectIsa();
  return best;
}

int NumThreads() { return TheWorkers().size(); }

void internal::Run(int64_t count, Task task, const void* context) {
  TheWorkers().Run(count, task, context);
}

int64_t UsedRows(const void* x, int64_t rows, int64_t width, bool bfloat16) {
  const size_t row_bytes = width * (bfloat16 ? 2 : 4);
  const uint64_t magnitudes = bfloat16 ? 0x7fff7fff7fff7fff : 0x7fffffff7fffffff;  // without signs
  for (; rows > 0; --rows) {
    const char* row = static_cast<const char*>(x) + (rows - 1) * row_bytes;
    uint64_t any = 0;
    for (size_t i = 0; i < row_bytes; i += sizeof(any)) {
      uint64_t part = 0;
      std::memcpy(&part, row + i, std::min(sizeof(part), row_bytes - i));
      any |= part & magnitudes;
    }
    if (any != 0) break;
  }
  return rows;
}

Team::Team() : owner_(owner_mutex.try_lock()), saved_mode_(FlushSubnormals()) {}

Team::~Team() {
  SetRoundingMode(saved_mode_);
  if (owner_) owner_mutex.unlock();
  if (own_ != nullptr) AlignedDelete(own_);
}

void* Team::Allocate(size_t bytes) const {
  if (!owner_) return own_ = AlignedNew(bytes);
  if (bytes > shared_scratch_bytes) {
    if (shared_scratch != nullptr) AlignedDelete(shared_scratch);
    shared_scratch_bytes = 0;
    shared_scratch = AlignedNew(bytes);
    shared_scratch_bytes = bytes;
  }
  return shared_scratch;
}

}  // namespace jaxserve

// For native.py, which says which instructions are in use and lets tests force each.
extern "C" int jaxserve_best_isa() { return static_cast<int>(jaxserve::BestIsa()); }
extern "C" int jaxserve_ffi_major() { return XLA_FFI_API_MAJOR; }
extern "C" int jaxserve_ffi_minor() { return XLA_FFI_API_MINOR; }
extern "C" int jaxserve_num_threads() { return jaxserve::NumThreads(); }

// Runs `rounds` jobs of changing size; returns how many indices did not run exactly once.
extern "C" int64_t jaxserve_check_threads(int64_t rounds) {
  constexpr int kMost = 31;
  int64_t wrong = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    int count = static_cast<int>(1 + round * 7919 % kMost);
    std::atomic<int> runs[kMost] = {};
    jaxserve::Team team;
    team.ForEach(count, [&](int64_t i, int) { runs[i].fetch_add(1); });
    for (int i = 0; i < kMost; ++i) wrong += runs[i].load() != (i < count);
  }
  return wrong;
}

// What the native CPU operations share: which instructions to use, threads, scratch memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__)
#define JAXSERVE_X86 1
#include <immintrin.h>
#define JAXSERVE_AVX2 __attribute__((target("avx2,fma,f16c")))
#define JAXSERVE_AVX512 \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define JAXSERVE_AVX512_VBMI                                                            \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni," \
                        "avx512vbmi")))
#define JAXSERVE_AVX512_BF16                                                            \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni," \
                        "avx512vbmi,avx512bf16")))
#define JAXSERVE_AMX                                                                    \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni," \
                        "avx512vbmi,avx512bf16,amx-tile,amx-int8,amx-bf16")))
#endif

#define JAXSERVE_INLINE inline __attribute__((always_inline))

namespace jaxserve {

// 16 floats on any machine: the compiler splits them where registers are smaller. Code written with
// them is compiled once per instruction set, by inlining it into functions that ask for one.
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t HalfBits __attribute__((vector_size(32)));

// Instruction sets, each containing those before it.
enum class Isa : int { kPlain = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Vbmi = 3, kAvx512Bf16 = 4, kAmx = 5 };

// The best this processor and kernel offer (asks for AMX permission the first time).
Isa BestIsa();

// A call's `isa` attribute: -1 for the best; more than the processor has is cut down to it.
inline Isa ChooseIsa(int64_t wanted) {
  int best = static_cast<int>(BestIsa());
  return static_cast<Isa>(wanted < 0 || wanted > best ? best : static_cast<int>(wanted));
}

// A function compiled once per instruction set: Op::Run<isa>, inlined into a function that may use it.
// Those above kAvx512 are not among them: what is theirs is written by hand where it pays.
template <typename Op, typename Signature>
struct PerIsa;

template <typename Op, typename... Args>
struct PerIsa<Op, void(Args...)> {
  using Function = void (*)(Args...);
  static void Plain(Args... args) { Op::template Run<Isa::kPlain>(args...); }
#if JAXSERVE_X86
  JAXSERVE_AVX2 static void Avx2(Args... args) { Op::template Run<Isa::kAvx2>(args...); }
  JAXSERVE_AVX512 static void Avx512(Args... args) { Op::template Run<Isa::kAvx512>(args...); }
#endif

  static Function For(Isa isa) {
#if JAXSERVE_X86
    if (isa >= Isa::kAvx512) return Avx512;
    if (isa == Isa::kAvx2) return Avx2;
#endif
    return Plain;
  }
};

// The processors this process may run on: the caller and NumThreads() - 1 workers.
int NumThreads();

namespace internal {
using Task = void (*)(const void* context, int64_t index, int thread);
void Run(int64_t count, Task task, const void* context);
}  // namespace internal

// One operation at a time owns the workers and the scratch memory. Where another one is running
// already (two executions in one process), its caller works alone, with memory of its own.
// While a Team lives its threads round alike: numbers below the normal range count as zero.
class Team {
 public:
  Team();
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Calls work(index, thread) for each index in [0, count), in any order, on all threads, and
  // returns when all are done. thread is in [0, NumThreads()).
  template <typename Work>
  void ForEach(int64_t count, const Work& work) const {
    if (!owner_ || count <= 1) {
      for (int64_t i = 0; i < count; ++i) work(i, 0);
      return;
    }
    internal::Run(
        count,
        [](const void* context, int64_t index, int thread) {
          (*static_cast<const Work*>(context))(index, thread);
        },
        &work);
  }

  // Uninitialised memory, 64-byte aligned, until this Team ends. One block: ask once for all.
  template <typename T>
  T* Scratch(size_t count) const {
    static_assert(std::is_trivial_v<T>);
    return static_cast<T*>(Allocate(count * sizeof(T)));
  }

 private:
  void* Allocate(size_t bytes) const;
  bool owner_;
  unsigned saved_mode_;
  mutable void* own_ = nullptr;
};

// Rows of x [rows, width], float32 or bfloat16, up to the last one that is not all zeros. Steps are padded with
// such rows: they need no work.
int64_t UsedRows(const void* x, int64_t rows, int64_t width, bool bfloat16);

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline size_t Align64(size_t bytes) { return (bytes + 63) & ~size_t{63}; }

}  // namespace jaxserve

// best_token on the CPU: the largest logit of each row among the ids that a bit mask allows.

#include <limits>

#include "../native_math.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve::best_token {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kLanes = 16;
constexpr int64_t kWord = 32;    // ids of a word of the mask
constexpr int64_t kBlock = 256;  // ids of which the largest is known before the next are looked at
constexpr float kNever = -std::numeric_limits<float>::infinity();

struct Rows {
  const float* logits;     // [S, V]
  const int32_t* allowed;  // [S, words], or null: all are
  int64_t V, words;
  int32_t* token;  // [S]
};

// Up to 16 logits, those that there are not and those without a bit as what never wins.
JAXSERVE_INLINE Lanes Load(const float* at, int64_t n, int32_t bits) {
  Lanes x;
  if (n >= kLanes) {
    x = LoadLanes(at);
  } else {
    float part[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) part[i] = i < n ? at[i] : kNever;
    x = LoadLanes(part);
  }
  if ((bits & 0xffff) == 0xffff) return x;
  constexpr IntLanes kToTop = {31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16};
  return Select(((IntLanes{} + bits) << kToTop) >> 31, x, Fill(kNever));
}

JAXSERVE_INLINE IntLanes IsNaN(const Lanes& x) {
  return (0x7f800000 - (reinterpret_cast<IntLanes>(x) & 0x7fffffff)) >> 31;
}

// The row's best id, of equals the first; -1 for a NaN among them and for a best that is infinite.
// Differences below the normal range count as none, see Team.
JAXSERVE_INLINE int32_t Best(const float* logits, const int32_t* allowed, int64_t V) {
  float best = kNever;
  int64_t block = -1;
  for (int64_t first = 0; first < V; first += kBlock) {
    const int64_t end = std::min(V, first + kBlock);
    Lanes top = Fill(kNever);
    IntLanes nan = {};
    for (int64_t id = first; id < end; id += kWord) {
      const int32_t bits = allowed ? allowed[id / kWord] : -1;
      if (bits == 0) continue;
      Lanes low = Load(logits + id, end - id, bits);
      nan |= IsNaN(low), top = Max(top, low);
      if (end - id <= kLanes) continue;
      Lanes high = Load(logits + id + kLanes, end - id - kLanes, bits >> kLanes);
      nan |= IsNaN(high), top = Max(top, high);
    }
    int32_t any = 0;
    float largest = kNever;
    for (int64_t i = 0; i < kLanes; ++i) {
      any |= nan[i];
      largest = top[i] > largest ? top[i] : largest;
    }
    if (any) return -1;
    if (largest > best) best = largest, block = first;
  }
  if (block < 0 || best == -kNever) return -1;
  for (int64_t id = block;; ++id) {
    const bool may = !allowed || (static_cast<uint32_t>(allowed[id / kWord]) >> id % kWord & 1);
    if (may && logits[id] == best) return static_cast<int32_t>(id);
  }
}

struct BestOp {
  using Signature = void(const Rows& rows, int64_t row);
  template <Isa>
  static JAXSERVE_INLINE void Run(const Rows& rows, int64_t row) {
    const int32_t* allowed = rows.allowed ? rows.allowed + row * rows.words : nullptr;
    rows.token[row] = Best(rows.logits + row * rows.V, allowed, rows.V);
  }
};

// The best token of each row of logits [S, V]; allowed [S, ceil(V / 32)], or [S, 0]: everything.
ffi::Error BestToken(ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::S32> allowed,
                     ffi::Result<ffi::Buffer<ffi::S32>> token, int64_t isa) {
  const int64_t S = logits.dimensions()[0], V = logits.dimensions()[1];
  const int64_t words = allowed.dimensions()[1];
  if (words != 0 && words != CeilDiv(V, kWord)) {
    return ffi::Error::InvalidArgument("best_token: masks of another vocabulary");
  }
  Rows rows{logits.typed_data(), words ? allowed.typed_data() : nullptr, V, words,
            token->typed_data()};
  auto best = PerIsa<BestOp, BestOp::Signature>::For(ChooseIsa(isa));
  Team team;
  team.ForEach(S, [&](int64_t row, int) { best(rows, row); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve::best_token

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_best_token, jaxserve::best_token::BestToken,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // logits
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // allowed
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()  // token
                                  .Attr<int64_t>("isa"));

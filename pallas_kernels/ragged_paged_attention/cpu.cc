// Ragged paged attention on the CPU: writes the step's K and V into their pages, then attends.
//
// Queries go in tiles: some tokens of one row times the query heads that share a KV head. A tile
// walks its keys in blocks of kBlock, aligned to position 0, with a running maximum, sum and weighted
// value (online softmax: Milakov and Gimelshein, arXiv:1805.02867), starting afresh every kSegment
// keys; segments are joined in order. So long rows split over threads, and every query goes through
// the same operations in the same order whatever tile it is in: a key that a query does not see leaves
// its state as it was, to the bit.
//
// Products read the pages where they are. For that a page holds its V slot by slot, but its K turned,
// 16 slots side by side: a vector of K is one element of 16 keys, and scores come out as vectors.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "../native_math.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve::attention {
namespace {

namespace ffi = xla::ffi;

constexpr int kLanes = 16;
constexpr int kBlock = 64;        // keys of a block
constexpr int kSegment = 512;     // keys of a segment
constexpr int kTileVectors = 48;  // query vectors of a tile, about
constexpr float kNone = -1e30f;   // the maximum over no keys: below any score, and finite
constexpr int64_t kTaskBytes = 64 << 10;  // copying less than this is not worth handing out

struct Float8 {  // e4m3fn
  uint8_t bits;
};

// What a call says, in plain numbers and pointers.
template <typename KV>
struct Call {
  int64_t T, H, J, E, S, P, K, G;
  const float* q_THE;
  const KV* k_TJE;
  const KV* v_TJE;
  const float* k_scale_TJ;  // null unless KV are codes; the same for scales
  const float* v_scale_TJ;
  KV* pages;        // of this layer: [G, J, 2, K, E], K turned
  float* scales;    // of this layer: [G, J, 2, K]
  const int32_t* page_table_SP;
  const int32_t* kv_len_S;
  const int32_t* cu_q_len_S1;
  int64_t num_rows;
  const float* sinks_H;  // or null
  float* out_THE;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none

  int64_t group() const { return H / J; }
  int64_t depth() const { return CeilDiv(E, kLanes) * kLanes; }
  // Position of a row's first token of this step.
  int64_t FirstPosition(int64_t s) const {
    return kv_len_S[s] - (cu_q_len_S1[s + 1] - cu_q_len_S1[s]);
  }
  int64_t FirstVisible(int64_t position) const {
    return window == 0 ? 0 : std::max<int64_t>(0, position - window + 1);
  }
  // Slots whose K lie side by side: [K / lanes][E][lanes]. Pages that 16 does not divide have one group.
  int64_t lanes() const { return K % kLanes == 0 ? kLanes : K; }
  // The first of a page's 2 K vectors for head j, counted in vectors: K slots of K, then K of V.
  int64_t PageOf(int64_t s, int64_t j, int64_t position) const {
    return (page_table_SP[s * P + position / K] * J + j) * 2 * K;
  }
  // Element 0 of a position's K; element e is e * lanes() further.
  KV* KeyAt(int64_t s, int64_t j, int64_t position) const {
    int64_t slot = position % K, lane = slot % lanes();
    return pages + (PageOf(s, j, position) + slot - lane) * E + lane;
  }
  KV* ValueAt(int64_t s, int64_t j, int64_t position) const {
    return pages + (PageOf(s, j, position) + K + position % K) * E;
  }
  // Of pages of codes: the scale of a position's K; V's is K further.
  float* ScaleAt(int64_t s, int64_t j, int64_t position) const {
    return scales + PageOf(s, j, position) + position % K;
  }
};

// `count` tokens of row s from packed token t0, for KV head j, over segments [segment0, segment1).
// state < 0: the tile is computed whole and goes to the output. Otherwise its one segment's state
// goes to that place and is joined with the others later.
struct Tile {
  int64_t s, j, t0, count, segment0, segment1, state;
};

// Running maximum, sum and unnormalised value of M query vectors.
struct State {
  float* max;    // [M]
  float* sum;    // [M]
  float* value;  // [M][depth]

  static size_t Floats(int64_t M, int64_t depth) { return M * (depth + 2) + 2 * kLanes; }
  static State At(float* memory, int64_t M, int64_t depth) {
    int64_t head = CeilDiv(M, kLanes) * kLanes;
    return {memory, memory + head, memory + 2 * head};
  }
};

// ---- arithmetic on lanes -----------------------------------------------------------------------

// The lanes with the upper and lower `h` of every 2 h exchanged.
template <int h>
JAXSERVE_INLINE Lanes Exchange(const Lanes& v) {
  return __builtin_shufflevector(v, v, 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, 6 ^ h, 7 ^ h, 8 ^ h,
                                 9 ^ h, 10 ^ h, 11 ^ h, 12 ^ h, 13 ^ h, 14 ^ h, 15 ^ h);
}

JAXSERVE_INLINE float MaxOf(Lanes v) {
  v = Max(v, Exchange<8>(v));
  v = Max(v, Exchange<4>(v));
  v = Max(v, Exchange<2>(v));
  return Max(v, Exchange<1>(v))[0];
}

JAXSERVE_INLINE float SumOf(Lanes v) {
  v += Exchange<8>(v);
  v += Exchange<4>(v);
  v += Exchange<2>(v);
  return (v + Exchange<1>(v))[0];
}

// cap * tanh(score / cap), as m / (m + 2) with m = e^(2 score / cap) - 1, which is precise near 0.
JAXSERVE_INLINE Lanes SoftCap(const Lanes& score, float cap) {
  Lanes x = score * (2.0f / cap);
  x = Max(x, Fill(-40.0f));
  Power e = PowerOf(-Max(-x, Fill(-40.0f)));
  Lanes m = e.power * e.rest + (e.power - 1.0f);
  return cap * m / (m + 2.0f);
}

// ---- keys and values ---------------------------------------------------------------------------

JAXSERVE_INLINE float ToFloat(Float8 x) {
  uint32_t exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
  float magnitude = exponent == 0 ? mantissa * 0x1p-9f
                                  : std::ldexp(1.0f + mantissa / 8.0f, int(exponent) - 7);
  if ((x.bits & 127) == 127) magnitude = std::nanf("");
  return x.bits & 128 ? -magnitude : magnitude;
}

struct Float8Table {
  float value[256];
  Float8Table() {
    for (int i = 0; i < 256; ++i) value[i] = ToFloat(Float8{static_cast<uint8_t>(i)});
  }
};
const Float8Table kFloat8;

// 16 stored numbers as floats, before any scale.
using jaxserve::Widen;
JAXSERVE_INLINE Lanes Widen(const int16_t* at) {
  int16_t code __attribute__((vector_size(32)));
  std::memcpy(&code, at, sizeof(code));
  return __builtin_convertvector(__builtin_convertvector(code, IntLanes), Lanes);
}
JAXSERVE_INLINE Lanes Widen(const int8_t* at) {
  int8_t byte __attribute__((vector_size(16)));
  std::memcpy(&byte, at, sizeof(byte));
  return __builtin_convertvector(__builtin_convertvector(byte, IntLanes), Lanes);
}
JAXSERVE_INLINE Lanes Widen(const Float8* at) {
  Lanes v;
  for (int i = 0; i < kLanes; ++i) v[i] = kFloat8.value[at[i].bits];
  return v;
}

// Elements [e, e + 16) of a stored vector of E, zeros past its end.
template <typename KV>
JAXSERVE_INLINE Lanes LoadVector(const KV* at, int64_t e, int64_t E) {
  if (e + kLanes <= E) return Widen(at + e);
  KV part[kLanes] = {};
  std::memcpy(part, at + e, (E - e) * sizeof(KV));
  return Widen(part);
}

// A thread's working memory.
struct Workspace {
  float* q;       // [M][E], scaled
  float* keys;    // [kBlock / kLanes][E][kLanes] of KV, where pages do not lie that way
  float* k_scale;  // [kBlock], of pages of codes; v_scale the same
  float* v_scale;
  float* scores;  // [M][kBlock], then the weights
  State state, total;

  static size_t Floats(int64_t M, int64_t E, int64_t depth) {
    return M * E + kBlock * (E + 2 + M) + 2 * State::Floats(M, depth) + kLanes * 8;
  }
  Workspace(float* memory, int64_t M, int64_t E, int64_t depth) {
    keys = memory;
    k_scale = keys + kBlock * E;
    v_scale = k_scale + kBlock;
    scores = v_scale + kBlock;
    float* states = scores + M * kBlock;
    state = State::At(states, M, depth);
    states += CeilDiv(State::Floats(M, depth), kLanes) * kLanes;
    total = State::At(states, M, depth);
    q = states + CeilDiv(State::Floats(M, depth), kLanes) * kLanes;
  }
};

// ---- products ----------------------------------------------------------------------------------

// Scores of kRows queries [E] with kGroups groups of 16 keys [E][16], the elements in order, times the
// keys' scales where they have any.
template <int kRows, int kGroups, typename KV>
JAXSERVE_INLINE void ScoreTile(const float* q, int64_t E, const KV* const* groups,
                               const float* k_scale, float* scores) {
  Lanes sum[kRows][kGroups] = {};
  for (int64_t e = 0; e < E; ++e) {
    Lanes keys[kGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      keys[g] = Widen(groups[g] + e * kLanes);
      __builtin_prefetch(groups[g] + (e + 16) * kLanes);  // four streams outrun the processor's own
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float value = q[r * E + e];
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) sum[r][g] += keys[g] * value;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      if (k_scale != nullptr) sum[r][g] *= LoadLanes(k_scale + g * kLanes);
      StoreLanes(scores + r * kBlock + g * kLanes, sum[r][g]);
    }
  }
}

// Adds to kRows values, elements [e, e + 16 kVectors), what `keys` keys weigh, in order. kWhole: all
// elements are before E, so that no load has to be cut (which would put the sums into memory).
template <int kRows, int kVectors, bool kWhole, typename KV>
JAXSERVE_INLINE void ValueTile(const float* weights, const KV* v, const float* v_scale, int64_t keys,
                               int64_t e, int64_t E, float* value, int64_t depth) {
  Lanes sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) sum[r][i] = LoadLanes(value + r * depth + e + i * kLanes);
  }
  for (int64_t k = 0; k < keys; ++k) {
    Lanes from[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = e + i * kLanes;
      from[i] = kWhole ? Widen(v + k * E + at) : LoadVector(v + k * E, at, E);
      if (v_scale != nullptr) from[i] *= v_scale[k];
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float weight = weights[r * kBlock + k];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sum[r][i] += from[i] * weight;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) StoreLanes(value + r * depth + e + i * kLanes, sum[r][i]);
  }
}

// Calls tile(rows, columns), both compile-time numbers, for pieces that cover rows x columns; sums,
// operands and one broadcast of a piece fit the registers: 32, or 16 of half or a quarter the size.
template <Isa kIsa, int kRows, typename TileOf>
JAXSERVE_INLINE void Cover(int64_t rows, int64_t columns, const TileOf& tile, int64_t row = 0) {
  constexpr int kColumns = kIsa != Isa::kAvx512 ? 1 : kRows > 6 ? 2 : 4;
  if constexpr (kRows > 0) {
    for (; row + kRows <= rows; row += kRows) {
      int64_t c = 0;
      for (; c + kColumns <= columns; c += kColumns) {
        tile(std::integral_constant<int, kRows>(), std::integral_constant<int, kColumns>(), row, c);
      }
      for (; c < columns; ++c) {
        tile(std::integral_constant<int, kRows>(), std::integral_constant<int, 1>(), row, c);
      }
    }
    constexpr int kFewer = kRows > 4 ? kRows / 2 : kRows - 1;  // 12, 6, 3, 2, 1
    Cover<kIsa, kFewer>(rows, columns, tile, row);
  }
}

template <Isa kIsa>
constexpr int kMostRows = kIsa == Isa::kAvx512 ? 12 : kIsa == Isa::kAvx2 ? 6 : 2;

template <typename KV>
struct ScoreOp {
  using Signature = void(int64_t M, int64_t num_groups, const float* q, int64_t E,
                         const KV* const* groups, const float* k_scale, float* scores);
  template <Isa kIsa>
  static JAXSERVE_INLINE void Run(int64_t M, int64_t num_groups, const float* q, int64_t E,
                                  const KV* const* groups, const float* k_scale, float* scores) {
    auto tile = [&](auto rows, auto columns, int64_t row, int64_t group)
                    __attribute__((always_inline)) {
      ScoreTile<decltype(rows)::value, decltype(columns)::value>(
          q + row * E, E, groups + group, k_scale == nullptr ? nullptr : k_scale + group * kLanes,
          scores + row * kBlock + group * kLanes);
    };
    Cover<kIsa, kMostRows<kIsa>>(M, num_groups, tile);
  }
};

template <typename KV>
struct ValueOp {
  using Signature = void(int64_t M, const float* weights, const KV* v, const float* v_scale,
                         int64_t keys, int64_t E, float* value, int64_t depth);
  template <Isa kIsa>
  static JAXSERVE_INLINE void Run(int64_t M, const float* weights, const KV* v,
                                  const float* v_scale, int64_t keys, int64_t E, float* value,
                                  int64_t depth) {
    auto tile = [&](auto rows, auto columns, int64_t row, int64_t vector)
                    __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value, kVectors = decltype(columns)::value;
      const float* w = weights + row * kBlock;
      float* to = value + row * depth;
      if ((vector + kVectors) * kLanes <= E) {
        ValueTile<kRows, kVectors, true>(w, v, v_scale, keys, vector * kLanes, E, to, depth);
      } else {
        ValueTile<kRows, kVectors, false>(w, v, v_scale, keys, vector * kLanes, E, to, depth);
      }
    };
    Cover<kIsa, kMostRows<kIsa>>(M, depth / kLanes, tile);
  }
};

// ---- a tile ------------------------------------------------------------------------------------

void Clear(const State& state, int64_t M, int64_t depth) {
  for (int64_t m = 0; m < M; ++m) {
    state.max[m] = kNone;
    state.sum[m] = 0;
  }
  std::memset(state.value, 0, M * depth * sizeof(float));
}

// Scores of one query over a block -> weights, in place, and its state made ready to add their values.
// The query sees keys [low, high) of the block.
JAXSERVE_INLINE void Weigh(float* scores, int64_t low, int64_t high, float soft_cap,
                           const State& state, int64_t m, int64_t depth) {
  constexpr int kVectors = kBlock / kLanes;
  const IntLanes lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Lanes score[kVectors], best = Fill(kNone);
  IntLanes seen[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    IntLanes key = lane + v * kLanes;
    seen[v] = ~((key - static_cast<int32_t>(low)) | (static_cast<int32_t>(high - 1) - key)) >> 31;
    Lanes raw = LoadLanes(scores + v * kLanes);
    if (soft_cap > 0) raw = SoftCap(raw, soft_cap);
    score[v] = Select(seen[v], raw, Fill(kNone));
    best = Max(best, score[v]);
  }
  float top = std::max(state.max[m], MaxOf(best));
  Lanes total = {};
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    Lanes weight = Exp(score[v] - top);
    weight = Select(seen[v], weight, Fill(0.0f));
    StoreLanes(scores + v * kLanes, weight);
    total += weight + (score[v] - score[v]);  // a score that is no number makes the sum none
  }
  float keep = Exp(Fill(state.max[m] - top))[0];
  state.max[m] = top;
  state.sum[m] = state.sum[m] * keep + SumOf(total);
  for (int64_t e = 0; e < depth; e += kLanes) {
    float* at = state.value + m * depth + e;
    StoreLanes(at, LoadLanes(at) * keep);
  }
}

// Which keys the queries of a tile see: that at `position` + m / group sees (that - window, that].
struct Sight {
  int64_t position, group, window;
};

struct WeighOp {
  using Signature = void(float* scores, int64_t M, int64_t base, const Sight& sight, float soft_cap,
                         const State& state, int64_t depth);
  template <Isa>
  static JAXSERVE_INLINE void Run(float* scores, int64_t M, int64_t base, const Sight& sight,
                                  float soft_cap, const State& state, int64_t depth) {
    for (int64_t m = 0; m < M; ++m) {
      int64_t high = sight.position + m / sight.group + 1 - base;
      int64_t low = sight.window == 0 ? 0 : high - sight.window;
      Weigh(scores + m * kBlock, std::max<int64_t>(low, 0), std::min<int64_t>(high, kBlock),
            soft_cap, state, m, depth);
    }
  }
};

// total = total joined with state, for M query vectors.
struct JoinOp {
  using Signature = void(const State& total, const State& state, int64_t M, int64_t depth);
  template <Isa>
  static JAXSERVE_INLINE void Run(const State& total, const State& state, int64_t M,
                                  int64_t depth) {
    for (int64_t m = 0; m < M; ++m) {
      float top = std::max(total.max[m], state.max[m]);
      float keep = Exp(Fill(total.max[m] - top))[0], add = Exp(Fill(state.max[m] - top))[0];
      total.max[m] = top;
      total.sum[m] = total.sum[m] * keep + state.sum[m] * add;
      for (int64_t e = 0; e < depth; e += kLanes) {
        float* at = total.value + m * depth + e;
        StoreLanes(at, LoadLanes(at) * keep + LoadLanes(state.value + m * depth + e) * add);
      }
    }
  }
};

template <typename Op>
using Entry = PerIsa<Op, typename Op::Signature>;

// The operations for one instruction set.
template <typename KV>
struct Kernels {
  typename Entry<ScoreOp<KV>>::Function score;
  typename Entry<ValueOp<KV>>::Function add_values;
  Entry<WeighOp>::Function weigh;
  Entry<JoinOp>::Function join;

  explicit Kernels(Isa isa)
      : score(Entry<ScoreOp<KV>>::For(isa)),
        add_values(Entry<ValueOp<KV>>::For(isa)),
        weigh(Entry<WeighOp>::For(isa)),
        join(Entry<JoinOp>::For(isa)) {}
};

// Where the groups of 16 keys of a block lie that hold keys [from, to): in their pages, or, where pages
// are too small for that, copied to the workspace.
template <typename KV>
void FindKeys(const Call<KV>& call, const Tile& tile, int64_t base, int64_t from, int64_t to,
              const Workspace& work, const KV** groups) {
  int64_t first = from / kLanes;
  if (call.lanes() == kLanes) {
    for (int64_t g = first; g * kLanes < to; ++g) {
      groups[g - first] = call.KeyAt(tile.s, tile.j, base + g * kLanes);
    }
    return;
  }
  KV* copy = reinterpret_cast<KV*>(work.keys);
  std::memset(copy, 0, kBlock * call.E * sizeof(KV));
  for (int64_t key = from; key < to; ++key) {
    const KV* k = call.KeyAt(tile.s, tile.j, base + key);
    KV* lane = copy + key / kLanes * kLanes * call.E + key % kLanes;
    for (int64_t e = 0; e < call.E; ++e) lane[e * kLanes] = k[e * call.lanes()];
  }
  for (int64_t g = first; g * kLanes < to; ++g) groups[g - first] = copy + g * kLanes * call.E;
}

// The state of a tile's queries over the keys of one segment. Slots that are not among a block's keys
// [from, to) may belong to anybody, or to nobody: their scores count for nothing, their values are
// not read.
template <typename KV>
void AttendSegment(const Call<KV>& call, const Kernels<KV>& kernels, const Tile& tile,
                   int64_t segment, const Workspace& work, const State& state) {
  int64_t depth = call.depth(), M = tile.count * call.group();
  int64_t position = call.FirstPosition(tile.s) + tile.t0 - call.cu_q_len_S1[tile.s];
  int64_t low = call.FirstVisible(position), high = position + tile.count;
  Sight sight{position, call.group(), call.window};
  Clear(state, M, depth);
  for (int64_t base = segment * kSegment; base < (segment + 1) * kSegment; base += kBlock) {
    int64_t from = std::max<int64_t>(low - base, 0);
    int64_t to = std::min<int64_t>(high - base, kBlock);
    if (from >= to) continue;
    const KV* groups[kBlock / kLanes];
    FindKeys(call, tile, base, from, to, work, groups);
    for (int64_t key = from; call.scales != nullptr && key < to; ++key) {
      const float* scale = call.ScaleAt(tile.s, tile.j, base + key);
      work.k_scale[key] = scale[0];
      work.v_scale[key] = scale[call.K];
    }
    int64_t first = from / kLanes;
    kernels.score(M, CeilDiv(to, kLanes) - first, work.q, call.E, groups,
                  call.scales == nullptr ? nullptr : work.k_scale + first * kLanes,
                  work.scores + first * kLanes);
    kernels.weigh(work.scores, M, base, sight, call.soft_cap, state, depth);
    for (int64_t key = from; key < to;) {  // slots of a page lie one behind the other
      int64_t count = std::min(to - key, call.K - (base + key) % call.K);
      kernels.add_values(M, work.scores + key, call.ValueAt(tile.s, tile.j, base + key),
                         call.scales == nullptr ? nullptr : work.v_scale + key, count, call.E,
                         state.value, depth);
      key += count;
    }
  }
}

// What the joining starts from: nothing, or the sinks, which have weight and no value.
template <typename KV>
void StartTotal(const Call<KV>& call, const Tile& tile, const State& total) {
  int64_t M = tile.count * call.group();
  Clear(total, M, call.depth());
  if (call.sinks_H == nullptr) return;
  for (int64_t m = 0; m < M; ++m) {
    total.max[m] = call.sinks_H[tile.j * call.group() + m % call.group()];
    total.sum[m] = 1;
  }
}

template <typename KV>
void WriteOutput(const Call<KV>& call, const Tile& tile, const State& total) {
  int64_t depth = call.depth(), group = call.group();
  for (int64_t m = 0; m < tile.count * group; ++m) {
    int64_t h = tile.j * group + m % group;
    float* out = call.out_THE + ((tile.t0 + m / group) * call.H + h) * call.E;
    float sum = total.sum[m] > 0 ? total.sum[m] : 1;
    for (int64_t e = 0; e < call.E; ++e) out[e] = total.value[m * depth + e] / sum;
  }
}

template <typename KV>
void AttendTile(const Call<KV>& call, const Kernels<KV>& kernels, const Tile& tile, float* scratch,
                float* states) {
  int64_t depth = call.depth(), group = call.group(), M = tile.count * group;
  Workspace work(scratch, M, call.E, depth);
  for (int64_t m = 0; m < M; ++m) {
    int64_t h = tile.j * group + m % group;
    const float* q = call.q_THE + ((tile.t0 + m / group) * call.H + h) * call.E;
    for (int64_t e = 0; e < call.E; ++e) work.q[m * call.E + e] = q[e] * call.scale;
  }
  if (tile.state >= 0) {
    State state = State::At(states + tile.state, M, depth);
    return AttendSegment(call, kernels, tile, tile.segment0, work, state);
  }
  StartTotal(call, tile, work.total);
  for (int64_t segment = tile.segment0; segment < tile.segment1; ++segment) {
    AttendSegment(call, kernels, tile, segment, work, work.state);
    kernels.join(work.total, work.state, M, depth);
  }
  WriteOutput(call, tile, work.total);
}

// Joins the segments of a tile that were computed apart.
template <typename KV>
void JoinTile(const Call<KV>& call, const Kernels<KV>& kernels, const Tile& tile, float* scratch,
              float* states) {
  int64_t depth = call.depth(), M = tile.count * call.group();
  State total = State::At(scratch, M, depth);
  StartTotal(call, tile, total);
  for (int64_t i = 0; i < tile.segment1 - tile.segment0; ++i) {
    int64_t at = tile.state + i * State::Floats(M, depth);
    kernels.join(total, State::At(states + at, M, depth), M, depth);
  }
  WriteOutput(call, tile, total);
}

// ---- a call ------------------------------------------------------------------------------------

template <typename KV>
void WriteToken(const Call<KV>& call, int64_t s, int64_t t) {
  int64_t position = call.FirstPosition(s) + t - call.cu_q_len_S1[s];
  for (int64_t j = 0; j < call.J; ++j) {
    int64_t from = t * call.J + j;
    KV* key = call.KeyAt(s, j, position);
    for (int64_t e = 0; e < call.E; ++e) key[e * call.lanes()] = call.k_TJE[from * call.E + e];
    std::memcpy(call.ValueAt(s, j, position), call.v_TJE + from * call.E, call.E * sizeof(KV));
    if (call.scales != nullptr) {
      float* scale = call.ScaleAt(s, j, position);
      scale[0] = call.k_scale_TJ[from];
      scale[call.K] = call.v_scale_TJ[from];
    }
  }
}

// Null if lengths, pages and tokens fit the arrays they point into: a wrong one would write anywhere.
template <typename KV>
const char* Check(const Call<KV>& call) {
  if (call.num_rows < 0 || call.num_rows > call.S) return "num_rows beyond the table";
  if (call.cu_q_len_S1[0] != 0) return "cu_q_len does not start at 0";
  for (int64_t s = 0; s < call.num_rows; ++s) {
    int64_t length = call.kv_len_S[s], tokens = call.cu_q_len_S1[s + 1] - call.cu_q_len_S1[s];
    if (tokens < 0 || call.cu_q_len_S1[s + 1] > call.T) return "cu_q_len beyond the tokens";
    if (length < tokens || length > call.P * call.K) return "kv_len beyond the pages, or too short";
    for (int64_t p = call.FirstVisible(length - tokens) / call.K; p * call.K < length; ++p) {
      int32_t page = call.page_table_SP[s * call.P + p];
      if (tokens > 0 && (page < 0 || page >= call.G)) return "page id beyond the cache";
    }
  }
  return nullptr;
}

struct Plan {
  std::vector<Tile> tiles;  // one per task
  std::vector<Tile> split;  // tiles whose segments are tasks of their own
  int64_t state_floats = 0, max_vectors = 0;
};

// Tiles with the most keys first, so that the threads finish together.
template <typename KV>
Plan MakePlan(const Call<KV>& call) {
  Plan plan;
  int64_t tile_tokens = std::max<int64_t>(1, kTileVectors / call.group());
  for (int64_t s = 0; s < call.num_rows; ++s) {
    int64_t end = call.cu_q_len_S1[s + 1], first = call.cu_q_len_S1[s];
    for (int64_t t0 = first; t0 < end; t0 += tile_tokens) {
      int64_t count = std::min(tile_tokens, end - t0), M = count * call.group();
      int64_t position = call.FirstPosition(s) + t0 - first;
      int64_t segment0 = call.FirstVisible(position) / kSegment;
      int64_t segment1 = CeilDiv(position + count, kSegment);
      plan.max_vectors = std::max(plan.max_vectors, M);
      for (int64_t j = 0; j < call.J; ++j) {
        Tile tile{s, j, t0, count, segment0, segment1, -1};
        if (end - first > 1 || segment1 - segment0 == 1) {
          plan.tiles.push_back(tile);
          continue;
        }
        tile.state = plan.state_floats;
        plan.split.push_back(tile);
        for (int64_t i = segment0; i < segment1; ++i) {
          plan.tiles.push_back({s, j, t0, count, i, i + 1, plan.state_floats});
          plan.state_floats += State::Floats(M, call.depth());
        }
      }
    }
  }
  std::stable_sort(plan.tiles.begin(), plan.tiles.end(), [](const Tile& a, const Tile& b) {
    return (a.segment1 - a.segment0) * a.count > (b.segment1 - b.segment0) * b.count;
  });
  return plan;
}

template <typename KV>
void Attend(const Call<KV>& call, Isa isa) {
  Team team;
  int64_t used = call.cu_q_len_S1[call.num_rows];
  int64_t token_bytes = 2 * call.J * call.E * sizeof(KV);
  int64_t rows_a_task = call.num_rows;
  if (used * token_bytes > kTaskBytes) rows_a_task = 1;
  team.ForEach(CeilDiv(call.num_rows, std::max<int64_t>(1, rows_a_task)), [&](int64_t task, int) {
    int64_t end = std::min((task + 1) * rows_a_task, call.num_rows);
    for (int64_t s = task * rows_a_task; s < end; ++s) {
      for (int64_t t = call.cu_q_len_S1[s]; t < call.cu_q_len_S1[s + 1]; ++t) WriteToken(call, s, t);
    }
  });
  std::memset(call.out_THE + used * call.H * call.E, 0,
              (call.T - used) * call.H * call.E * sizeof(float));

  Plan plan = MakePlan(call);
  const Kernels<KV> kernels(isa);
  size_t thread_floats =
      Align64(Workspace::Floats(plan.max_vectors, call.E, call.depth()) * sizeof(float)) /
      sizeof(float);
  float* scratch = team.Scratch<float>(thread_floats * NumThreads() + plan.state_floats);
  float* states = scratch + thread_floats * NumThreads();
  team.ForEach(plan.tiles.size(), [&](int64_t task, int thread) {
    AttendTile(call, kernels, plan.tiles[task], scratch + thread * thread_floats, states);
  });
  team.ForEach(plan.split.size(), [&](int64_t task, int thread) {
    JoinTile(call, kernels, plan.split[task], scratch + thread * thread_floats, states);
  });
}

using IntBuffer = ffi::Buffer<ffi::S32>;

// q [T, H, E]; k, v [T, J, E] in the cache's type; k_scale, v_scale [T, J] and scales
// [L, G, J, 2, K], empty unless that are codes; pages [L, G, J, 2, K, E]; sinks [H] or empty. The
// second and third result are `pages` and `scales`, written in place.
ffi::Error RaggedAttention(ffi::Buffer<ffi::F32> q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::Buffer<ffi::F32> k_scale, ffi::Buffer<ffi::F32> v_scale,
                           ffi::AnyBuffer pages, ffi::Buffer<ffi::F32> scales,
                           IntBuffer page_table, IntBuffer kv_len, IntBuffer cu_q_len,
                           IntBuffer num_rows, IntBuffer layer, ffi::Buffer<ffi::F32> sinks,
                           ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> new_pages,
                           ffi::ResultBuffer<ffi::F32> new_scales, float scale, float soft_cap,
                           int64_t window, int64_t isa) {
  auto dims = pages.dimensions();
  int64_t L = dims[0], index = layer.typed_data()[0];
  if (index < 0 || index >= L) return ffi::Error::InvalidArgument("attention: no such layer");
  if (new_pages->untyped_data() != pages.untyped_data() ||
      new_scales->untyped_data() != scales.untyped_data()) {
    return ffi::Error::Internal("attention: the cache is not updated in place");
  }
  auto run = [&](auto type) {
    using KV = decltype(type);
    bool quantised = sizeof(KV) == 1 || std::is_same_v<KV, int16_t>;
    Call<KV> call{};
    call.T = q.dimensions()[0];
    call.H = q.dimensions()[1];
    call.E = q.dimensions()[2];
    call.J = k.dimensions()[1];
    call.S = page_table.dimensions()[0];
    call.P = page_table.dimensions()[1];
    call.G = dims[1];
    call.K = dims[4];
    call.q_THE = q.typed_data();
    call.k_TJE = static_cast<const KV*>(k.untyped_data());
    call.v_TJE = static_cast<const KV*>(v.untyped_data());
    call.k_scale_TJ = quantised ? k_scale.typed_data() : nullptr;
    call.v_scale_TJ = quantised ? v_scale.typed_data() : nullptr;
    call.pages = static_cast<KV*>(pages.untyped_data()) + pages.element_count() / L * index;
    call.scales = quantised ? scales.typed_data() + scales.element_count() / L * index : nullptr;
    call.page_table_SP = page_table.typed_data();
    call.kv_len_S = kv_len.typed_data();
    call.cu_q_len_S1 = cu_q_len.typed_data();
    call.num_rows = num_rows.typed_data()[0];
    call.sinks_H = sinks.element_count() > 0 ? sinks.typed_data() : nullptr;
    call.out_THE = out->typed_data();
    call.scale = scale;
    call.soft_cap = soft_cap;
    call.window = window;
    if (const char* wrong = Check(call)) {
      return ffi::Error::InvalidArgument(std::string("attention: ") + wrong);
    }
    Attend(call, ChooseIsa(isa));
    return ffi::Error::Success();
  };
  switch (pages.element_type()) {
    case ffi::F32: return run(float{});
    case ffi::BF16: return run(BFloat16{});
    case ffi::S16: return run(int16_t{});
    case ffi::S8: return run(int8_t{});
    case ffi::F8E4M3FN: return run(Float8{});
    default: return ffi::Error::InvalidArgument("attention: unknown KV dtype");
  }
}

}  // namespace
}  // namespace jaxserve::attention

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_ragged_attention, jaxserve::attention::RaggedAttention,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // q
                                  .Arg<xla::ffi::AnyBuffer>()              // k
                                  .Arg<xla::ffi::AnyBuffer>()              // v
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // k_scale
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // v_scale
                                  .Arg<xla::ffi::AnyBuffer>()              // pages
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // scales
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // page_table
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // kv_len
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // cu_q_len
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // num_rows
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // layer
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // sinks
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // out
                                  .Ret<xla::ffi::AnyBuffer>()              // pages
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // scales
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("isa"));

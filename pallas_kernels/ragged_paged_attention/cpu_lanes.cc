// Ragged paged attention by lanes: products on the vector units, in float32, for every processor and
// every kind of cache; see cpu.h.
//
// Products read the pages where they are. For that a page holds its V slot by slot, but its K turned,
// 16 slots side by side: a vector of K is one element of 16 keys, and scores come out as vectors.

#include "cpu.h"

namespace jaxserve::attention {
namespace {

constexpr int kFar = 2;  // prefetch into the second cache: that one has more lines on their way at a time

// ---- keys and values ---------------------------------------------------------------------------

JAXSERVE_INLINE float Widened(float x) { return x; }
JAXSERVE_INLINE float Widened(BFloat16 x) {
  uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// 16 stored numbers as floats, before any scale. GCC 12 widens to 64 bytes by five instructions where AVX-512
// has one.
template <Isa kIsa, typename KV>
JAXSERVE_INLINE Lanes WidenBy(const KV* at) {
#if JAXSERVE_X86
  if constexpr (kIsa == Isa::kAvx512 && !std::is_same_v<KV, float> && !std::is_same_v<KV, Float8>) {
    IntLanes wide;
    const auto& stored = *reinterpret_cast<const char(*)[kLanes * sizeof(KV)]>(at);
    if constexpr (std::is_same_v<KV, BFloat16>) {
      asm("vpmovzxwd %1, %0" : "=v"(wide) : "m"(stored));
      return reinterpret_cast<Lanes>(wide << 16);
    } else if constexpr (std::is_same_v<KV, int16_t>) {
      asm("vpmovsxwd %1, %0" : "=v"(wide) : "m"(stored));
    } else {
      asm("vpmovsxbd %1, %0" : "=v"(wide) : "m"(stored));
    }
    return __builtin_convertvector(wide, Lanes);
  }
#endif
  return Widen(at);
}

// A thread's working memory.
struct Workspace {
  float* q;       // [M][E], scaled
  float* keys;    // [kBlock / kLanes][E][kLanes] of KV, where pages do not lie that way
  float* k_scale;  // [kBlock], of codes; v_scale the same
  float* v_scale;
  float* scores;  // [M][kBlock], then the weights

  static int64_t Floats(int64_t M, int64_t E) { return M * E + kBlock * (E + 2 + M); }
  Workspace(float* memory, int64_t M, int64_t E) {
    keys = memory;
    k_scale = keys + kBlock * E;
    v_scale = k_scale + kBlock;
    scores = v_scale + kBlock;
    q = scores + M * kBlock;
  }
};

// ---- products ----------------------------------------------------------------------------------

// Scores of kRows queries [E] with kGroups groups of 16 keys [E][16], the elements in order, times the
// keys' scales where they have any. ahead: for each group as much to ask memory for meanwhile, or null.
template <Isa kIsa, int kRows, int kGroups, typename KV>
JAXSERVE_INLINE void ScoreTile(const float* q, int64_t E, const KV* const* groups,
                               const KV* const* ahead, const float* k_scale, float* scores) {
  Lanes sum[kRows][kGroups] = {};
  for (int64_t e = 0; e < E; ++e) {
    Lanes keys[kGroups];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      keys[g] = WidenBy<kIsa>(groups[g] + e * kLanes);
      if (ahead != nullptr) __builtin_prefetch(ahead[g] + e * kLanes, 0, kFar);
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
// elements are before E, so that no load has to be cut (which would put the sums into memory). ahead: as
// much to ask memory for meanwhile, or null.
template <Isa kIsa, int kRows, int kVectors, bool kWhole, typename KV>
JAXSERVE_INLINE void ValueTile(const float* weights, const KV* v, const KV* ahead, int64_t keys,
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
      from[i] = kWhole ? WidenBy<kIsa>(v + k * E + at) : LoadVector(v + k * E, at, E);
      if (ahead != nullptr) __builtin_prefetch(ahead + k * E + at, 0, kFar);
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
  using Signature = void(int64_t M, int64_t num_groups, const float* q, int64_t E, const KV* const* groups,
                         const KV* const* ahead, const float* k_scale, float* scores);
  template <Isa kIsa>
  static JAXSERVE_INLINE void Run(int64_t M, int64_t num_groups, const float* q, int64_t E,
                                  const KV* const* groups, const KV* const* ahead, const float* k_scale,
                                  float* scores) {
    auto tile = [&](auto rows, auto columns, int64_t row, int64_t group)
                    __attribute__((always_inline)) {
      ScoreTile<kIsa, decltype(rows)::value, decltype(columns)::value>(
          q + row * E, E, groups + group, row == 0 ? ahead + group : nullptr,
          k_scale == nullptr ? nullptr : k_scale + group * kLanes,
          scores + row * kBlock + group * kLanes);
    };
    Cover<kIsa, kMostRows<kIsa>>(M, num_groups, tile);
  }
};

template <typename KV>
struct ValueOp {
  using Signature = void(int64_t M, const float* weights, const KV* v, const KV* ahead, int64_t keys, int64_t E,
                         float* value, int64_t depth);
  template <Isa kIsa>
  static JAXSERVE_INLINE void Run(int64_t M, const float* weights, const KV* v, const KV* ahead, int64_t keys,
                                  int64_t E, float* value, int64_t depth) {
    auto tile = [&](auto rows, auto columns, int64_t row, int64_t vector)
                    __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value, kVectors = decltype(columns)::value;
      const float* w = weights + row * kBlock;
      float* to = value + row * depth;
      const KV* next = row == 0 ? ahead : nullptr;
      if ((vector + kVectors) * kLanes <= E) {
        ValueTile<kIsa, kRows, kVectors, true>(w, v, next, keys, vector * kLanes, E, to, depth);
      } else {
        ValueTile<kIsa, kRows, kVectors, false>(w, v, next, keys, vector * kLanes, E, to, depth);
      }
    };
    Cover<kIsa, kMostRows<kIsa>>(M, depth / kLanes, tile);
  }
};

// Scores of one query over a block -> weights, in place, times the values' scales where they have any, and its
// state made ready to add their values. The query sees keys [low, high) of the block.
JAXSERVE_INLINE void Weigh(float* scores, int64_t low, int64_t high, float soft_cap, const float* v_scale,
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
    StoreLanes(scores + v * kLanes, v_scale == nullptr ? weight : weight * LoadLanes(v_scale + v * kLanes));
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

struct WeighOp {
  using Signature = void(float* scores, int64_t M, const Sight& sight, float soft_cap, const float* v_scale,
                         const State& state, int64_t depth);
  template <Isa>
  static JAXSERVE_INLINE void Run(float* scores, int64_t M, const Sight& sight, float soft_cap,
                                  const float* v_scale, const State& state, int64_t depth) {
    for (int64_t m = 0; m < M; ++m) {
      int64_t token = m / sight.group;
      Weigh(scores + m * kBlock, sight.low(token), sight.high(token), soft_cap, v_scale, state, m,
            depth);
    }
  }
};

template <typename Op>
using Entry = PerIsa<Op, typename Op::Signature>;

// Where the groups of 16 keys lie that hold the keys in sight: in their pages, or, where pages are too
// small for that, copied to the workspace.
template <typename KV>
void FindKeys(const Call<KV>& call, const Tile& tile, const Sight& sight, const Workspace& work,
              const KV** groups) {
  int64_t first = sight.from / kLanes;
  if (call.lanes() == kLanes) {
    for (int64_t g = first; g * kLanes < sight.to; ++g) {
      groups[g - first] = call.KeyAt(tile.s, tile.j, sight.base + g * kLanes);
    }
    return;
  }
  KV* copy = reinterpret_cast<KV*>(work.keys);
  std::memset(copy, 0, kBlock * call.E * sizeof(KV));
  for (int64_t key = sight.from; key < sight.to; ++key) {
    const KV* k = call.KeyAt(tile.s, tile.j, sight.base + key);
    KV* lane = copy + key / kLanes * kLanes * call.E + key % kLanes;
    for (int64_t e = 0; e < call.E; ++e) lane[e * kLanes] = k[e * call.lanes()];
  }
  for (int64_t g = first; g * kLanes < sight.to; ++g) groups[g - first] = copy + g * kLanes * call.E;
}

// Scales of a block's keys and values, [kBlock] each.
template <typename KV>
void CopyScales(const Call<KV>& call, const Tile& tile, const Sight& sight, float* k_scale,
                float* v_scale) {
  ForEachRun(call, sight, [&](int64_t key, int64_t count) {
    const float* scale = call.ScaleAt(tile.s, tile.j, sight.base + key);
    std::memcpy(k_scale + key, scale, count * sizeof(float));
    std::memcpy(v_scale + key, scale + call.K, count * sizeof(float));
  });
}

// ---- a tile ------------------------------------------------------------------------------------

template <typename KV>
void Start(const Call<KV>& call, const Tile& tile, float* memory) {
  int64_t M = tile.count * call.group();
  Workspace work(memory, M, call.E);
  for (int64_t m = 0; m < M; ++m) {
    float* to = work.q + m * call.E;
    auto scale = [&](const auto* q) {
      for (int64_t e = 0; e < call.E; ++e) to[e] = Widened(q[e]) * call.scale;
    };
    int64_t at = call.QueryAt(tile, m);
    if (call.bfloat16) {
      scale(static_cast<const BFloat16*>(call.q_THE) + at);
    } else {
      scale(static_cast<const float*>(call.q_THE) + at);
    }
  }
}

template <typename KV>
void Attend(const Call<KV>& call, const Tile& tile, int64_t segment, const Tile& after, float* memory,
            const State& state) {
  int64_t depth = call.depth(), M = tile.count * call.group();
  Workspace work(memory, M, call.E);
  for (int64_t base = segment * kSegment; base < (segment + 1) * kSegment; base += kBlock) {
    const Sight sight(call, tile, base);
    if (sight.from >= sight.to) continue;
    WriteOnly(call, tile, sight);
    const KV* groups[kKeyGroups];
    FindKeys(call, tile, sight, work, groups);
    if (kCodes<KV>) CopyScales(call, tile, sight, work.k_scale, work.v_scale);
    // Memory is asked for a block's values while its keys are read, and for the next keys meanwhile.
    const Sight later(call, tile, base + kBlock);
    const bool more = later.from < later.to;
    const Groups<KV> here(call, tile, sight);
    const Groups<KV> next(call, more ? tile : after, more ? later : FirstSight(call, after, after.segment0));
    int64_t first = sight.from / kLanes;
    Entry<ScoreOp<KV>>::For(call.isa)(
        M, CeilDiv(sight.to, kLanes) - first, work.q, call.E, groups, here.value + first,
        kCodes<KV> ? work.k_scale + first * kLanes : nullptr, work.scores + first * kLanes);
    Entry<WeighOp>::For(call.isa)(work.scores, M, sight, call.soft_cap, kCodes<KV> ? work.v_scale : nullptr,
                                  state, depth);
    ForEachRun(call, sight, [&](int64_t key, int64_t count) {
      Entry<ValueOp<KV>>::For(call.isa)(
          M, work.scores + key, call.ValueAt(tile.s, tile.j, base + key),
          next.key[key / kLanes] + key % kLanes * call.E, count, call.E, state.value, depth);
    });
  }
}

}  // namespace

template <typename KV>
Way<KV> ByLanes() {
  return {kFewestVectors, [](const Call<KV>& call, int64_t M) { return Workspace::Floats(M, call.E); },
          Start<KV>, Attend<KV>};
}

template Way<float> ByLanes();
template Way<BFloat16> ByLanes();
template Way<int16_t> ByLanes();
template Way<int8_t> ByLanes();
template Way<Float8> ByLanes();

}  // namespace jaxserve::attention

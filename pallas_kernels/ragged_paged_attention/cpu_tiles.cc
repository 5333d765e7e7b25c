// Ragged paged attention over bfloat16 by tiles: products on AMX's tile unit, which multiplies bfloat16
// and adds up in float32; see cpu.h.
//
// A block's K and V are copied as the tile unit wants them: K as pairs of elements of 16 keys, V as pairs
// of keys of 16 elements. Weights are rounded to bfloat16, as on other accelerators. The tile unit's time
// does not depend on the rows of a tile, and its sums not on what is in the other rows: one token takes
// the same way as many.

#include "cpu_tiles.h"

namespace jaxserve::attention {

#if JAXSERVE_X86

namespace {

constexpr int kRows = 16;  // query vectors of a tile, at most

// What of a call the arithmetic needs.
struct Form {
  int64_t M, E;
  float scale, soft_cap;

  int64_t depth() const { return CeilDiv(E, kLanes) * kLanes; }
  int64_t deep() const { return CeilDiv(E, 2 * kLanes) * 2 * kLanes; }  // whole tiles of q
  int64_t tiles() const { return CeilDiv(M, kRows); }
  int64_t rows() const { return CeilDiv(M, tiles()); }  // tiles of about the same height
  int64_t padded() const { return tiles() * rows(); }
};

// A thread's working memory.
struct Workspace {
  BFloat16* q;        // [padded][deep]
  int8_t* keys;       // [kKeyGroups][deep / 32] tiles of [16 pairs of elements][16 keys][2]
  int8_t* values;     // [kBlock / 32][depth / 16] tiles of [16 pairs of keys][16 elements][2]
  float* scores;      // [kRows][kBlock]
  BFloat16* weights;  // [kRows][kBlock]
  float* sums;        // [padded][kLanes]: a vector's sum, in as many parts
  BFloat16* zeros;    // a value of nothing

  int64_t floats;  // of all

  Workspace(float* begin, const Form& form) {
    Memory memory{begin};
    memory.Take(q, form.padded() * form.deep() * 2);
    memory.Take(keys, kBlock * form.deep() * 2);
    memory.Take(values, kBlock * form.depth() * 2);
    memory.Take(scores, kRows * kBlock * 4);
    memory.Take(weights, kRows * kBlock * 2);
    memory.Take(sums, form.padded() * kLanes * 4);
    memory.Take(zeros, form.depth() * 2);
    floats = memory.at - begin;
  }
};

Form FormOf(const Call<BFloat16>& call, int64_t M) {
  return {M, call.E, call.scale, call.soft_cap};
}

// ---- keys and values as pairs -------------------------------------------------------------------

// 16 pairs of bfloat16: those at `first` below those at `second`.
JAXSERVE_AMX inline __m512i Pairs(const BFloat16* first, const BFloat16* second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
  both = _mm512_inserti64x4(both, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)), 1);
  return _mm512_permutexvar_epi16(order, both);
}

// Keys as pairs of elements. Groups go side by side, as the processor runs ahead in each of them, and the
// next block's are asked for meanwhile.
JAXSERVE_AMX void CopyKeys(const Groups<BFloat16>& from, const Groups<BFloat16>& next, const Form& form,
                           int8_t* to) {
  for (int64_t e = 0; e < form.E; e += 2, to += 64) {
#pragma GCC unroll 4
    for (int64_t g = 0; g < kKeyGroups; ++g) {
      const BFloat16* at = from.key[g] + e * kLanes;
      _mm512_store_si512(to + g * kLanes * form.deep() * 2, Pairs(at, at + kLanes));
      if (form.tiles() == 1) Prefetch(next.key[g] + e * kLanes);
    }
  }
}

// Values as pairs of keys. A key out of sight gets zeros: its slot may hold no numbers.
JAXSERVE_AMX void CopyValues(const Groups<BFloat16>& from, const Groups<BFloat16>& next,
                             const Sight& sight, const Form& form, const BFloat16* zeros, int8_t* values) {
  const int64_t whole = form.E / kLanes * kLanes, rest = form.E - whole;
  for (int64_t pair = 0; pair < kBlock / 2; ++pair) {
    const int64_t key = 2 * pair, g = key / kLanes, at = key % kLanes * form.E;
    auto row = [&](int64_t i) {
      return key + i >= sight.from && key + i < sight.to ? from.value[g] + at + i * form.E : zeros;
    };
    const BFloat16 *first = row(0), *second = row(1);
    int8_t* to = values + pair / kRows * (form.depth() / kLanes) * kTileBytes + pair % kRows * 64;
    for (int64_t e = 0; e < whole; e += kLanes, to += kTileBytes) {
      _mm512_store_si512(to, Pairs(first + e, second + e));
      if (form.tiles() == 1) Prefetch(next.value[g] + at + 2 * e);
    }
    if (rest == 0) continue;
    BFloat16 part[2][kLanes] = {};
    std::memcpy(part[0], first + whole, rest * sizeof(BFloat16));
    std::memcpy(part[1], second + whole, rest * sizeof(BFloat16));
    _mm512_store_si512(to, Pairs(part[0], part[1]));
  }
}

// ---- products on the tile unit ------------------------------------------------------------------

struct TileUnit {
  JAXSERVE_AMX static void Begin(const Form& form) { ConfigureTiles(form.rows(), kFirstRight, 8); }
  JAXSERVE_AMX static void End() { _tile_release(); }

  // The scores of a tile's queries, before the scale.
  JAXSERVE_AMX static void Score(const Form& form, const BFloat16* q, const Workspace& work) {
    const int64_t steps = form.deep() / (2 * kLanes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < steps; ++i) {
      _tile_loadd(4, q + i * 2 * kLanes, form.deep() * 2);
      const int8_t* keys = work.keys + i * kTileBytes;
      _tile_loadd(5, keys, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, keys + steps * kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, keys + 2 * steps * kTileBytes, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, keys + 3 * steps * kTileBytes, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, work.scores, kBlock * 4);
    _tile_stored(1, work.scores + kLanes, kBlock * 4);
    _tile_stored(2, work.scores + 2 * kLanes, kBlock * 4);
    _tile_stored(3, work.scores + 3 * kLanes, kBlock * 4);
  }

  // Adds to kVectors x 16 elements of a tile's values, from vector v on, what the block's keys weigh.
  template <int kVectors>
  JAXSERVE_AMX static void AddValues(const Form& form, const Workspace& work, float* value, int64_t v) {
    const int64_t stride = form.depth() * 4, half = form.depth() / kLanes * kTileBytes;
    float* at = value + v * kLanes;
    _tile_loadd(0, at, stride);
    if constexpr (kVectors > 1) _tile_loadd(1, at + kLanes, stride);
    if constexpr (kVectors > 2) _tile_loadd(2, at + 2 * kLanes, stride);
    if constexpr (kVectors > 3) _tile_loadd(3, at + 3 * kLanes, stride);
    for (int i = 0; i < 2; ++i) {
      const int8_t* from = work.values + i * half + v * kTileBytes;
      _tile_loadd(4, work.weights + i * 2 * kLanes, kBlock * 2);
      _tile_loadd(5, from, 64);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (kVectors > 1) _tile_loadd(6, from + kTileBytes, 64);
      if constexpr (kVectors > 1) _tile_dpbf16ps(1, 4, 6);
      if constexpr (kVectors > 2) _tile_loadd(7, from + 2 * kTileBytes, 64);
      if constexpr (kVectors > 2) _tile_dpbf16ps(2, 4, 7);
      if constexpr (kVectors > 3) _tile_loadd(5, from + 3 * kTileBytes, 64);
      if constexpr (kVectors > 3) _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, at, stride);
    if constexpr (kVectors > 1) _tile_stored(1, at + kLanes, stride);
    if constexpr (kVectors > 2) _tile_stored(2, at + 2 * kLanes, stride);
    if constexpr (kVectors > 3) _tile_stored(3, at + 3 * kLanes, stride);
  }
};

// ---- the same on vector units -------------------------------------------------------------------

struct VectorUnit {
  static void Begin(const Form&) {}
  static void End() {}

  JAXSERVE_AMX static void Score(const Form& form, const BFloat16* q, const Workspace& work) {
    CoverRows<1>(form.rows(), [&](auto rows, int64_t row) JAXSERVE_AMX __attribute__((always_inline)) {
      constexpr int kPart = decltype(rows)::value;
      __m512 sum[kPart][kKeyGroups] = {};
      Multiply(sum, q + row * form.deep(), form.deep(), CeilDiv(form.E, 2), work.keys,
               form.deep() / (2 * kLanes) * kTileBytes);
      Store(sum, work.scores + row * kBlock, kBlock);
    });
  }

  template <int kVectors>
  JAXSERVE_AMX static void AddValues(const Form& form, const Workspace& work, float* value, int64_t v) {
    CoverRows<1>(form.rows(), [&](auto rows, int64_t row) JAXSERVE_AMX __attribute__((always_inline)) {
      constexpr int kPart = decltype(rows)::value;
      float* at = value + row * form.depth() + v * kLanes;
      __m512 sum[kPart][kVectors];
#pragma GCC unroll 6
      for (int r = 0; r < kPart; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) sum[r][c] = _mm512_loadu_ps(at + r * form.depth() + c * kLanes);
      }
      for (int i = 0; i < 2; ++i) {
        const int64_t tile = i * form.depth() / kLanes + v;
        Multiply(sum, work.weights + row * kBlock + i * 2 * kLanes, kBlock, kLanes,
                 work.values + tile * kTileBytes, kTileBytes);
      }
      Store(sum, at, form.depth());
    });
  }

 private:
  // Adds up the products of `pairs` pairs of the left operand's rows and of the right one's columns.
  template <int kPart, int kColumns>
  JAXSERVE_AMX static __attribute__((always_inline)) void Multiply(
      __m512 (&sum)[kPart][kColumns], const BFloat16* left, int64_t left_stride, int64_t pairs,
      const int8_t* right, int64_t right_stride) {
    for (int64_t i = 0; i < pairs; ++i) {
      __m512bh column[kColumns];
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        column[c] = (__m512bh)_mm512_load_si512(right + c * right_stride + i * 64);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kPart; ++r) {
        const auto pair = (__m512bh)Broadcast(left + r * left_stride + 2 * i);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pair, column[c]);
      }
    }
  }

  template <int kPart, int kColumns>
  JAXSERVE_AMX static __attribute__((always_inline)) void Store(const __m512 (&sum)[kPart][kColumns],
                                                                float* to, int64_t stride) {
#pragma GCC unroll 6
    for (int r = 0; r < kPart; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) _mm512_storeu_ps(to + r * stride + c * kLanes, sum[r][c]);
    }
  }
};

// ---- a block, for one tile of queries -----------------------------------------------------------

// The scores of `rows` vectors from m0 on -> weights, and their state made ready to add the values.
// state.max counts in scores before the scale, and in powers of two.
JAXSERVE_AMX void Weigh(const Form& form, const Workspace& work, const Sight& sight, int64_t m0,
                        int64_t rows, const State& state) {
  alignas(64) float old[kRows], top[kRows], keep[kRows];
  const __m512 none = _mm512_set1_ps(kNone);
  const float unit = form.soft_cap > 0 ? kLog2E : form.scale * kLog2E;
  uint64_t seen[kRows];
  for (int64_t r = 0, token = m0 / sight.group, head = m0 % sight.group; r < rows; ++r) {
    float* scores = work.scores + r * kBlock;
    seen[r] = Seen(sight, token);
    if (++head == sight.group) head = 0, ++token;
    __m512 best = none;
#pragma GCC unroll 4
    for (int v = 0; v < kKeyGroups; ++v) {
      __m512 score = _mm512_load_ps(scores + v * kLanes);
      if (form.soft_cap > 0) {
        Lanes scaled = reinterpret_cast<Lanes>(score) * form.scale;
        score = reinterpret_cast<__m512>(SoftCap(scaled, form.soft_cap));
        _mm512_store_ps(scores + v * kLanes, score);
      }
      best = _mm512_mask_max_ps(best, static_cast<__mmask16>(seen[r] >> v * kLanes), best, score);
    }
    old[r] = state.max[m0 + r];
    top[r] = std::max(old[r], _mm512_reduce_max_ps(best));
    state.max[m0 + r] = top[r];
  }
  const __mmask16 all = 0xffff;
  const __m512 change = _mm512_sub_ps(_mm512_load_ps(old), _mm512_load_ps(top));
  _mm512_store_ps(keep, Exp2(_mm512_mul_ps(change, _mm512_set1_ps(unit)), all));
  for (int64_t r = 0; r < rows; ++r) {
    const __m512 from = _mm512_set1_ps(top[r]);
    __m512 weight[kKeyGroups], total = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int v = 0; v < kKeyGroups; ++v) {
      __m512 score = _mm512_sub_ps(_mm512_load_ps(work.scores + r * kBlock + v * kLanes), from);
      const auto some = static_cast<__mmask16>(seen[r] >> v * kLanes);
      weight[v] = Exp2(_mm512_mul_ps(score, _mm512_set1_ps(unit)), some);
      total = _mm512_add_ps(total, weight[v]);
    }
    BFloat16* to = work.weights + r * kBlock;
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(weight[1], weight[0]));
    _mm512_store_si512(to + 2 * kLanes, (__m512i)_mm512_cvtne2ps_pbh(weight[3], weight[2]));
    float* sum = work.sums + (m0 + r) * kLanes;
    const __m512 kept = _mm512_set1_ps(keep[r]);
    _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(sum), kept, total));
    if (keep[r] == 1) continue;
    float* value = state.value + (m0 + r) * form.depth();
    for (int64_t e = 0; e < form.depth(); e += kLanes) {
      _mm512_storeu_ps(value + e, _mm512_mul_ps(_mm512_loadu_ps(value + e), kept));
    }
  }
}

// ---- a tile of the plan -------------------------------------------------------------------------

template <typename Unit>
JAXSERVE_AMX void AttendBlock(const Form& form, const Workspace& work, const Sight& sight,
                              const Groups<BFloat16>& groups, const Groups<BFloat16>& next,
                              const State& state) {
  const int64_t rows = form.rows(), vectors = form.depth() / kLanes;
  CopyKeys(groups, next, form, work.keys);
  for (int64_t m0 = 0; m0 < form.M; m0 += rows) {
    Unit::Score(form, work.q + m0 * form.deep(), work);
    if (m0 == 0) {  // while the tile unit is at it
      CopyValues(groups, next, sight, form, work.zeros, work.values);
    }
    Weigh(form, work, sight, m0, std::min(rows, form.M - m0), state);
    float* value = state.value + m0 * form.depth();
    int64_t v = 0;
    for (; v + 4 <= vectors; v += 4) Unit::template AddValues<4>(form, work, value, v);
    if (vectors - v == 3) Unit::template AddValues<3>(form, work, value, v);
    if (vectors - v == 2) Unit::template AddValues<2>(form, work, value, v);
    if (vectors - v == 1) Unit::template AddValues<1>(form, work, value, v);
  }
}

void Start(const Call<BFloat16>& call, const Tile& tile, float* memory) {
  const Form form = FormOf(call, tile.count * call.group());
  const Workspace work(memory, form);
  std::memset(work.q, 0, form.padded() * form.deep() * sizeof(BFloat16));
  std::memset(work.keys, 0, kBlock * form.deep() * sizeof(BFloat16));  // elements past E stay zero
  std::memset(work.weights, 0, kRows * kBlock * sizeof(BFloat16));
  std::memset(work.zeros, 0, form.depth() * sizeof(BFloat16));
  for (int64_t m = 0; m < form.M; ++m) {
    std::memcpy(work.q + m * form.deep(),
                static_cast<const BFloat16*>(call.q_THE) + call.QueryAt(tile, m),
                call.E * sizeof(BFloat16));
  }
}

template <typename Unit>
JAXSERVE_AMX void Attend(const Call<BFloat16>& call, const Tile& tile, int64_t segment, const Tile& after,
                         float* memory, const State& state) {
  const Form form = FormOf(call, tile.count * call.group());
  const Workspace work(memory, form);
  std::memset(work.sums, 0, form.padded() * kLanes * sizeof(float));
  Unit::Begin(form);
  ForEachBlock(call, tile, segment, after,
               [&](const Sight& sight, const Groups<BFloat16>& groups, const Groups<BFloat16>& next)
                   JAXSERVE_AMX { AttendBlock<Unit>(form, work, sight, groups, next, state); });
  Unit::End();
  for (int64_t m = 0; m < form.M; ++m) {
    state.sum[m] = _mm512_reduce_add_ps(_mm512_load_ps(work.sums + m * kLanes));
    if (form.soft_cap == 0) state.max[m] *= form.scale;
  }
}

template <typename Unit>
Way<BFloat16> WayBy() {
  return {4 * kFewestVectors,
          [](const Call<BFloat16>& call, int64_t M) { return Workspace(nullptr, FormOf(call, M)).floats; },
          Start, Attend<Unit>};
}

}  // namespace

Way<BFloat16> ByTiles(Isa isa) { return isa == Isa::kAmx ? WayBy<TileUnit>() : WayBy<VectorUnit>(); }

#else

Way<BFloat16> ByTiles(Isa) { return ByLanes<BFloat16>(); }

#endif  // JAXSERVE_X86

}  // namespace jaxserve::attention

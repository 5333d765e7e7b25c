// Ragged paged attention over bfloat16 by tiles: products on AMX's tile unit or, without one, on AVX-512's
// vector units, which multiply bfloat16 and add up in float32; see cpu.h.
//
// A block's K and V are multiplied as pairs: K of elements of 16 keys, V of keys of 16 elements. The tile unit
// finds them in copies, vector units make them in registers. Weights are rounded to bfloat16, as on other
// accelerators. A row's sums do not depend on what is in the other rows, nor on how many there are: one token
// takes the same way as many.

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

// A block of keys and values, and those to ask memory for meanwhile.
struct Block {
  const Form& form;
  const Workspace& work;
  const Sight& sight;
  const Groups<BFloat16>&groups, &next;

  // A key's values; of a key out of sight zeros, as its slot may hold no numbers.
  const BFloat16* Value(int64_t key) const {
    if (key < sight.from || key >= sight.to) return work.zeros;
    return groups.value[key / kLanes] + key % kLanes * form.E;
  }
};

Form FormOf(const Call<BFloat16>& call, int64_t M) {
  return {M, call.E, call.scale, call.soft_cap};
}

// ---- keys and values as pairs -------------------------------------------------------------------

// The order that makes of 32 numbers pairs, of the first 16 with the others.
JAXSERVE_AMX inline __m512i ByPairs() {
  return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                          20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
}

// 16 pairs of bfloat16: those at `first` below those at `second`.
JAXSERVE_AMX inline __m512i Pairs(const BFloat16* first, const BFloat16* second) {
  __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
  both = _mm512_inserti64x4(both, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)), 1);
  return _mm512_permutexvar_epi16(ByPairs(), both);
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

// Values as pairs of keys.
JAXSERVE_AMX void CopyValues(const Block& block, int8_t* values) {
  const Form& form = block.form;
  const int64_t whole = form.E / kLanes * kLanes, rest = form.E - whole;
  for (int64_t pair = 0; pair < kBlock / 2; ++pair) {
    const BFloat16 *first = block.Value(2 * pair), *second = block.Value(2 * pair + 1);
    const BFloat16* next = block.next.value[2 * pair / kLanes] + 2 * pair % kLanes * form.E;
    int8_t* to = values + pair / kRows * (form.depth() / kLanes) * kTileBytes + pair % kRows * 64;
    for (int64_t e = 0; e < whole; e += kLanes, to += kTileBytes) {
      _mm512_store_si512(to, Pairs(first + e, second + e));
      if (form.tiles() == 1) Prefetch(next + 2 * e);
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
  JAXSERVE_AMX static void TakeKeys(const Block& block) {
    CopyKeys(block.groups, block.next, block.form, block.work.keys);
  }
  JAXSERVE_AMX static void TakeValues(const Block& block) { CopyValues(block, block.work.values); }

  // The scores of a tile's queries, before the scale.
  JAXSERVE_AMX static void Score(const Block& block, const BFloat16* q) {
    const Form& form = block.form;
    const Workspace& work = block.work;
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

  // Adds to a tile's values what the block's keys weigh.
  JAXSERVE_AMX static void AddValues(const Block& block, float* value) {
    const int64_t vectors = block.form.depth() / kLanes;
    int64_t v = 0;
    for (; v + 4 <= vectors; v += 4) AddVectors<4>(block.form, block.work, value, v);
    if (vectors - v == 3) AddVectors<3>(block.form, block.work, value, v);
    if (vectors - v == 2) AddVectors<2>(block.form, block.work, value, v);
    if (vectors - v == 1) AddVectors<1>(block.form, block.work, value, v);
  }

 private:
  // Adds to kVectors x 16 elements of a tile's values, from vector v on, what the block's keys weigh.
  template <int kVectors>
  JAXSERVE_AMX static void AddVectors(const Form& form, const Workspace& work, float* value, int64_t v) {
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

// Keys and values become pairs on their way from their pages to the products, for each piece of a tile anew:
// there are units enough to do both.
struct VectorUnit {
  static void Begin(const Form&) {}
  static void End() {}
  static void TakeKeys(const Block&) {}

  // Elements behind the last whole vector are copied, as [kBlock][16]: a page may end with them.
  static void TakeValues(const Block& block) {
    const int64_t E = block.form.E, whole = E / kLanes * kLanes;
    if (whole == E) return;
    auto* to = reinterpret_cast<BFloat16*>(block.work.values);
    for (int64_t key = 0; key < kBlock; ++key, to += kLanes) {
      std::memset(to, 0, kLanes * sizeof(BFloat16));
      std::memcpy(to, block.Value(key) + whole, (E - whole) * sizeof(BFloat16));
    }
  }

  JAXSERVE_AMX static void Score(const Block& block, const BFloat16* q) {
    CoverRows<1>(block.form.rows(), [&](auto rows, int64_t row) JAXSERVE_AMX {
      ScoreRows<decltype(rows)::value>(block, q, row);
    });
  }

  JAXSERVE_AMX static void AddValues(const Block& block, float* value) {
    const Form& form = block.form;
    const BFloat16* values[kBlock];
    for (int64_t key = 0; key < kBlock; ++key) values[key] = block.Value(key);
    const int64_t whole = form.E / kLanes;
    int64_t v = 0;
    for (; v + 4 <= whole; v += 4) AddVectors<4>(block, values, value, v);
    for (; v + 2 <= whole; v += 2) AddVectors<2>(block, values, value, v);
    for (; v < whole; ++v) AddVectors<1>(block, values, value, v);
    if (v * kLanes == form.depth()) return;
    const auto* rest = reinterpret_cast<const BFloat16*>(block.work.values);
    for (int64_t key = 0; key < kBlock; ++key) values[key] = rest + (key - v) * kLanes;
    AddVectors<1>(block, values, value, v);
  }

 private:
  template <int kPart>
  JAXSERVE_AMX static __attribute__((noinline)) void ScoreRows(const Block& block, const BFloat16* q,
                                                               int64_t row) {
    const Form& form = block.form;
    const bool ahead = form.tiles() == 1 && row == 0;
    __m512 sum[kPart][kKeyGroups] = {};
    q += row * form.deep();
    for (int64_t e = 0; e < form.E; e += 2) {
      __m512i key[kKeyGroups];
#pragma GCC unroll 4
      for (int g = 0; g < kKeyGroups; ++g) {
        key[g] = _mm512_permutexvar_epi16(ByPairs(), _mm512_loadu_si512(block.groups.key[g] + e * kLanes));
        if (ahead) PrefetchFar(block.next.key[g] + e * kLanes);
      }
      AddProducts(sum, q + e, form.deep(), key);
    }
    Store(sum, block.work.scores + row * kBlock, kBlock);
  }

  // Adds to 16 kVectors elements of a tile's values, from vector v on.
  template <int kVectors>
  JAXSERVE_AMX static void AddVectors(const Block& block, const BFloat16* const* values, float* value,
                                      int64_t v) {
    CoverRows<1>(block.form.rows(), [&](auto rows, int64_t row) JAXSERVE_AMX {
      AddRows<decltype(rows)::value, kVectors>(block, values, value, v, row);
    });
  }

  template <int kPart, int kVectors>
  JAXSERVE_AMX static __attribute__((noinline)) void AddRows(const Block& block, const BFloat16* const* values,
                                                             float* value, int64_t v, int64_t row) {
    const int64_t E = block.form.E, stride = block.form.depth();
    const bool ahead = block.form.tiles() == 1 && row == 0;
    const BFloat16* weights = block.work.weights + row * kBlock;
    float* to = value + row * stride + v * kLanes;
    __m512 sum[kPart][kVectors];
#pragma GCC unroll 6
    for (int r = 0; r < kPart; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) sum[r][c] = _mm512_loadu_ps(to + r * stride + c * kLanes);
    }
    for (int64_t key = 0; key < kBlock; key += 2) {
      __m512i pairs[kVectors];
      PairsOf(values[key] + v * kLanes, values[key + 1] + v * kLanes, pairs);
      if (ahead) {
        const BFloat16* next = block.next.value[key / kLanes] + key % kLanes * E;
#pragma GCC unroll 4
        for (int c = 0; c < kVectors; ++c) PrefetchFar(next + (v + c) * 2 * kLanes);
      }
      AddProducts(sum, weights + key, kBlock, pairs);
    }
    Store(sum, to, stride);
  }

  // kVectors x 16 pairs of elements of two values.
  template <int kVectors>
  JAXSERVE_AMX static __attribute__((always_inline)) void PairsOf(const BFloat16* first,
                                                                  const BFloat16* second,
                                                                  __m512i (&pairs)[kVectors]) {
    if constexpr (kVectors == 1) {
      pairs[0] = Pairs(first, second);
      return;
    }
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                           38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i later = _mm512_add_epi16(order, _mm512_set1_epi16(kLanes));
#pragma GCC unroll 2
    for (int c = 0; c + 1 < kVectors; c += 2) {
      const __m512i front = _mm512_loadu_si512(first + c * kLanes);
      const __m512i back = _mm512_loadu_si512(second + c * kLanes);
      pairs[c] = _mm512_permutex2var_epi16(front, order, back);
      pairs[c + 1] = _mm512_permutex2var_epi16(front, later, back);
    }
  }

  // sum += a pair of each row, `stride` numbers apart, times the columns' pairs. GCC moves sums from register
  // to register around its own intrinsic.
  template <int kPart, int kColumns>
  JAXSERVE_AMX static __attribute__((always_inline)) void AddProducts(__m512 (&sum)[kPart][kColumns],
                                                                      const BFloat16* rows, int64_t stride,
                                                                      const __m512i (&columns)[kColumns]) {
#pragma GCC unroll 6
    for (int r = 0; r < kPart; ++r) {
      const __m512i pair = Broadcast(rows + r * stride);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum[r][c]) : "v"(pair), "v"(columns[c]));
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
JAXSERVE_AMX void AttendBlock(const Block& block, const State& state) {
  const Form& form = block.form;
  const int64_t rows = form.rows();
  Unit::TakeKeys(block);
  for (int64_t m0 = 0; m0 < form.M; m0 += rows) {
    Unit::Score(block, block.work.q + m0 * form.deep());
    if (m0 == 0) Unit::TakeValues(block);  // while the tile unit is at it
    Weigh(form, block.work, block.sight, m0, std::min(rows, form.M - m0), state);
    Unit::AddValues(block, state.value + m0 * form.depth());
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
                   JAXSERVE_AMX { AttendBlock<Unit>({form, work, sight, groups, next}, state); });
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

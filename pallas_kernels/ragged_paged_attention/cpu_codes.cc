// Ragged paged attention over int8 codes by tiles: products of bytes on AMX's tile unit or, without one, on
// AVX-512's vector units, added up exactly in int32, so that both give the same bits; see cpu.h.
//
// What meets the codes is cut into two digits of a byte: a query's elements, of 16 bits of its largest one,
// and a block's weights, times the scales of its values, of 16 bits of the largest of them. A tile holds
// the high digits of its vectors, then the low ones. That keeps more of a number than bfloat16 does, and of
// a float32 query drops a 256th of what its keys, as codes, have lost already. Codes are multiplied as they
// are, but for their order: K by four elements of 16 keys, V by four keys of 16 elements. The tile unit finds
// them so in copies, and vector units where a block has many queries (a third less time for a prompt); for few
// they are put in order in registers. A vector goes through the same operations whatever tile it is in.
//
// With the tile unit few rows wait for memory: a core has 16 lines of 64 bytes on their way at most, and with
// 128 ns a line that is 8 GB/s, half of what one long stream gets. So copying what is there already costs
// nothing: pages in the tile unit's own order took half the time from near caches (230 in place of 450 ns for
// 64 keys of a head), and the same from memory (950). On vector units copies for a decoding row did cost: 500
// in place of 360 ns.

#include "cpu_tiles.h"

namespace jaxserve::attention {

#if JAXSERVE_X86

namespace {

constexpr int kVectors = 8;     // query vectors of a tile, at most: two rows each
constexpr int kQuad = 4;        // bytes that the tile unit adds up at once
constexpr int kDeep = 64;       // elements of a query in a tile
constexpr int kWide = 64;       // elements of a value whose sums are in tiles at a time
constexpr float kSteps = 65535;  // of the largest weight
constexpr float kQuerySteps = 32639;  // of the largest element: two signed digits, the high one up to 127

// What of a call the arithmetic needs.
struct Form {
  int64_t M, E;
  float scale, soft_cap;

  int64_t depth() const { return CeilDiv(E, kLanes) * kLanes; }
  int64_t steps() const { return CeilDiv(E, kDeep); }
  int64_t tiles() const { return CeilDiv(M, kVectors); }
  int64_t vectors() const { return CeilDiv(M, tiles()); }  // of a tile, about the same in each
  int64_t padded() const { return tiles() * vectors(); }
};

// A thread's working memory.
struct Workspace {
  int8_t* q;         // [tiles][steps][2 vectors][kDeep]
  float* q_step;     // [padded]: what one step of a query's digits is worth
  int32_t* q_start;  // [tiles][2 vectors]: what sums over a row's products start from
  int8_t* keys;      // [kKeyGroups][steps] tiles of [16 quads of elements][16 keys][4]
  int8_t* values;    // [depth / 16] tiles of [16 quads of keys][16 elements][4]
  int32_t* sums;     // [2 vectors][kBlock or kWide]: what the tile unit made
  float* scores;     // [vectors][kBlock]
  uint8_t* weights;  // [2 vectors][kBlock]
  float* total;      // [padded][kLanes]: a vector's sum of weights, in as many parts

  int64_t floats;  // of all

  Workspace(float* begin, const Form& form) {
    Memory memory{begin};
    memory.Take(q, form.padded() * 2 * form.steps() * kDeep);
    memory.Take(q_step, form.padded() * 4);
    memory.Take(q_start, form.padded() * 2 * 4);
    memory.Take(keys, kKeyGroups * form.steps() * kTileBytes);
    memory.Take(values, form.depth() / kLanes * kTileBytes);
    memory.Take(sums, 2 * kVectors * kBlock * 4);
    memory.Take(scores, kVectors * kBlock * 4);
    memory.Take(weights, 2 * kVectors * kBlock);
    memory.Take(total, form.padded() * kLanes * 4);
    floats = memory.at - begin;
  }
};

// A block of keys and values, and those to ask memory for meanwhile.
struct Block {
  const Form& form;
  const Workspace& work;
  const Groups<int8_t>&groups, &next;
};

Form FormOf(const Call<int8_t>& call, int64_t M) { return {M, call.E, call.scale, call.soft_cap}; }

// 256 high + low, as floats.
JAXSERVE_AVX512_VBMI inline __m512 Joined(__m512i high, __m512i low) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
}

// For each vector of a tile: what its values are multiplied with, and what a step of its weights is worth.
struct Steps {
  alignas(64) float keep[kLanes], weight[kLanes];
};

// Adds to 16 elements of vector r's values what the sums of its weights' digits say.
JAXSERVE_AVX512_VBMI inline void AddSums(const Steps& steps, int64_t r, __m512i high, __m512i low, float* value) {
  const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(value), _mm512_set1_ps(steps.keep[r]));
  _mm512_storeu_ps(value, _mm512_fmadd_ps(Joined(high, low), _mm512_set1_ps(steps.weight[r]), old));
}

// ---- queries as digits ---------------------------------------------------------------------------

// -> what one step is worth; NaN, and no digits, for a query that is not finite.
template <typename Number>
JAXSERVE_AVX512_VBMI float Digits(const Number* from, int64_t E, int64_t steps, int64_t next_step, int8_t* high,
                                  int8_t* low) {
  Lanes top = Fill(0);
  bool finite = true;
  for (int64_t e = 0; e < E; e += kLanes) {
    const Lanes size = Magnitude(LoadSome(from + e, E - e));
    const auto bits = reinterpret_cast<__m512i>(size);
    finite &= _mm512_cmpge_epi32_mask(bits, _mm512_set1_epi32(0x7f800000)) == 0;
    top = Max(top, size);
  }
  if (!finite) return __builtin_nanf("");
  const float largest = std::max(MaxOf(top), 1e-30f);
  const __m512 inverse = _mm512_set1_ps(kQuerySteps / largest);
  for (int64_t step = 0; step < steps; ++step, high += next_step, low += next_step) {
    for (int64_t i = 0; i < kDeep && step * kDeep + i < E; i += kLanes) {
      const int64_t e = step * kDeep + i;
      const auto x = reinterpret_cast<__m512>(LoadSome(from + e, E - e));
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
      const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
      _mm_store_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(upper));
      _mm_store_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(lower));
    }
  }
  return largest / kQuerySteps;
}

template <typename Unit>
JAXSERVE_AVX512_VBMI void Start(const Call<int8_t>& call, const Tile& tile, float* memory) {
  const Form form = FormOf(call, tile.count * call.group());
  const Workspace work(memory, form);
  const int64_t vectors = form.vectors(), step_bytes = 2 * vectors * kDeep;
  std::memset(work.q, 0, form.padded() * 2 * form.steps() * kDeep);
  for (int64_t m = 0; m < form.M; ++m) {
    int8_t* high = work.q + m / vectors * form.steps() * step_bytes + m % vectors * kDeep;
    const auto digits = [&](const auto* q) JAXSERVE_AVX512_VBMI {
      return Digits(q + call.QueryAt(tile, m), form.E, form.steps(), step_bytes, high, high + vectors * kDeep);
    };
    work.q_step[m] = call.bfloat16 ? digits(static_cast<const BFloat16*>(call.q_THE))
                                   : digits(static_cast<const float*>(call.q_THE));
  }
  Unit::StartSums(form, work);
}

// ---- keys and values by fours --------------------------------------------------------------------

// 64 bytes as 16 fours: byte i of each from the i-th quarter of `from`.
JAXSERVE_AVX512_VBMI inline __m512i ByFours(__m512i from) {
  const __m512i order = _mm512_set_epi8(
      63, 47, 31, 15, 62, 46, 30, 14, 61, 45, 29, 13, 60, 44, 28, 12, 59, 43, 27, 11, 58, 42, 26, 10, 57, 41,
      25, 9, 56, 40, 24, 8, 55, 39, 23, 7, 54, 38, 22, 6, 53, 37, 21, 5, 52, 36, 20, 4, 51, 35, 19, 3, 50, 34,
      18, 2, 49, 33, 17, 1, 48, 32, 16, 0);
  return _mm512_permutexvar_epi8(order, from);
}

// 16 elements of four values, by fours.
JAXSERVE_AVX512_VBMI inline __m512i FourOf(const int8_t* at, int64_t stride) {
  auto load = [](const int8_t* row) JAXSERVE_AVX512_VBMI __attribute__((always_inline)) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
  };
  __m512i rows = _mm512_castsi128_si512(load(at));
  rows = _mm512_inserti32x4(rows, load(at + stride), 1);
  rows = _mm512_inserti32x4(rows, load(at + 2 * stride), 2);
  return ByFours(_mm512_inserti32x4(rows, load(at + 3 * stride), 3));
}

// Each key plus `above`, in order. Elements past E are whatever lies there: a query's digits are zero for them.
JAXSERVE_AVX512_VBMI void CopyKeys(const Block& block, int8_t above) {
  const auto& [form, work, from, next] = block;
  int8_t* to = work.keys;
  for (int64_t e = 0; e < form.E; e += kQuad, to += 64) {
#pragma GCC unroll 4
    for (int64_t g = 0; g < kKeyGroups; ++g) {
      const __m512i elements = _mm512_loadu_si512(from.key[g] + e * kLanes);
      const __m512i in_order = _mm512_add_epi8(ByFours(elements), _mm512_set1_epi8(above));
      _mm512_store_si512(to + g * form.steps() * kTileBytes, in_order);
      if (form.tiles() == 1) Prefetch(next.key[g] + e * kLanes);
    }
  }
}

// Keys come in the order in which Weigh packs their weights. One out of sight has weight zero.
JAXSERVE_AVX512_VBMI void CopyValues(const Block& block) {
  const auto& [form, work, from, next] = block;
  const int64_t whole = form.E / kLanes * kLanes, rest = form.E - whole;
  for (int64_t quad = 0; quad < kLanes / kQuad; ++quad) {
    for (int64_t g = 0; g < kKeyGroups; ++g) {
      const int64_t at = quad * kQuad * form.E;
      int8_t* to = work.values + (quad * kKeyGroups + g) * 64;
      for (int64_t e = 0; e < whole; e += kLanes, to += kTileBytes) {
        _mm512_store_si512(to, FourOf(from.value[g] + at + e, form.E));
        if (form.tiles() == 1) Prefetch(next.value[g] + at + e * kQuad);
      }
      if (rest == 0) continue;
      int8_t part[kQuad * kLanes] = {};
      for (int64_t i = 0; i < kQuad; ++i) {
        std::memcpy(part + i * kLanes, from.value[g] + at + i * form.E + whole, rest);
      }
      _mm512_store_si512(to, FourOf(part, kLanes));
    }
  }
}

// ---- products on the tile unit ------------------------------------------------------------------

JAXSERVE_AMX inline void StoreSums(int32_t* sums) {
  _tile_stored(0, sums, kBlock * 4);
  _tile_stored(1, sums + kLanes, kBlock * 4);
  _tile_stored(2, sums + 2 * kLanes, kBlock * 4);
  _tile_stored(3, sums + 3 * kLanes, kBlock * 4);
}

JAXSERVE_AMX inline void ZeroSums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

struct TileUnit {
  static void StartSums(const Form&, const Workspace&) {}
  JAXSERVE_AMX static void Begin(const Form& form) { ConfigureTiles(2 * form.vectors(), kFirstRight, 8); }
  JAXSERVE_AMX static void End() { _tile_release(); }
  static void TakeKeys(const Block& block) { CopyKeys(block, 0); }
  static void TakeValues(const Block& block) { CopyValues(block); }

  // The scores of a tile's `rows` vectors, from m0 on, before the scale.
  JAXSERVE_AMX static void Score(const Block& block, int64_t m0, int64_t rows) {
    const Form& form = block.form;
    const Workspace& work = block.work;
    const int64_t steps = form.steps(), step_bytes = 2 * form.vectors() * kDeep;
    const int8_t* q = work.q + m0 * 2 * steps * kDeep;
    ZeroSums();
    for (int64_t i = 0; i < steps; ++i) {
      _tile_loadd(4, q + i * step_bytes, kDeep);
      const int8_t* keys = work.keys + i * kTileBytes;
      _tile_loadd(5, keys, 64);
      _tile_dpbssd(0, 4, 5);
      _tile_loadd(6, keys + steps * kTileBytes, 64);
      _tile_dpbssd(1, 4, 6);
      _tile_loadd(7, keys + 2 * steps * kTileBytes, 64);
      _tile_dpbssd(2, 4, 7);
      _tile_loadd(5, keys + 3 * steps * kTileBytes, 64);
      _tile_dpbssd(3, 4, 5);
    }
    StoreSums(work.sums);
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t *high = work.sums + r * kBlock, *low = high + form.vectors() * kBlock;
#pragma GCC unroll 4
      for (int g = 0; g < kKeyGroups; ++g) {
        const __m512 score = Joined(_mm512_load_si512(high + g * kLanes), _mm512_load_si512(low + g * kLanes));
        _mm512_store_ps(work.scores + r * kBlock + g * kLanes,
                        _mm512_mul_ps(score, _mm512_loadu_ps(block.groups.key_scale[g])));
      }
    }
  }

  // Adds elements [e, e + 16 tiles), up to four tiles, of what a block's keys weigh to the values of `rows`
  // vectors, which start at `value`.
  JAXSERVE_AMX static void AddValues(const Block& block, const Steps& steps, int64_t rows, int64_t e,
                                     int64_t tiles, float* value) {
    const Workspace& work = block.work;
    const int8_t* values = work.values + e / kLanes * kTileBytes;
    ZeroSums();
    _tile_loadd(4, work.weights, kBlock);
    _tile_loadd(5, values, 64);
    _tile_dpbusd(0, 4, 5);
    if (tiles > 1) {
      _tile_loadd(6, values + kTileBytes, 64);
      _tile_dpbusd(1, 4, 6);
    }
    if (tiles > 2) {
      _tile_loadd(7, values + 2 * kTileBytes, 64);
      _tile_dpbusd(2, 4, 7);
    }
    if (tiles > 3) {
      _tile_loadd(5, values + 3 * kTileBytes, 64);
      _tile_dpbusd(3, 4, 5);
    }
    StoreSums(work.sums);
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t *high = work.sums + r * kBlock, *low = high + block.form.vectors() * kBlock;
      float* at = value + r * block.form.depth() + e;
      for (int64_t v = 0; v < tiles * kLanes; v += kLanes) {
        AddSums(steps, r, _mm512_load_si512(high + v), _mm512_load_si512(low + v), at + v);
      }
    }
  }
};

// ---- the same on vector units -------------------------------------------------------------------

// They multiply unsigned bytes with signed ones. So keys are taken for 128 more than they are, and sums start
// at what that will add to them: they come to the same. Where a block has a few queries, its keys and values are
// put in order on their way from their pages to the products; where it has many, once, in a copy.
struct VectorUnit {
  JAXSERVE_AVX512_VBMI static void StartSums(const Form& form, const Workspace& work) {
    const int64_t rows = 2 * form.vectors();
    for (int64_t row = 0; row < 2 * form.padded(); ++row) {
      const int8_t* q = work.q + (row / rows * form.steps() * rows + row % rows) * kDeep;
      __m512i sum = _mm512_setzero_si512();
      for (int64_t i = 0; i < form.steps(); ++i) {
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), _mm512_load_si512(q + i * rows * kDeep));
      }
      work.q_start[row] = -_mm512_reduce_add_epi32(sum);
    }
  }
  static void Begin(const Form&) {}
  static void End() {}
  static void TakeKeys(const Block& block) {
    if (Copied(block)) CopyKeys(block, -128);
  }

  // Without a copy of all, elements behind the last whole vector are copied, as [kBlock][16]: a page may end with
  // them.
  static void TakeValues(const Block& block) {
    if (Copied(block)) return CopyValues(block);
    const int64_t E = block.form.E, whole = E / kLanes * kLanes;
    if (whole == E) return;
    for (int64_t key = 0; key < kBlock; ++key) {
      std::memcpy(block.work.values + key * kLanes,
                  block.groups.value[key / kLanes] + key % kLanes * E + whole, E - whole);
    }
  }

  JAXSERVE_AVX512_VBMI static void Score(const Block& block, int64_t m0, int64_t rows) {
    const bool copied = Copied(block);
    CoverRows<1, kAtOnce>(rows, [&](auto vectors, int64_t r) JAXSERVE_AVX512_VBMI {
      constexpr int kCount = decltype(vectors)::value;
      copied ? ScoreVectors<kCount, true>(block, m0, r) : ScoreVectors<kCount, false>(block, m0, r);
    });
  }

  JAXSERVE_AVX512_VBMI static void AddValues(const Block& block, const Steps& steps, int64_t rows, int64_t e,
                                             int64_t tiles, float* value) {
    const int64_t E = block.form.E, first = e / kLanes, end = first + tiles, whole = std::min(end, E / kLanes);
    if (Copied(block)) return AddAll<true>({block, steps, rows, nullptr, 0, value}, first, end);
    AddAll<false>({block, steps, rows, block.groups.value, E, value}, first, whole);
    if (whole == end) return;
    const int8_t* rest[kKeyGroups];
    for (int g = 0; g < kKeyGroups; ++g) rest[g] = block.work.values + (g * kLanes - whole) * kLanes;
    AddColumns<1, false>({block, steps, rows, rest, kLanes, value}, whole);
  }

 private:
  static constexpr int kAtOnce = 3;  // vectors: their digits' sums with 64 keys, or elements, fill 24 registers

  static bool Copied(const Block& block) { return block.form.tiles() > 1; }

  // Values that lie `stride` apart in each group if they are not copied, and where what they weigh is to be added.
  struct Values {
    const Block& block;
    const Steps& steps;
    int64_t rows;
    const int8_t* const* groups;
    int64_t stride;
    float* to;
  };

  // sum += bytes * codes, four of each. GCC moves sums from register to register around its own intrinsic.
  JAXSERVE_AVX512_VBMI static __attribute__((always_inline)) void AddProducts(__m512i& sum, __m512i bytes,
                                                                              __m512i codes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(codes));
  }

  // The scores of kCount vectors from r on. High digits' sums come first, then the low ones'.
  template <int kCount, bool kCopied>
  JAXSERVE_AVX512_VBMI static __attribute__((noinline)) void ScoreVectors(const Block& block, int64_t m0, int64_t r) {
    const Form& form = block.form;
    const int64_t E = form.E, step_bytes = 2 * form.vectors() * kDeep;
    const bool ahead = !kCopied && r == 0;
    const int8_t* q = block.work.q + m0 * 2 * form.steps() * kDeep + r * kDeep;
    const int32_t* start = block.work.q_start + 2 * m0 + r;
    __m512i sum[2 * kCount][kKeyGroups];
#pragma GCC unroll 6
    for (int i = 0; i < 2 * kCount; ++i) {
#pragma GCC unroll 4
      for (int g = 0; g < kKeyGroups; ++g) {
        sum[i][g] = _mm512_set1_epi32(start[i / kCount * form.vectors() + i % kCount]);
      }
    }
    for (int64_t e = 0; e < E; e += kQuad) {
      const int8_t* digits = q + e / kDeep * step_bytes + e % kDeep;
      __m512i key[kKeyGroups];
#pragma GCC unroll 4
      for (int g = 0; g < kKeyGroups; ++g) {
        if constexpr (kCopied) {
          key[g] = _mm512_load_si512(block.work.keys + g * form.steps() * kTileBytes + e * kLanes);
        } else {
          key[g] = ByFours(_mm512_loadu_si512(block.groups.key[g] + e * kLanes));
          key[g] = _mm512_xor_si512(key[g], _mm512_set1_epi8(-128));
        }
        if (ahead) PrefetchFar(block.next.key[g] + e * kLanes);
      }
#pragma GCC unroll 6
      for (int i = 0; i < 2 * kCount; ++i) {
        const __m512i digit = Broadcast(digits + (i / kCount * form.vectors() + i % kCount) * kDeep);
#pragma GCC unroll 4
        for (int g = 0; g < kKeyGroups; ++g) AddProducts(sum[i][g], key[g], digit);
      }
    }
    float* scores = block.work.scores + r * kBlock;
#pragma GCC unroll 4
    for (int g = 0; g < kKeyGroups; ++g) {
      const __m512 scale = _mm512_loadu_ps(block.groups.key_scale[g]);
#pragma GCC unroll 3
      for (int i = 0; i < kCount; ++i) {
        _mm512_store_ps(scores + i * kBlock + g * kLanes,
                        _mm512_mul_ps(Joined(sum[i][g], sum[kCount + i][g]), scale));
      }
    }
  }

  // Adds elements [16 c, 16 end).
  template <bool kCopied>
  JAXSERVE_AVX512_VBMI static void AddAll(const Values& from, int64_t c, int64_t end) {
    for (; c + 4 <= end; c += 4) AddColumns<4, kCopied>(from, c);
    for (; c + 2 <= end; c += 2) AddColumns<2, kCopied>(from, c);
    for (; c < end; ++c) AddColumns<1, kCopied>(from, c);
  }

  // Adds kTiles x 16 elements, from 16 c on.
  template <int kTiles, bool kCopied>
  JAXSERVE_AVX512_VBMI static void AddColumns(const Values& from, int64_t c) {
    CoverRows<1, kAtOnce>(from.rows, [&](auto vectors, int64_t r) JAXSERVE_AVX512_VBMI {
      AddVectors<decltype(vectors)::value, kTiles, kCopied>(from, c, r);
    });
  }

  template <int kCount, int kTiles, bool kCopied>
  JAXSERVE_AVX512_VBMI static __attribute__((noinline)) void AddVectors(const Values& from, int64_t c, int64_t r) {
    const Block& block = from.block;
    const bool ahead = !kCopied && r == 0;
    const int64_t low = block.form.vectors() * kBlock;  // a vector's low digits are so much further
    const uint8_t* weights = block.work.weights + r * kBlock;
    __m512i sum[2 * kCount][kTiles] = {};
    for (int64_t i = 0; i < kBlock / kQuad; ++i, weights += kQuad) {  // in the order in which Weigh packs them
      const int64_t g = i % kKeyGroups, at = i / kKeyGroups * kQuad * from.stride;
      __m512i value[kTiles];
      if constexpr (kCopied) {
#pragma GCC unroll 4
        for (int v = 0; v < kTiles; ++v) {
          value[v] = _mm512_load_si512(block.work.values + (c + v) * kTileBytes + i * 64);
        }
      } else {
        Fours(from.groups[g] + at + c * kLanes, from.stride, value);
      }
      if (ahead) {
#pragma GCC unroll 4
        for (int v = 0; v < kTiles; ++v) PrefetchFar(block.next.value[g] + at + (c + v) * kLanes * kQuad);
      }
#pragma GCC unroll 6
      for (int n = 0; n < 2 * kCount; ++n) {
        const __m512i weight = Broadcast(weights + n / kCount * low + n % kCount * kBlock);
#pragma GCC unroll 4
        for (int v = 0; v < kTiles; ++v) AddProducts(sum[n][v], weight, value[v]);
      }
    }
#pragma GCC unroll 3
    for (int n = 0; n < kCount; ++n) {
#pragma GCC unroll 4
      for (int v = 0; v < kTiles; ++v) {
        AddSums(from.steps, r + n, sum[n][v], sum[kCount + n][v],
                from.to + (r + n) * block.form.depth() + (c + v) * kLanes);
      }
    }
  }

  // kTiles x 16 elements of four values, by fours.
  template <int kTiles>
  JAXSERVE_AVX512_VBMI static __attribute__((always_inline)) void Fours(const int8_t* at, int64_t stride,
                                                                        __m512i (&four)[kTiles]) {
    if constexpr (kTiles == 1) {
      four[0] = FourOf(at, stride);
      return;
    }
    auto pair = [&](const int8_t* row) JAXSERVE_AVX512_VBMI __attribute__((always_inline)) {
      auto load = [](const int8_t* from) JAXSERVE_AVX512_VBMI __attribute__((always_inline)) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      };
      return _mm512_inserti64x4(_mm512_castsi256_si512(load(row)), load(row + stride), 1);
    };
    const __m512i order = _mm512_set_epi8(
        111, 79, 47, 15, 110, 78, 46, 14, 109, 77, 45, 13, 108, 76, 44, 12, 107, 75, 43, 11, 106, 74, 42, 10,
        105, 73, 41, 9, 104, 72, 40, 8, 103, 71, 39, 7, 102, 70, 38, 6, 101, 69, 37, 5, 100, 68, 36, 4, 99, 67,
        35, 3, 98, 66, 34, 2, 97, 65, 33, 1, 96, 64, 32, 0);
    const __m512i later = _mm512_add_epi8(order, _mm512_set1_epi8(16));
#pragma GCC unroll 2
    for (int v = 0; v + 1 < kTiles; v += 2) {
      const __m512i front = pair(at + v * kLanes), back = pair(at + v * kLanes + 2 * stride);
      four[v] = _mm512_permutex2var_epi8(front, order, back);
      four[v + 1] = _mm512_permutex2var_epi8(front, later, back);
    }
  }
};

// ---- a block, for one tile of queries -----------------------------------------------------------

// The largest scale among the values that a bit of `seen` stands for.
JAXSERVE_AVX512_VBMI inline float LargestScale(const Groups<int8_t>& groups, uint64_t seen) {
  __m512 most = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int v = 0; v < kKeyGroups; ++v) {
    const auto some = static_cast<__mmask16>(seen >> v * kLanes);
    most = _mm512_mask_max_ps(most, some, most, _mm512_loadu_ps(groups.value_scale[v]));
  }
  return _mm512_reduce_max_ps(most);
}

// The scores of `rows` vectors from m0 on -> digits of their weights, and their state's maximum and sum.
// state.max counts in scores before the scale and, without a soft cap, in a query's steps.
JAXSERVE_AVX512_VBMI void Weigh(const Form& form, const Workspace& work, const Sight& sight,
                                const Groups<int8_t>& groups, int64_t m0, int64_t rows, const State& state,
                                Steps* steps) {
  alignas(64) float old[kLanes] = {}, best[kLanes] = {}, top[kLanes] = {}, unit[kLanes] = {};
  alignas(64) float v_scale[kLanes] = {}, inverse[kLanes];
  uint64_t seen[kVectors];
  for (int64_t r = 0, token = m0 / sight.group, head = m0 % sight.group; r < rows; ++r) {
    const bool same = r > 0 && head > 0;  // token as before
    seen[r] = same ? seen[r - 1] : Seen(sight, token);
    v_scale[r] = same ? v_scale[r - 1] : LargestScale(groups, seen[r]);
    if (++head == sight.group) head = 0, ++token;
    unit[r] = form.soft_cap > 0 ? kLog2E : form.scale * kLog2E * work.q_step[m0 + r];
    __m512 most = _mm512_set1_ps(kNone);
#pragma GCC unroll 4
    for (int v = 0; v < kKeyGroups; ++v) {
      float* at = work.scores + r * kBlock + v * kLanes;
      __m512 score = _mm512_load_ps(at);
      if (form.soft_cap > 0) {
        Lanes scaled = reinterpret_cast<Lanes>(score) * (form.scale * work.q_step[m0 + r]);
        score = reinterpret_cast<__m512>(SoftCap(scaled, form.soft_cap));
        _mm512_store_ps(at, score);
      }
      most = _mm512_mask_max_ps(most, static_cast<__mmask16>(seen[r] >> v * kLanes), most, score);
    }
    old[r] = state.max[m0 + r];
    best[r] = _mm512_reduce_max_ps(most);
    top[r] = std::max(old[r], best[r]);
    state.max[m0 + r] = top[r];
  }
  const __m512 tops = _mm512_load_ps(top), units = _mm512_load_ps(unit);
  auto weight_of = [&](const float* score) JAXSERVE_AVX512_VBMI __attribute__((always_inline)) {
    return Exp2(_mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(score), tops), units), 0xffff);
  };
  _mm512_store_ps(steps->keep, weight_of(old));
  // No weight times its scale is above the largest weight times the largest scale.
  const __m512 bound = _mm512_max_ps(_mm512_mul_ps(weight_of(best), _mm512_load_ps(v_scale)),
                                     _mm512_set1_ps(1e-30f));
  _mm512_store_ps(steps->weight, _mm512_mul_ps(bound, _mm512_set1_ps(1 / kSteps)));
  _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(kSteps), bound));
  for (int64_t r = 0; r < rows; ++r) {
    const __m512 from = _mm512_set1_ps(top[r]), factor = _mm512_set1_ps(unit[r]);
    const __m512 digits = _mm512_set1_ps(inverse[r]);
    __m512i whole[kKeyGroups];
    __m512 total = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int v = 0; v < kKeyGroups; ++v) {
      __m512 score = _mm512_sub_ps(_mm512_load_ps(work.scores + r * kBlock + v * kLanes), from);
      const auto some = static_cast<__mmask16>(seen[r] >> v * kLanes);
      const __m512 weight = Exp2(_mm512_mul_ps(score, factor), some);
      total = _mm512_add_ps(total, weight);
      const __m512 scaled = _mm512_maskz_mul_ps(some, weight, _mm512_loadu_ps(groups.value_scale[v]));
      whole[v] = _mm512_cvtps_epi32(_mm512_mul_ps(scaled, digits));
    }
    float* sum = work.total + (m0 + r) * kLanes;
    _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(sum), _mm512_set1_ps(steps->keep[r]), total));
    const __m512i front = _mm512_packus_epi32(whole[0], whole[1]), low = _mm512_set1_epi16(255);
    const __m512i back = _mm512_packus_epi32(whole[2], whole[3]);
    uint8_t* to = work.weights + r * kBlock;
    _mm512_store_si512(to, _mm512_packus_epi16(_mm512_srli_epi16(front, 8), _mm512_srli_epi16(back, 8)));
    _mm512_store_si512(to + form.vectors() * kBlock, _mm512_packus_epi16(_mm512_and_si512(front, low),
                                                                       _mm512_and_si512(back, low)));
  }
}

// ---- a tile of the plan -------------------------------------------------------------------------

template <typename Unit>
JAXSERVE_AVX512_VBMI void AttendBlock(const Block& block, const Sight& sight, const State& state) {
  const Form& form = block.form;
  Unit::TakeKeys(block);
  for (int64_t m0 = 0; m0 < form.M; m0 += form.vectors()) {
    const int64_t rows = std::min(form.vectors(), form.M - m0);
    Steps steps;
    Unit::Score(block, m0, rows);
    if (m0 == 0) Unit::TakeValues(block);  // while the tile unit is at it
    Weigh(form, block.work, sight, block.groups, m0, rows, state, &steps);
    for (int64_t e = 0; e < form.depth(); e += kWide) {
      const int64_t tiles = std::min<int64_t>(kWide, form.depth() - e) / kLanes;
      Unit::AddValues(block, steps, rows, e, tiles, state.value + m0 * form.depth());
    }
  }
}

template <typename Unit>
JAXSERVE_AVX512_VBMI void Attend(const Call<int8_t>& call, const Tile& tile, int64_t segment, const Tile& after,
                                 float* memory, const State& state) {
  const Form form = FormOf(call, tile.count * call.group());
  const Workspace work(memory, form);
  std::memset(work.total, 0, form.padded() * kLanes * sizeof(float));
  Unit::Begin(form);
  ForEachBlock(call, tile, segment, after,
               [&](const Sight& sight, const Groups<int8_t>& groups, const Groups<int8_t>& next)
                   JAXSERVE_AVX512_VBMI {
    for (int64_t g = 0; g < kKeyGroups; ++g) {
      Prefetch(next.key_scale[g]);
      Prefetch(next.value_scale[g]);
    }
    AttendBlock<Unit>({form, work, groups, next}, sight, state);
  });
  Unit::End();
  for (int64_t m = 0; m < form.M; ++m) {
    state.sum[m] = _mm512_reduce_add_ps(_mm512_load_ps(work.total + m * kLanes));
    if (std::isnan(work.q_step[m])) {
      std::fill_n(state.value + m * form.depth(), form.depth(), work.q_step[m]);
    } else if (form.soft_cap == 0 && state.sum[m] > 0) {
      state.max[m] *= form.scale * work.q_step[m];
    }
  }
}

template <typename Unit>
Way<int8_t> WayBy() {
  return {4 * kFewestVectors,
          [](const Call<int8_t>& call, int64_t M) { return Workspace(nullptr, FormOf(call, M)).floats; },
          Start<Unit>, Attend<Unit>};
}

}  // namespace

Way<int8_t> ByCodes(Isa isa) { return isa == Isa::kAmx ? WayBy<TileUnit>() : WayBy<VectorUnit>(); }

#else

Way<int8_t> ByCodes(Isa) { return ByLanes<int8_t>(); }

#endif  // JAXSERVE_X86

}  // namespace jaxserve::attention

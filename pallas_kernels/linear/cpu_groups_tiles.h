// What the two ways through AMX's tile unit share (cpu_groups_amx.cc, cpu_groups_long.cc): x in tiles,
// weights unpacked to bfloat16, products of tiles, results stored.

#pragma once

#include "../native_tiles.h"
#include "cpu_groups_short.h"

#if JAXSERVE_X86

namespace jaxserve::groups {

// x as bfloat16 in tiles of `rows` rows; the last tile overlaps the one before where they do not divide
// T. Where x comes as bfloat16, kHalves = 1 and this is x [T, D] itself. Where it comes as float32,
// kHalves = 2 and this is a copy [tile][block][high, low][rows][32].
template <int kHalves>
struct Tiles {
  const int8_t* at;
  int64_t T, D, rows, tiles;

  static constexpr bool kCopy = kHalves == 2;
  int64_t blocks() const { return D / kBlock; }
  int64_t row_bytes() const { return kCopy ? 64 : D * 2; }
  int64_t half_bytes() const { return rows * 64; }  // from high to low
  int64_t block_bytes() const { return kCopy ? 2 * half_bytes() : 64; }
  int64_t tile_bytes() const { return blocks() * block_bytes(); }
  int64_t FirstRow(int64_t tile) const { return std::min(tile * rows, T - rows); }
  const int8_t* At(int64_t tile, int64_t block) const {
    return at + (kCopy ? tile * tile_bytes() : FirstRow(tile) * D * 2) + block * block_bytes();
  }
};

// ---- weights as bfloat16 ------------------------------------------------------------------------

JAXSERVE_AMX inline void Prefetch(const uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

// Two inputs' weights of 16 features as pairs [16][2] of bfloat16, then what that rounds off as pairs if
// there is room for two halves. High is rounded (half away from zero) and low cut off, which is as good,
// as its sign is either.
template <int kHalves>
JAXSERVE_AMX inline void StorePair(__m512 even, __m512 odd, int8_t* to) {
  const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000)), half = _mm512_set1_epi32(0x8000);
  auto pairs = [&](__m512i first, __m512i second) JAXSERVE_AMX __attribute__((always_inline)) {
    constexpr int kAOrBAndC = 0xf8;
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(first, 16), second, top, kAOrBAndC);
  };
  __m512i even_high = _mm512_add_epi32(_mm512_castps_si512(even), half);
  __m512i odd_high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  _mm512_store_si512(to, pairs(even_high, odd_high));
  if constexpr (kHalves == 2) {
    auto rest = [&](__m512 value, __m512i high) JAXSERVE_AMX __attribute__((always_inline)) {
      return _mm512_castps_si512(_mm512_sub_ps(value, _mm512_castsi512_ps(_mm512_and_si512(high, top))));
    };
    _mm512_store_si512(to + kTileBytes, pairs(rest(even, even_high), rest(odd, odd_high)));
  }
}

// One block of one panel: kHalves tiles [16 pairs of inputs][16 features][2]. The block that comes
// `ahead` blocks later lies in memory: it is asked for meanwhile.
template <int kHalves, int kBits, bool kOffset>
JAXSERVE_AMX inline void UnpackBlock(const Weight& w, int64_t panel, int64_t block, int64_t ahead, int8_t* to) {
  alignas(64) static const float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  __m512 table = _mm512_sub_ps(_mm512_load_ps(kIndex), _mm512_set1_ps(static_cast<float>(w.zero)));
  const uint8_t* codes = w.CodesOf(panel) + block * kBits * 64;
  int64_t group = block * w.parts * w.scale_bytes();
  const uint8_t* scale = w.OfPanel(w.scale, panel) + group;
  const uint8_t* offset = kOffset ? w.OfPanel(w.offset, panel) + group : nullptr;
  for (int i = 0; i < kBits; ++i) Prefetch(codes + ahead * kBits * 64 + i * 64);
  Prefetch(scale + ahead * w.parts * w.scale_bytes());
  if constexpr (kOffset) Prefetch(offset + ahead * w.parts * w.scale_bytes());
  __m512 ws = Floats(w, scale), wo{};
  if constexpr (kOffset) wo = Floats(w, offset);
  auto store = [&](int quad, int k, __m512 even, __m512 odd) JAXSERVE_AMX __attribute__((always_inline)) {
    auto value = [&](__m512 code) JAXSERVE_AMX __attribute__((always_inline)) {
      return kOffset ? _mm512_fmadd_ps(code, ws, wo) : _mm512_mul_ps(code, ws);
    };
    StorePair<kHalves>(value(even), value(odd), to + (quad * 2 + k / 2) * 64);
  };
  if constexpr (kBits == 4) {  // of the indices, permutexvar takes the lowest four bits
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512i both = _mm512_loadu_si512(codes + i * 64);
      auto code = [&](int shift) JAXSERVE_AMX __attribute__((always_inline)) {
        return _mm512_permutexvar_ps(_mm512_srli_epi32(both, shift), table);
      };
      store(i, 0, code(0), code(8));
      store(i, 2, code(16), code(24));
      store(i + 4, 0, code(4), code(12));
      store(i + 4, 2, code(20), code(28));
    }
  } else {
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      if (w.parts == 2 && quad == 4) {
        ws = Floats(w, scale + w.scale_bytes());
        if constexpr (kOffset) wo = Floats(w, offset + w.scale_bytes());
      }
      __m512i all = _mm512_loadu_si512(codes + quad * 64);
      auto code = [&](int k) JAXSERVE_AMX __attribute__((always_inline)) {
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(all, 24 - 8 * k), 24));
      };
      store(quad, 0, code(0), code(1));
      store(quad, 2, code(2), code(3));
    }
  }
}

using Unpack = void (*)(const Weight& w, int64_t panel, int64_t block, int64_t ahead, int8_t* to);
template <int kHalves>
Unpack UnpackOf(const Weight& w) {
  if (w.bits == 4) return w.offset ? UnpackBlock<kHalves, 4, true> : UnpackBlock<kHalves, 4, false>;
  return w.offset ? UnpackBlock<kHalves, 8, true> : UnpackBlock<kHalves, 8, false>;
}

// ---- products -----------------------------------------------------------------------------------

// Tiles 0 to 3 hold sums [rows][16], 4 and 5 weights [16 pairs][16][2], 6 and 7 x [rows][32].
constexpr int kFirstWeights = 4, kFirstX = 6;

// Where the sums of up to two tiles of rows times two panels lie, each [rows][16] float32.
struct Sums {
  int8_t* at;
  int64_t row_bytes, panel_bytes, tile_bytes;  // from one to the next

  int8_t* Of(int tile, int panel) const { return at + tile * tile_bytes + panel * panel_bytes; }
};

// The sums of kTiles tiles times two panels are in the tile unit's registers from Start to Store.
template <int kTiles>
JAXSERVE_AMX inline void Start(const Sums* from) {
  if (from == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTiles == 2) _tile_zero(2);
    if constexpr (kTiles == 2) _tile_zero(3);
    return;
  }
  _tile_loadd(0, from->Of(0, 0), from->row_bytes);
  _tile_loadd(1, from->Of(0, 1), from->row_bytes);
  if constexpr (kTiles == 2) _tile_loadd(2, from->Of(1, 0), from->row_bytes);
  if constexpr (kTiles == 2) _tile_loadd(3, from->Of(1, 1), from->row_bytes);
}

template <int kTiles>
JAXSERVE_AMX inline void Store(const Sums& to) {
  _tile_stored(0, to.Of(0, 0), to.row_bytes);
  _tile_stored(1, to.Of(0, 1), to.row_bytes);
  if constexpr (kTiles == 2) _tile_stored(2, to.Of(1, 0), to.row_bytes);
  if constexpr (kTiles == 2) _tile_stored(3, to.Of(1, 1), to.row_bytes);
}

// Adds the products of `blocks` blocks of tiles x0 and x1 with weights [block][panel][kHalves] tiles.
// x: from one row to the next, from high to low and from one block to the next, in bytes. kPast: weights
// go past L1, which is x's.
template <int kTiles, int kHalves, bool kPast>
JAXSERVE_AMX inline void Multiply(const int8_t* x0, const int8_t* x1, int64_t stride, int64_t low,
                                  int64_t step, const int8_t* weights, int64_t blocks) {
  for (int64_t b = 0; b < blocks; ++b, weights += 2 * kHalves * kTileBytes, x0 += step, x1 += step) {
    auto load_weights = [&](int half) JAXSERVE_AMX __attribute__((always_inline)) {
      const int8_t *first = weights + half * kTileBytes, *second = first + kHalves * kTileBytes;
      if constexpr (kPast) {
        _tile_stream_loadd(4, first, 64);
        _tile_stream_loadd(5, second, 64);
      } else {
        _tile_loadd(4, first, 64);
        _tile_loadd(5, second, 64);
      }
    };
    auto load_x = [&](int64_t half) JAXSERVE_AMX __attribute__((always_inline)) {
      _tile_loadd(6, x0 + half, stride);
      if constexpr (kTiles == 2) _tile_loadd(7, x1 + half, stride);
    };
    auto multiply = [&]() JAXSERVE_AMX __attribute__((always_inline)) {
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
      if constexpr (kTiles == 2) _tile_dpbf16ps(2, 7, 4);
      if constexpr (kTiles == 2) _tile_dpbf16ps(3, 7, 5);
    };
    load_weights(0);
    if constexpr (kHalves == 2) load_x(low);
    if constexpr (kHalves == 2) multiply();
    load_x(0);
    multiply();
    if constexpr (kHalves == 2) load_weights(1);
    if constexpr (kHalves == 2) multiply();
  }
}

// One tile's sums of a pair to y.
JAXSERVE_AMX inline void Finish(const Product& product, const Pair& pair, const Sums& sums, int tile,
                         int64_t rows, int64_t first_row) {
  for (int64_t r = 0; r < rows; ++r) {
    FinishPair(product, pair, first_row + r, _mm512_loadu_ps(sums.Of(tile, 0) + r * sums.row_bytes),
               _mm512_loadu_ps(sums.Of(tile, 1) + r * sums.row_bytes));
  }
}

// For so many tiles that rows are better kept near than weights.
void MultiplyManyTiles(const Product* products, int64_t count, const Tiles<1>& x);

}  // namespace jaxserve::groups

#endif  // JAXSERVE_X86

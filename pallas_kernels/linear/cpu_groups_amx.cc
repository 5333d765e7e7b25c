// linear with group-quantised weights on AMX's tile unit.
//
// It multiplies bfloat16 and adds up in float32. A weight or activation v becomes v_high = v rounded
// to bfloat16 and v_low = the rest in bfloat16, and a product three:
//
//   x w  =  x_high w_high + x_low w_high + x_high w_low  (+ what 17 bits cannot hold)
//
// Sums run over the blocks of 32 inputs in order, whatever tile a row is in, so its bits do not depend
// on the rows around it.

#include "cpu_groups.h"

#if JAXSERVE_X86

namespace jaxserve::groups {
namespace {

constexpr int kTileBytes = 1024;          // of a full tile: 16 rows of 64 bytes
constexpr int64_t kChunkBlocks = 4;       // blocks of weights unpacked at a time: 16 kB, a third of L1
constexpr int64_t kReuseBytes = 1 << 20;  // of x that stays in L2 while panels pass
// Between what one thread writes and another reads: prefetchers run on past the end, and would take the
// lines behind it out of their writer's cache over and over (which made it three times slower).
constexpr size_t kGap = 16384;

// x as [tile][block][high, low][rows][32] bfloat16, the last tile filled up with zeros.
struct Split {
  int64_t rows, tiles, blocks;
  int8_t* halves;

  int64_t plane_bytes() const { return rows * kBlock * 2; }
  int64_t tile_bytes() const { return blocks * 2 * plane_bytes(); }
  int8_t* At(int64_t tile, int64_t block) const {
    return halves + tile * tile_bytes() + block * 2 * plane_bytes();
  }
};

JAXSERVE_AMX inline void SplitBlock(const float* x, int8_t* high, int8_t* low) {
  for (int half = 0; half < 2; ++half) {
    __m512 v = _mm512_loadu_ps(x + half * 16);
    auto top = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
    __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(top), 16));
    auto rest = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_sub_ps(v, back)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(high + half * 32), top);
    _mm256_store_si256(reinterpret_cast<__m256i*>(low + half * 32), rest);
  }
}

// Blocks [begin, end) of a tile of x [T, D].
JAXSERVE_AMX void SplitTile(const Weight& w, const float* x, const Split& to, int64_t tile,
                            int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    int8_t* high = to.At(tile, block);
    int8_t* low = high + to.plane_bytes();
    for (int64_t r = 0; r < to.rows; ++r, high += kBlock * 2, low += kBlock * 2) {
      int64_t row = tile * to.rows + r;
      if (row < w.T) {
        SplitBlock(x + row * w.D + block * kBlock, high, low);
      } else {
        std::memset(high, 0, kBlock * 2);
        std::memset(low, 0, kBlock * 2);
      }
    }
  }
}

// ---- weights as bfloat16 ------------------------------------------------------------------------

JAXSERVE_AMX inline __m512 Floats(const Weight& w, const uint8_t* at) {
  if (w.half) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  return _mm512_loadu_ps(at);
}

JAXSERVE_AMX inline void Prefetch(const uint8_t* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

// Two inputs' weights of 16 features as pairs: [16][2] bfloat16 high and low. High is rounded (half
// away from zero) and low cut off, which is as good, as its sign is either.
JAXSERVE_AMX inline void StorePair(__m512 even, __m512 odd, int8_t* high, int8_t* low) {
  const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000)), half = _mm512_set1_epi32(0x8000);
  __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(even), half);
  __m512i even_high = _mm512_and_si512(rounded, top);
  __m512i odd_high = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(odd), half), top);
  __m512i even_low = _mm512_castps_si512(_mm512_sub_ps(even, _mm512_castsi512_ps(even_high)));
  __m512i odd_low = _mm512_castps_si512(_mm512_sub_ps(odd, _mm512_castsi512_ps(odd_high)));
  _mm512_store_si512(high, _mm512_or_si512(_mm512_srli_epi32(even_high, 16), odd_high));
  constexpr int kAOrBAndC = 0xf8;
  _mm512_store_si512(
      low, _mm512_ternarylogic_epi32(_mm512_srli_epi32(even_low, 16), odd_low, top, kAOrBAndC));
}

// One block of one panel: [16 pairs of inputs][16 features][2] bfloat16, high and low. The block that
// comes `ahead` blocks later lies in memory: it is asked for meanwhile.
template <int kBits, bool kOffset>
JAXSERVE_AMX void UnpackBlock(const Weight& w, int64_t panel, int64_t block, int64_t ahead,
                              int8_t* high, int8_t* low) {
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
    int at = (quad * 2 + k / 2) * 64;
    StorePair(value(even), value(odd), high + at, low + at);
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

using Unpack = void (*)(const Weight& w, int64_t panel, int64_t block, int64_t ahead, int8_t* high,
                        int8_t* low);
Unpack UnpackOf(const Weight& w) {
  if (w.bits == 4) return w.offset ? UnpackBlock<4, true> : UnpackBlock<4, false>;
  return w.offset ? UnpackBlock<8, true> : UnpackBlock<8, false>;
}

// ---- products -----------------------------------------------------------------------------------

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 hold sums [rows][16], 4 and 5 weights [16 pairs][16][2], 6 and 7 x [rows][32].
JAXSERVE_AMX inline void ConfigureTiles(int64_t rows) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = static_cast<uint8_t>(i == 4 || i == 5 ? 16 : rows);
    config.row_bytes[i] = 64;
  }
  asm volatile("" : : "r"(&config) : "memory");  // the intrinsic claims to read eight bytes of it
  _tile_loadconfig(&config);
}

// Where the sums of up to two tiles of rows times two panels lie, each [rows][16] float32.
struct Sums {
  int8_t* at;
  int64_t row_bytes, panel_bytes, tile_bytes;  // from one to the next

  int8_t* Of(int tile, int panel) const { return at + tile * tile_bytes + panel * panel_bytes; }
};

// Adds `blocks` blocks to the sums of kTiles tiles of rows times two panels, which start at zero if
// `from` is null. weights: [block][panel][high, low] tiles.
template <int kTiles>
JAXSERVE_AMX inline void MultiplyChunk(const int8_t* x0, const int8_t* x1, int64_t plane,
                                       const int8_t* weights, int64_t blocks, const Sums* from,
                                       const Sums& to) {
  constexpr bool kTwo = kTiles == 2;
  if (from == nullptr) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) _tile_zero(2);
    if constexpr (kTwo) _tile_zero(3);
  } else {
    _tile_loadd(0, from->Of(0, 0), from->row_bytes);
    _tile_loadd(1, from->Of(0, 1), from->row_bytes);
    if constexpr (kTwo) _tile_loadd(2, from->Of(1, 0), from->row_bytes);
    if constexpr (kTwo) _tile_loadd(3, from->Of(1, 1), from->row_bytes);
  }
  for (int64_t b = 0; b < blocks; ++b, weights += 4 * kTileBytes, x0 += 2 * plane, x1 += 2 * plane) {
    auto multiply = [&](int64_t half) JAXSERVE_AMX __attribute__((always_inline)) {
      _tile_loadd(6, x0 + half, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
      if constexpr (kTwo) {
        _tile_loadd(7, x1 + half, 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
      }
    };
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, weights + 2 * kTileBytes, 64);
    multiply(0);
    multiply(plane);
    _tile_loadd(4, weights + kTileBytes, 64);
    _tile_loadd(5, weights + 3 * kTileBytes, 64);
    multiply(0);
  }
  _tile_stored(0, to.Of(0, 0), to.row_bytes);
  _tile_stored(1, to.Of(0, 1), to.row_bytes);
  if constexpr (kTwo) _tile_stored(2, to.Of(1, 0), to.row_bytes);
  if constexpr (kTwo) _tile_stored(3, to.Of(1, 1), to.row_bytes);
}

// Two panels computed side by side: neighbours of one weight (or its last one twice), or, gated, the
// same of two weights.
struct Pair {
  const Weight* w[2];
  int64_t panel[2];
};

Pair PairOf(const Product& product, int64_t i) {
  if (product.gated) return {{&product.w, &product.up}, {i, i}};
  int64_t last = CeilDiv(product.w.F, kPanel) - 1;
  return {{&product.w, &product.w}, {2 * i, std::min(2 * i + 1, last)}};
}

int64_t PairsOf(const Product& product) {
  int64_t panels = CeilDiv(product.w.F, kPanel);
  return product.gated ? panels : CeilDiv(panels, 2);
}

// One tile's sums of a pair to y.
JAXSERVE_AMX void Finish(const Product& product, const Pair& pair, const Sums& sums, int64_t rows,
                         int64_t row) {
  for (int64_t r = 0; r < rows; ++r) {
    Lanes first = LoadLanes(reinterpret_cast<float*>(sums.Of(0, 0) + r * sums.row_bytes));
    Lanes second = LoadLanes(reinterpret_cast<float*>(sums.Of(0, 1) + r * sums.row_bytes));
    if (product.gated) {
      first = Gate(product.activation, first, second);
      StoreRow(product.w, product.y, row + r, pair.panel[0], first);
    } else {
      StoreRow(product.w, product.y, row + r, pair.panel[0], first);
      StoreRow(product.w, product.y, row + r, pair.panel[1], second);
    }
  }
}

// Some pairs of a product for tiles [tile0, tile1), a chunk of their weights at a time. scratch:
// ScratchBytes(tiles).
JAXSERVE_AMX void MultiplyPairs(const Product& product, const Split& x, int64_t begin_pair,
                                int64_t end_pair, int64_t tile0, int64_t tile1, int8_t* scratch) {
  const int64_t T = product.w.T, F = product.w.F, rows = x.rows;
  ConfigureTiles(rows);
  for (int64_t i = begin_pair; i < end_pair; ++i) {
    const Pair pair = PairOf(product, i);
    const Unpack unpack[2] = {UnpackOf(*pair.w[0]), UnpackOf(*pair.w[1])};
    for (int64_t begin = 0; begin < x.blocks; begin += kChunkBlocks) {
      const int64_t count = std::min(kChunkBlocks, x.blocks - begin);
      for (int64_t b = 0; b < count; ++b) {
        // The next chunk's, or the next pair's: its neighbour's panel lies between, or none.
        const bool here = begin + b + kChunkBlocks < x.blocks;
        const int64_t ahead = kChunkBlocks + (here || product.gated ? 0 : x.blocks);
        int8_t* to = scratch + b * 4 * kTileBytes;
        unpack[0](*pair.w[0], pair.panel[0], begin + b, ahead, to, to + kTileBytes);
        to += 2 * kTileBytes;
        unpack[1](*pair.w[1], pair.panel[1], begin + b, ahead, to, to + kTileBytes);
      }
      for (int64_t t = tile0; t < tile1; t += 2) {
        const bool two = t + 1 < tile1, last = begin + count == x.blocks;
        const bool whole = !product.gated && (t + (two ? 2 : 1)) * rows <= T &&
                           (pair.panel[0] + 2) * kPanel <= F;
        int8_t* partial = scratch + (kChunkBlocks * 4 + (t - tile0) * 2) * kTileBytes;
        const Sums sums{partial, 64, kTileBytes, 2 * kTileBytes};
        float* y = product.y + t * rows * F + pair.panel[0] * kPanel;
        const Sums out{reinterpret_cast<int8_t*>(y), F * 4, 64, rows * F * 4};
        const Sums* from = begin == 0 ? nullptr : &sums;
        const Sums& to = last && whole ? out : sums;
        const int8_t* x0 = x.At(t, begin);
        if (two) {
          MultiplyChunk<2>(x0, x.At(t + 1, begin), x.plane_bytes(), scratch, count, from, to);
        } else {
          MultiplyChunk<1>(x0, x0, x.plane_bytes(), scratch, count, from, to);
        }
        if (!last || whole) continue;
        Finish(product, pair, sums, rows, t * rows);
        const Sums of_second{sums.Of(1, 0), sums.row_bytes, sums.panel_bytes, 0};
        if (two) Finish(product, pair, of_second, rows, (t + 1) * rows);
      }
    }
  }
  _tile_release();
}

size_t ScratchBytes(int64_t tiles) { return (kChunkBlocks * 4 + tiles * 2) * kTileBytes; }

}  // namespace

void MultiplyTiles(const Product* products, int64_t count, const float* x) {
  Team team;
  const Weight& w = products[0].w;
  int64_t tiles = CeilDiv(w.T, 16), rows = CeilDiv(w.T, tiles);  // tiles of about the same height
  Split split{rows, tiles, w.blocks(), nullptr};
  size_t split_bytes = tiles * split.tile_bytes() + kGap;
  int64_t task_tiles = kReuseBytes / (rows * w.D * 4) / 2 * 2;  // they go in twos
  task_tiles = std::max<int64_t>(2, std::min(task_tiles, tiles));
  size_t thread_bytes = ScratchBytes(task_tiles) + kGap;
  int8_t* memory = team.Scratch<int8_t>(split_bytes + thread_bytes * NumThreads());
  split.halves = memory;
  int64_t cuts = tiles < NumThreads() ? NumThreads() : 1;
  team.ForEach(tiles * cuts, [&](int64_t task, int) {
    int64_t cut = task % cuts;
    SplitTile(w, x, split, task / cuts, w.blocks() * cut / cuts, w.blocks() * (cut + 1) / cuts);
  });

  // A task: the same number of pairs of any one product, for some tiles.
  int64_t pairs = 0, across = 0;
  for (int64_t i = 0; i < count; ++i) pairs += PairsOf(products[i]);
  int64_t task_pairs = std::max<int64_t>(1, pairs / (4 * NumThreads()));
  for (int64_t i = 0; i < count; ++i) across += CeilDiv(PairsOf(products[i]), task_pairs);
  team.ForEach(across * CeilDiv(tiles, task_tiles), [&](int64_t task, int thread) {
    int64_t tile = task / across * task_tiles, index = task % across;
    const Product* product = products;
    while (index >= CeilDiv(PairsOf(*product), task_pairs)) {
      index -= CeilDiv(PairsOf(*product++), task_pairs);
    }
    int64_t begin = index * task_pairs, end = std::min(begin + task_pairs, PairsOf(*product));
    MultiplyPairs(*product, split, begin, end, tile, std::min(tile + task_tiles, tiles),
                  memory + split_bytes + thread * thread_bytes);
  });
}

}  // namespace jaxserve::groups

#endif  // JAXSERVE_X86

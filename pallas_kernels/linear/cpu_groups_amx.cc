// linear with group-quantised weights on AMX's tile unit, which multiplies bfloat16 and adds up in
// float32.
//
// x in bfloat16 is multiplied as it is, by weights rounded to bfloat16. x in float32 keeps 16 bits: it
// and the weights become v_high = v rounded to bfloat16 and v_low = the rest in bfloat16, and a product
// three:
//
//   x w  =  x_low w_high + x_high w_high + x_high w_low  (+ what 17 bits cannot hold)
//
// Sums run over the blocks of 32 inputs in order, whatever tile a row is in, so its bits do not depend
// on the rows around it.
//
// Here rows go weight by weight: weights are unpacked a little at a time and meet all rows while they are
// in L1. Many rows in bfloat16, not too wide, do better row by row: cpu_groups_long.cc.

#include "cpu_groups_tiles.h"

#if JAXSERVE_X86

namespace jaxserve::groups {
namespace {

constexpr int64_t kManyTiles = 24;  // of rows
// Of wider rows so few features' weights fit in L2 that copying rows for each few costs more than it
// brings: with 3,072 inputs a tenth of the time, with 14,336 more than half.
constexpr int64_t kLongDepth = 2048;

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
JAXSERVE_AMX void SplitTile(const float* x, const Tiles<2>& to, int64_t tile, int64_t begin,
                            int64_t end) {
  const float* first = x + to.FirstRow(tile) * to.D;
  for (int64_t block = begin; block < end; ++block) {
    auto* high = const_cast<int8_t*>(to.At(tile, block));
    for (int64_t r = 0; r < to.rows; ++r, high += 64) {
      SplitBlock(first + r * to.D + block * kBlock, high, high + to.half_bytes());
    }
  }
}

// Some pairs of a product for tiles [tile0, tile1) of x.
template <int kHalves>
struct Task {
  static constexpr int64_t kChunk = 8 / kHalves;  // blocks of weights unpacked at a time: a third of L1
  static constexpr int64_t kChunkBytes = kChunk * 2 * kHalves * kTileBytes;
  const Product& product;
  const Tiles<kHalves>& x;
  int64_t begin_pair, end_pair, tile0, tile1;
  int8_t* scratch;

  static size_t ScratchBytes(int64_t tiles) { return kChunkBytes + 2 * tiles * kTileBytes; }

  // Blocks [begin, begin + count) of a pair's weights.
  JAXSERVE_AMX void UnpackChunk(const Pair& pair, int64_t begin, int64_t count) const {
    for (int64_t i = 0; i < 2 * count; ++i) {
      const int64_t block = begin + i / 2;
      const Weight& w = *pair.w[i % 2];
      // The next chunk's, or the next pair's: of neighbours the other one's panel lies between.
      const bool here = product.gated || block + kChunk < x.blocks();
      UnpackOf<kHalves>(w)(w, pair.panel[i % 2], block, kChunk + (here ? 0 : x.blocks()),
                           scratch + i * kHalves * kTileBytes);
    }
  }

  // One chunk for kTiles tiles from `tile` on. If these are all tiles, their sums stay in registers from
  // one chunk to the next.
  template <int kTiles>
  JAXSERVE_AMX void MultiplyChunk(const Pair& pair, int64_t begin, int64_t count, int64_t tile) const {
    const bool stay = tile1 - tile0 <= 2, last = begin + count == x.blocks();
    const Sums sums{scratch + kChunkBytes + (tile - tile0) * 2 * kTileBytes, 64, kTileBytes, 2 * kTileBytes};
    // Whole panels of floats come from `plus` and go to y as they are.
    const int64_t F = product.w.F, row = x.FirstRow(tile), column = pair.panel[0] * kPanel;
    const bool direct = !product.gated && !product.bfloat16 && column + 2 * kPanel <= F;
    auto in_place = [&](const void* matrix) {
      auto* at = static_cast<int8_t*>(const_cast<void*>(matrix)) + (row * F + column) * 4;
      return Sums{at, F * 4, kPanel * 4, (x.FirstRow(tile + kTiles - 1) - row) * F * 4};
    };
    if (begin == 0 && direct && product.w.plus != nullptr) {
      const Sums plus = in_place(product.w.plus);
      Start<kTiles>(&plus);
    } else if (begin == 0 || !stay) {
      Start<kTiles>(begin == 0 ? nullptr : &sums);
    }
    Multiply<kTiles, kHalves, false>(x.At(tile, begin), x.At(tile + kTiles - 1, begin), x.row_bytes(),
                                     x.half_bytes(), x.block_bytes(), scratch, count);
    if (last && direct) return Store<kTiles>(in_place(product.y));
    if (last || !stay) Store<kTiles>(sums);
    if (!last) return;
    for (int t = 0; t < kTiles; ++t) Finish(product, pair, sums, t, x.rows, x.FirstRow(tile + t));
  }

  JAXSERVE_AMX void Run() const {
    ConfigureTiles(x.rows, kFirstWeights, kFirstX);
    for (int64_t i = begin_pair; i < end_pair; ++i) {
      const Pair pair = PairOf(product, i);
      for (int64_t begin = 0; begin < x.blocks(); begin += kChunk) {
        const int64_t count = std::min(kChunk, x.blocks() - begin);
        UnpackChunk(pair, begin, count);
        int64_t tile = tile0;
        for (; tile + 2 <= tile1; tile += 2) MultiplyChunk<2>(pair, begin, count, tile);
        if (tile < tile1) MultiplyChunk<1>(pair, begin, count, tile);
      }
    }
    _tile_release();
  }
};

// The products of one x.
template <int kHalves>
struct Job {
  Tiles<kHalves> x;
  int64_t task_tiles;
  size_t thread_bytes;

  Job(const Weight& w, const int8_t* at) {
    int64_t tiles = CeilDiv(w.T, 16);
    x = {at, w.T, w.D, CeilDiv(w.T, tiles), tiles};  // tiles of about the same height
    task_tiles = kReuseBytes / (x.rows * w.D * 2 * kHalves) / 2 * 2;  // they go in twos
    task_tiles = std::max<int64_t>(2, std::min(task_tiles, tiles));
    thread_bytes = Task<kHalves>::ScratchBytes(task_tiles) + kGap;
  }

  void Run(const Team& team, const Product* products, int64_t count, int8_t* scratch) const {
    const int64_t task_pairs = std::max<int64_t>(1, AllPairs(products, count) / (4 * NumThreads()));
    ForEachTask(team, products, count, task_pairs, x.tiles, task_tiles,
                [&](const Product& product, int64_t begin, int64_t end, int64_t tile0, int64_t tile1,
                    int thread) {
      Task<kHalves>{product, x, begin, end, tile0, tile1, scratch + thread * thread_bytes}.Run();
    });
  }
};

}  // namespace

void MultiplyTiles(const Product* products, int64_t count, const float* x) {
  Team team;
  Job<2> job(products[0].w, nullptr);
  Tiles<2>& copy = job.x;
  size_t copy_bytes = copy.tiles * copy.tile_bytes() + kGap;
  int8_t* memory = team.Scratch<int8_t>(copy_bytes + job.thread_bytes * NumThreads());
  copy.at = memory;
  int64_t cuts = copy.tiles < NumThreads() ? NumThreads() : 1;
  team.ForEach(copy.tiles * cuts, [&](int64_t task, int) {
    int64_t cut = task % cuts;
    SplitTile(x, copy, task / cuts, copy.blocks() * cut / cuts, copy.blocks() * (cut + 1) / cuts);
  });
  job.Run(team, products, count, memory + copy_bytes);
}

void MultiplyBfloat16Tiles(const Product* products, int64_t count, const void* x) {
  const Job<1> job(products[0].w, static_cast<const int8_t*>(x));
  if (job.x.tiles >= kManyTiles && job.x.D <= kLongDepth) return MultiplyManyTiles(products, count, job.x);
  Team team;
  job.Run(team, products, count, team.Scratch<int8_t>(job.thread_bytes * NumThreads()));
}

}  // namespace jaxserve::groups

#endif  // JAXSERVE_X86

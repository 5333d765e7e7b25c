// linear with group-quantised weights for many rows in bfloat16 by AMX's tile unit; see cpu_groups_amx.cc.
//
// Some rows in L1 meet the unpacked weights of many features, which stay in L2, and y is written in long
// stretches. With 576 and 1,536 inputs that takes an eighth less time for 512 rows than the other way
// round, and a fifth less for 1,536; a row's bits are the same.

#include "cpu_groups_tiles.h"

#if JAXSERVE_X86

namespace jaxserve::groups {
namespace {

constexpr int64_t kLongChunk = 18;   // blocks of two tiles of x in most of L1
constexpr int64_t kRangeTiles = 24;  // at least, of a task where there are more

// Some pairs of a product for tiles [tile0, tile1) of x [T, D], which is bfloat16. All its weights are
// unpacked first, [pair][block][panel] tiles. Then a chunk of two tiles of x at a time is copied,
// [tile][block][rows][32], because the tile unit loads neighbouring rows up to twice as fast as rows of a
// matrix, and multiplied with all of them.
struct LongTask {
  const Product& product;
  const Tiles<1>& x;
  int64_t begin_pair, end_pair, tile0, tile1;
  int8_t *weights, *copy, *sums;  // sums: [pair][tile][panel][rows][16]

  static constexpr int64_t kSumBytes = 4 * kTileBytes;  // of a pair
  static int64_t PairBytes(const Tiles<1>& x) { return 2 * x.blocks() * kTileBytes; }
  static int64_t CopyBytes(const Tiles<1>& x) { return 2 * kLongChunk * x.half_bytes(); }

  JAXSERVE_AMX void Run() const {
    for (int64_t i = begin_pair; i < end_pair; ++i) UnpackPair(i);
    ConfigureTiles(x.rows, kFirstWeights, kFirstX);
    int64_t tile = tile0;
    for (; tile + 2 <= tile1; tile += 2) MultiplyRows<2>(tile);
    if (tile < tile1) MultiplyRows<1>(tile);
    _tile_release();
  }

  JAXSERVE_AMX void UnpackPair(int64_t i) const {
    const Pair pair = PairOf(product, i);
    int8_t* to = weights + (i - begin_pair) * PairBytes(x);
    for (int64_t block = 0; block < x.blocks(); ++block) {
      for (int side = 0; side < 2; ++side, to += kTileBytes) {
        constexpr int64_t kAhead = 8;
        UnpackOf<1>(*pair.w[side])(*pair.w[side], pair.panel[side], block, kAhead, to);
      }
    }
  }

  JAXSERVE_AMX void Copy(int64_t tile, int64_t begin, int64_t count, int8_t* to) const {
    for (int64_t block = begin; block < begin + count; ++block) {
      const int8_t* from = x.At(tile, block);
      for (int64_t r = 0; r < x.rows; ++r, from += x.row_bytes(), to += 64) {
        _mm512_store_si512(to, _mm512_loadu_si512(from));
      }
    }
  }

  template <int kTiles>
  JAXSERVE_AMX void MultiplyRows(int64_t tile) const {
    const int64_t chunks = CeilDiv(x.blocks(), kLongChunk), most = CeilDiv(x.blocks(), chunks);
    for (int64_t begin = 0; begin < x.blocks(); begin += most) {
      const int64_t count = std::min(most, x.blocks() - begin), tile_bytes = count * x.half_bytes();
      for (int t = 0; t < kTiles; ++t) Copy(tile + t, begin, count, copy + t * tile_bytes);
      for (int64_t i = 0; i < end_pair - begin_pair; ++i) {
        const Sums of_pair{sums + i * kSumBytes, 64, kTileBytes, 2 * kTileBytes};
        Start<kTiles>(begin == 0 ? nullptr : &of_pair);
        Multiply<kTiles, 1, true>(copy, copy + (kTiles - 1) * tile_bytes, 64, 0, x.half_bytes(),
                            weights + i * PairBytes(x) + begin * 2 * kTileBytes, count);
        Store<kTiles>(of_pair);
      }
    }
    for (int t = 0; t < kTiles; ++t) {
      for (int64_t r = 0; r < x.rows; ++r) {
        FinishRow(x.FirstRow(tile + t) + r, sums + t * 2 * kTileBytes + r * 64);
      }
    }
  }

  // A row's results, pair after pair, from its sums with the first pair.
  JAXSERVE_AMX void FinishRow(int64_t row, const int8_t* first) const {
    const int64_t width = product.gated ? kPanel : 2 * kPanel, F = product.w.F;
    int64_t i = begin_pair;
    if (product.bfloat16) {  // whole ones are stored as such
      auto* y = reinterpret_cast<BFloat16*>(product.y) + row * F;
      const auto* plus = static_cast<const BFloat16*>(product.w.plus);
      if (plus != nullptr) plus += row * F;
      for (; i < std::min(end_pair, F / width); ++i, first += kSumBytes) {
        const __m512 one = _mm512_load_ps(first), other = _mm512_load_ps(first + kTileBytes);
        if (product.gated) {
          const __m512 value = ShortGate(product.activation, one, other);
          _mm256_storeu_si256((__m256i*)(y + i * width), (__m256i)_mm512_cvtneps_pbh(value));
        } else if (plus != nullptr) {
          const __m512 sum = _mm512_add_ps(Widened(plus + i * width, 0xffff), one);
          const __m512 other_sum = _mm512_add_ps(Widened(plus + i * width + kPanel, 0xffff), other);
          _mm512_storeu_si512(y + i * width, (__m512i)_mm512_cvtne2ps_pbh(other_sum, sum));
        } else {
          _mm512_storeu_si512(y + i * width, (__m512i)_mm512_cvtne2ps_pbh(other, one));
        }
      }
    }
    for (; i < end_pair; ++i, first += kSumBytes) {
      FinishPair(product, PairOf(product, i), row, _mm512_load_ps(first), _mm512_load_ps(first + kTileBytes));
    }
  }
};

}  // namespace

void MultiplyManyTiles(const Product* products, int64_t count, const Tiles<1>& x) {
  Team team;
  const int64_t pairs = AllPairs(products, count), pair_bytes = LongTask::PairBytes(x);
  // The fewer parts the weights are in, the fewer times each row is copied; but their tiles must stay in
  // L2, and threads that do other things as well need some tasks to share.
  const int64_t parts = std::max<int64_t>(NumThreads(), CeilDiv(pairs * pair_bytes, kReuseBytes));
  const int64_t wanted = CeilDiv(4 * NumThreads(), parts);
  const int64_t ranges = std::max<int64_t>(1, std::min(wanted, x.tiles / kRangeTiles));
  const int64_t task_pairs = CeilDiv(pairs, ranges == 1 ? std::max<int64_t>(parts, 2 * NumThreads()) : parts);
  const int64_t task_tiles = CeilDiv(CeilDiv(x.tiles, ranges), 2) * 2;

  const int64_t weight_bytes = task_pairs * pair_bytes, copy_bytes = LongTask::CopyBytes(x);
  const int64_t thread_bytes = weight_bytes + copy_bytes + task_pairs * LongTask::kSumBytes + kGap;
  int8_t* memory = team.Scratch<int8_t>(thread_bytes * NumThreads());
  ForEachTask(team, products, count, task_pairs, x.tiles, task_tiles,
              [&](const Product& product, int64_t begin, int64_t end, int64_t tile0, int64_t tile1,
                  int thread) {
    int8_t* own = memory + thread * thread_bytes;
    LongTask{product, x, begin, end, tile0, tile1, own, own + weight_bytes,
             own + weight_bytes + copy_bytes}.Run();
  });
}

}  // namespace jaxserve::groups

#endif  // JAXSERVE_X86

// linear with group-quantised weights for rows in bfloat16, on vector units that multiply pairs of it.
//
// Codes are integers of at most 8 bits, which bfloat16 holds exactly, so nothing of a weight is rounded:
// a group's products are added up as pairs, in order, and the sum is scaled as a whole,
//
//   sum over groups, in order:  scale * (sum of (code - zero) x) + offset * (sum of x)
//
// in float32. The order is the same for every number of rows, hence so are the bits.
//
// A few rows meet codes as they are unpacked, panel by panel. For many, two panels' codes are unpacked a
// little at a time and meet all rows while they are in L1.

#include "cpu_groups_short.h"

#if JAXSERVE_X86

namespace jaxserve::groups {
namespace {

constexpr int kTileRows = 6;  // whose sums, of a group and in all, fill the registers
constexpr int64_t kChunk = 8;       // blocks unpacked at a time: half of L1
constexpr int64_t kTaskRows = 96;   // whose sums stay near while chunks pass
constexpr int64_t kPairs = kBlock / 2;
constexpr int64_t kPairBytes = 2 * 64;  // of a pair of inputs in two panels
constexpr int kHalf = kBlock / 2;       // inputs of the smallest group

// x made ready: a block's pairs in the order in which codes are unpacked fastest, which is quads of inputs
// 0, 4, 1, 5, 2, 6, 3, 7 and of each the first and third input, then the second and fourth; and the sums
// over groups that offsets need.
struct Rows {
  uint16_t* values;  // [T][D]
  float* sums;       // [T][D / kHalf]
  int64_t D;

  const uint16_t* Of(int64_t row) const { return values + row * D; }
  float* SumsOf(int64_t row) const { return sums + row * (D / kHalf); }
};

JAXSERVE_AVX512_BF16 void MakeReady(const BFloat16* x, int64_t row, const Rows& to) {
  const __m512i order = _mm512_set_epi16(31, 29, 30, 28, 15, 13, 14, 12, 27, 25, 26, 24, 11, 9, 10, 8, 23, 21,
                                         22, 20, 7, 5, 6, 4, 19, 17, 18, 16, 3, 1, 2, 0);
  uint16_t* values = to.values + row * to.D;
  float* sums = to.SumsOf(row);
  for (int64_t k = 0; k < to.D; k += kBlock, sums += 2) {
    const __m512i all = _mm512_loadu_si512(x + row * to.D + k);
    _mm512_storeu_si512(values + k, _mm512_permutexvar_epi16(order, all));
    for (int half = 0; half < 2; ++half) {
      sums[half] = _mm512_reduce_add_ps(Widened(x + row * to.D + k + half * kHalf, 0xffff));
    }
  }
}

// One block of one panel's codes less their zero point, as pairs [16 features][2] of bfloat16: visit(pair,
// codes) for each pair of a block in the order of `Rows`.
template <int kBits, typename Visit>
JAXSERVE_AVX512_BF16 inline __attribute__((always_inline)) void UnpackBlock(const uint8_t* codes, __m512i table,
                                                                           const Visit& visit) {
  if constexpr (kBits == 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i both = _mm512_loadu_si512(codes + i * 64);
      // The table repeats, so that the bit above a code does not matter.
      visit(4 * i, _mm512_permutexvar_epi16(both, table));
      visit(4 * i + 1, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 8), table));
      visit(4 * i + 2, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table));
      visit(4 * i + 3, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 12), table));
    }
  } else {
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m512i quad = _mm512_loadu_si512(codes + (i / 2 + i % 2 * 4) * 64);
      auto number = [&](int k) JAXSERVE_AVX512_BF16 __attribute__((always_inline)) {
        const __m512i code = _mm512_srai_epi32(_mm512_slli_epi32(quad, 24 - 8 * k), 24);
        return _mm512_castps_si512(_mm512_cvtepi32_ps(code));
      };
      auto two = [&](int k) JAXSERVE_AVX512_BF16 __attribute__((always_inline)) {
        constexpr int kAOrBAndC = 0xf8;
        return _mm512_ternarylogic_epi32(_mm512_srli_epi32(number(k), 16), number(k + 2), top, kAOrBAndC);
      };
      visit(2 * i, two(0));
      visit(2 * i + 1, two(1));
    }
  }
}

// bfloat16 of 0 - zero to 15 - zero, twice.
JAXSERVE_AVX512_BF16 inline __m512i TableOf(const Weight& w) {
  alignas(64) static const float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const __m512 numbers = _mm512_sub_ps(_mm512_load_ps(kIndex), _mm512_set1_ps(static_cast<float>(w.zero)));
  return (__m512i)_mm512_cvtne2ps_pbh(numbers, numbers);
}

JAXSERVE_AVX512_BF16 inline __m512bh Two(const uint16_t* at) {
  int32_t two;
  std::memcpy(&two, at, sizeof(two));
  return (__m512bh)_mm512_set1_epi32(two);
}

// Adds scale * sum + offset * (sum of x) of one group and panel to the totals of kRows rows. Of kParts parts
// of a block, a weight's group may be both.
template <int kRows, int kParts>
JAXSERVE_AVX512_BF16 inline __attribute__((always_inline)) void AddGroup(const Weight& w, int64_t panel,
                                                                        int64_t block, int part, const Rows& x,
                                                                        int64_t row, const __m512* sum,
                                                                        __m512* total) {
  const int64_t group = w.parts == 2 ? 2 * block + part : block;
  const __m512 scale = Floats(w, w.OfPanel(w.scale, panel) + group * w.scale_bytes());
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_fmadd_ps(sum[r], scale, total[r]);
  if (w.offset == nullptr) return;
  const __m512 offset = Floats(w, w.OfPanel(w.offset, panel) + group * w.scale_bytes());
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const float* halves = x.SumsOf(row + r) + 2 * block;
    const float inputs = kParts == 2 ? halves[part] : halves[0] + halves[1];
    total[r] = _mm512_fmadd_ps(_mm512_set1_ps(inputs), offset, total[r]);
  }
}

// Which part of a block a pair belongs to, of kParts.
template <int kParts>
constexpr int PartOf(int pair) { return kParts == 2 ? pair / 2 % 2 : 0; }

// Calls run(rows, parts), compile-time numbers, for 1 to kTileRows rows.
template <int kRows = kTileRows, typename Run>
JAXSERVE_AVX512_BF16 void WithNumbers(int64_t rows, bool halves, const Run& run) {
  if constexpr (kRows > 0) {
    if (rows < kRows) return WithNumbers<kRows - 1>(rows, halves, run);
    using Count = std::integral_constant<int, kRows>;
    halves ? run(Count(), std::integral_constant<int, 2>()) : run(Count(), std::integral_constant<int, 1>());
  }
}

// Some pairs of panels of a product for rows [row0, row1).
struct Task {
  const Product& product;
  const Rows& x;
  int64_t begin_pair, end_pair, row0, row1;
  int8_t* codes;  // [kChunk][kPairs][2][16][2] of bfloat16
  float* totals;  // [rows][2][16]

  static constexpr int64_t kCodeBytes = kChunk * kPairs * kPairBytes;
  static constexpr int64_t kBytes = kCodeBytes + kTaskRows * 2 * kPanel * 4 + kGap;

  int64_t blocks() const { return product.w.blocks(); }
  float* TotalsOf(int64_t row) const { return totals + (row - row0) * 2 * kPanel; }

  JAXSERVE_AVX512_BF16 void Run() const {
    const bool halves = product.w.parts == 2 || product.up.parts == 2;
    for (int64_t i = begin_pair; i < end_pair; ++i) {
      const Pair pair = PairOf(product, i);
      row1 - row0 > kTileRows ? ComputeMany(pair, halves) : ComputeFew(pair, halves);
      for (int64_t row = row0; row < row1; ++row) {
        const float* total = TotalsOf(row);
        FinishPair(product, pair, row, _mm512_load_ps(total), _mm512_load_ps(total + kPanel));
      }
    }
  }

  JAXSERVE_AVX512_BF16 void ComputeFew(const Pair& pair, bool halves) const {
    for (int side = 0; side < 2; ++side) {
      const Weight& w = *pair.w[side];
      WithNumbers(row1 - row0, halves, [&](auto rows, auto parts) JAXSERVE_AVX512_BF16 {
        constexpr int kRows = decltype(rows)::value, kParts = decltype(parts)::value;
        w.bits == 4 ? MultiplyPanel<4, kRows, kParts>(w, pair.panel[side], side)
                    : MultiplyPanel<8, kRows, kParts>(w, pair.panel[side], side);
      });
    }
  }

  template <int kBits, int kRows, int kParts>
  JAXSERVE_AVX512_BF16 void MultiplyPanel(const Weight& w, int64_t panel, int side) const {
    const uint8_t* from = w.CodesOf(panel);
    const __m512i table = TableOf(w);
    __m512 total[kRows] = {};
    for (int64_t b = 0; b < blocks(); ++b, from += kBits * 64) {
      PrefetchAhead(w, from, panel, b);
      const uint16_t* values = x.Of(row0) + b * kBlock;
      __m512 sum[kParts][kRows] = {};
      UnpackBlock<kBits>(from, table, [&](int pair, __m512i two) JAXSERVE_AVX512_BF16 __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          __m512& of = sum[PartOf<kParts>(pair)][r];
          of = _mm512_dpbf16_ps(of, Two(values + r * x.D + 2 * pair), (__m512bh)two);
        }
      });
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        AddGroup<kRows, kParts>(w, panel, b, part, x, row0, sum[part], total);
      }
    }
    for (int r = 0; r < kRows; ++r) _mm512_store_ps(TotalsOf(row0 + r) + side * kPanel, total[r]);
  }

  static void PrefetchAhead(const Weight& w, const uint8_t* codes, int64_t panel, int64_t block) {
    constexpr int64_t kAhead = 4096;  // bytes of codes
    for (int64_t i = 0; i < w.block_bytes(); i += 64) __builtin_prefetch(codes + kAhead + i);
    const int64_t group = block * w.parts * w.scale_bytes() + kAhead / 8;
    __builtin_prefetch(w.OfPanel(w.scale, panel) + group);
    if (w.offset != nullptr) __builtin_prefetch(w.OfPanel(w.offset, panel) + group);
  }

  JAXSERVE_AVX512_BF16 void ComputeMany(const Pair& pair, bool halves) const {
    for (int64_t begin = 0; begin < blocks(); begin += kChunk) {
      const int64_t count = std::min(kChunk, blocks() - begin);
      for (int side = 0; side < 2; ++side) UnpackChunk(*pair.w[side], pair.panel[side], begin, count, side);
      for (int64_t row = row0; row < row1; row += kTileRows) {
        WithNumbers(std::min<int64_t>(kTileRows, row1 - row), halves, [&](auto rows, auto parts) JAXSERVE_AVX512_BF16 {
          MultiplyChunk<decltype(rows)::value, decltype(parts)::value>(pair, begin, count, row);
        });
      }
    }
  }

  JAXSERVE_AVX512_BF16 void UnpackChunk(const Weight& w, int64_t panel, int64_t begin, int64_t count,
                                        int side) const {
    const uint8_t* from = w.CodesOf(panel) + begin * w.block_bytes();
    int8_t* to = codes + side * 64;
    const __m512i table = TableOf(w);
    for (int64_t b = 0; b < count; ++b, from += w.block_bytes(), to += kPairs * kPairBytes) {
      PrefetchAhead(w, from, panel, begin + b);
      auto store = [&](int pair, __m512i two) JAXSERVE_AVX512_BF16 __attribute__((always_inline)) {
        _mm512_store_si512(to + pair * kPairBytes, two);
      };
      w.bits == 4 ? UnpackBlock<4>(from, table, store) : UnpackBlock<8>(from, table, store);
    }
  }

  // Adds a chunk's products to the totals of kRows rows.
  template <int kRows, int kParts>
  JAXSERVE_AVX512_BF16 void MultiplyChunk(const Pair& pair, int64_t begin, int64_t count, int64_t row) const {
    __m512 total[2][kRows];
    for (int p = 0; p < 2; ++p) {
      for (int r = 0; r < kRows; ++r) {
        total[p][r] = begin == 0 ? _mm512_setzero_ps() : _mm512_load_ps(TotalsOf(row + r) + p * kPanel);
      }
    }
    const int8_t* block = codes;
    for (int64_t b = begin; b < begin + count; ++b, block += kPairs * kPairBytes) {
      const uint16_t* values = x.Of(row) + b * kBlock;
      for (int part = 0; part < kParts; ++part) {
        __m512 sum[2][kRows] = {};
        for (int i = 2 * part; i < kPairs; i += 2 * kParts) {  // pairs come in twos, by turns of the parts
#pragma GCC unroll 2
          for (int pair = i; pair < i + 2; ++pair) {
            const auto first = (__m512bh)_mm512_load_si512(block + pair * kPairBytes);
            const auto second = (__m512bh)_mm512_load_si512(block + pair * kPairBytes + 64);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
              const __m512bh inputs = Two(values + r * x.D + 2 * pair);
              sum[0][r] = _mm512_dpbf16_ps(sum[0][r], inputs, first);
              sum[1][r] = _mm512_dpbf16_ps(sum[1][r], inputs, second);
            }
          }
        }
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) {
          AddGroup<kRows, kParts>(*pair.w[p], pair.panel[p], b, part, x, row, sum[p], total[p]);
        }
      }
    }
    for (int p = 0; p < 2; ++p) {
      for (int r = 0; r < kRows; ++r) _mm512_store_ps(TotalsOf(row + r) + p * kPanel, total[p][r]);
    }
  }
};

}  // namespace

void MultiplyBfloat16Pairs(const Product* products, int64_t count, const void* x) {
  const Weight& w = products[0].w;
  Team team;
  const size_t value_bytes = w.T * w.D * 2 + kGap, sum_bytes = Align64(w.T * w.D / kHalf * 4) + kGap;
  int8_t* memory = team.Scratch<int8_t>(Align64(value_bytes) + sum_bytes + Align64(Task::kBytes) * NumThreads());
  int8_t* own = memory + Align64(value_bytes) + sum_bytes;
  const Rows rows{reinterpret_cast<uint16_t*>(memory), reinterpret_cast<float*>(memory + Align64(value_bytes)), w.D};
  const int64_t cut = CeilDiv(w.T, NumThreads());
  team.ForEach(CeilDiv(w.T, cut), [&](int64_t task, int) {
    const int64_t end = std::min(w.T, (task + 1) * cut);
    for (int64_t row = task * cut; row < end; ++row) MakeReady(static_cast<const BFloat16*>(x), row, rows);
  });
  const int64_t task_pairs = std::max<int64_t>(1, AllPairs(products, count) / (4 * NumThreads()));
  ForEachTask(team, products, count, task_pairs, w.T, kTaskRows,
              [&](const Product& product, int64_t begin, int64_t end, int64_t row0, int64_t row1, int thread) {
    int8_t* codes = own + thread * Align64(Task::kBytes);
    Task{product, rows, begin, end, row0, row1, codes, reinterpret_cast<float*>(codes + Task::kCodeBytes)}.Run();
  });
}

}  // namespace jaxserve::groups

#endif  // JAXSERVE_X86

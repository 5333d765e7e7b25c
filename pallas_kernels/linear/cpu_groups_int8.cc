// linear with group-quantised weights, int8 inputs: AVX-512's rounding and its kernel. See cpu_groups.h.

#include <utility>
#include <vector>

#include "cpu_groups_short.h"

#if JAXSERVE_X86

namespace jaxserve::groups {
namespace {

constexpr int kMostRows = 12;             // of a tile: their sums and totals fill 24 registers
constexpr int64_t kTaskBytes = 32 << 10;  // of weights: below this a task is not worth handing out

// f(0) to f(n - 1), numbers known to the compiler: it keeps no array in registers whose indices it finds late.
template <typename F, int... i>
JAXSERVE_AVX512 JAXSERVE_INLINE void ForEach(std::integer_sequence<int, i...>, const F& f) {
  (f(std::integral_constant<int, i>()), ...);
}
template <int n, typename F>
JAXSERVE_AVX512 JAXSERVE_INLINE void ForEach(const F& f) {
  ForEach(std::make_integer_sequence<int, n>(), f);
}

// ---- rounding ----------------------------------------------------------------------------------

// Activations in bytes, for weights whose codes have this zero point and as many groups a block, in tiles of
// `rows` rows. Sums over a group's products come out as floats, without a conversion: they start at the bits of
// 1.5 * 2^23 steps (and what makes the zero point cancel), count on in the mantissa, whose unit is one step, and
// in the end the same 1.5 * 2^23 steps are taken off, exactly.
struct Bytes {
  int zero, parts;
  int64_t rows, blocks;
  int8_t* values;  // [tile][block][rows][32]
  float* base;     // [tile][block][rows]: 1.5 * 2^23 steps
  int32_t* start;  // [tile][block][part][rows]

  static size_t Size(int64_t tiles, int64_t rows, int64_t blocks, int parts) {
    const size_t n = tiles * rows * blocks;
    return Align64(n * kBlock) + Align64(n * 4) + Align64(n * parts * 4) + kGap;
  }
  Bytes(char* memory, int zero, int parts, int64_t tiles, int64_t rows, int64_t blocks)
      : zero(zero), parts(parts), rows(rows), blocks(blocks) {
    const size_t n = tiles * rows * blocks;
    values = reinterpret_cast<int8_t*>(memory);
    base = reinterpret_cast<float*>(memory + Align64(n * kBlock));
    start = reinterpret_cast<int32_t*>(memory + Align64(n * kBlock) + Align64(n * 4));
  }
  int64_t At(int64_t tile, int64_t block) const { return (tile * blocks + block) * rows; }
};

struct RoundJob {
  const void* x;  // [T, D]
  bool bfloat16;  // or float32
  int64_t T, D;
  Bytes to;
};

constexpr int kLanes = 16;

JAXSERVE_AVX512 inline void Prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

// What is left of four vectors whose 128-bit lanes are to be added up: for each such lane of each, its sum.
template <typename Join>
JAXSERVE_AVX512 JAXSERVE_INLINE __m512i AcrossQuarters(const __m512i (&v)[4], const Join& join) {
  __m512i pairs[2];
  for (int i = 0; i < 2; ++i) {
    pairs[i] = join(_mm512_unpacklo_epi64(v[i], v[i + 2]), _mm512_unpackhi_epi64(v[i], v[i + 2]));
  }
  const __m512 first = _mm512_castsi512_ps(pairs[0]), second = _mm512_castsi512_ps(pairs[1]);
  return join(_mm512_castps_si512(_mm512_shuffle_ps(first, second, 0x88)),
              _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0xdd)));
}

// Lane i: the largest lane of v[i].
JAXSERVE_AVX512 JAXSERVE_INLINE __m512i LargestOf(const __m512i (&v)[kLanes]) {
  const auto join = [](__m512i a, __m512i b) JAXSERVE_AVX512 { return _mm512_max_epi32(a, b); };
  __m512i eighths[8], quarters[4];
  for (int i = 0; i < 8; ++i) {  // of vectors i and i + 8
    eighths[i] = join(_mm512_shuffle_i64x2(v[i], v[i + 8], 0x44), _mm512_shuffle_i64x2(v[i], v[i + 8], 0xee));
  }
  for (int i = 0; i < 4; ++i) {  // of vectors i, i + 4, i + 8 and i + 12
    quarters[i] = join(_mm512_shuffle_i64x2(eighths[i], eighths[i + 4], 0x88),
                       _mm512_shuffle_i64x2(eighths[i], eighths[i + 4], 0xdd));
  }
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_permutexvar_epi32(order, AcrossQuarters(quarters, join));
}

// Lanes 2 i and 2 i + 1: the sums of the lower and of the upper lanes of v[i].
JAXSERVE_AVX512 JAXSERVE_INLINE __m512i SumsOfHalves(const __m512i (&v)[kLanes / 2]) {
  const auto join = [](__m512i a, __m512i b) JAXSERVE_AVX512 { return _mm512_add_epi32(a, b); };
  __m512i quarters[4];
  for (int i = 0; i < 4; ++i) {  // of vectors i and i + 4
    quarters[i] = join(_mm512_shuffle_i64x2(v[i], v[i + 4], 0x88), _mm512_shuffle_i64x2(v[i], v[i + 4], 0xdd));
  }
  const __m512i order = _mm512_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7, 8, 12, 10, 14, 9, 13, 11, 15);
  return _mm512_permutexvar_epi32(order, AcrossQuarters(quarters, join));
}

// 16 numbers as floats.
JAXSERVE_AVX512 inline __m512 Read(const float* at) { return _mm512_loadu_ps(at); }
JAXSERVE_AVX512 inline __m512 Read(const BFloat16* at) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// 64 small integers as bytes.
JAXSERVE_AVX512 inline __m512i BytesOf(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));  // quarters by turns
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, bytes);
}

// For the largest magnitudes `bits` of 16 rows: what brings their numbers to steps, and 1.5 * 2^23 of those.
struct Steps {
  __m512 inverse, base;
};
JAXSERVE_AVX512 inline Steps StepsOf(__m512i bits) {
  __m512i exponent = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(kRoundUp)), 23);
  const __mmask16 some = _mm512_cmpge_epi32_mask(exponent, _mm512_set1_epi32(kLeastExponent));
  const __mmask16 bad = _mm512_cmpgt_epi32_mask(exponent, _mm512_set1_epi32(kMostExponent));
  exponent = _mm512_max_epi32(exponent, _mm512_set1_epi32(kLeastExponent));
  const __m512i inverse = _mm512_sub_epi32(_mm512_set1_epi32(254 + kStepsInByte), exponent);
  const __m512i base = _mm512_add_epi32(exponent, _mm512_set1_epi32(23 - kStepsInByte));
  const __m512i half = _mm512_set1_epi32(1 << 22), none = _mm512_set1_epi32(0x7fc00000);
  return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(some & ~bad, inverse, 23)),
          _mm512_castsi512_ps(_mm512_mask_blend_epi32(bad, _mm512_or_si512(_mm512_slli_epi32(base, 23), half), none))};
}

// Rounds block `block` of a tile; see RoundToBytes, whose bits these are. A lane is a row: rows[r] begins row r.
template <typename Number, bool kWhole>
JAXSERVE_AVX512 void RoundBlock(const Bytes& to, const Number* const* rows, int64_t tile, int64_t block) {
  constexpr int kParts = kWhole ? 1 : 2;
  const int64_t first = to.At(tile, block), begin = block * kBlock;
  const auto present = static_cast<__mmask16>((1u << to.rows) - 1);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i all[kLanes];  // of a row, what goes across its lanes
  ForEach<kLanes>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) {
    const Number* x = rows[r] + begin;
    all[r] = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(Read(x)), magnitude),
                              _mm512_and_si512(_mm512_castps_si512(Read(x + kLanes)), magnitude));
    Prefetch(x + 3 * kBlock);
  });
  const Steps steps = StepsOf(LargestOf(all));
  _mm512_mask_storeu_ps(to.base + first, present, steps.base);
  alignas(64) float inverse[kLanes];
  _mm512_store_ps(inverse, steps.inverse);
  const __m512 shift = _mm512_set1_ps(12582912.0f);
  const auto steps_of = [&](int64_t r, int half) JAXSERVE_AVX512 __attribute__((always_inline)) {  // as Round does
    const __m512 x = Read(rows[r] + begin + half * kLanes);
    const __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(inverse[r]), shift);
    return _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_castps_si512(shift));
  };
  int8_t* values = to.values + first * kBlock;
  __m512i sums[kParts][kLanes / 2];  // of two rows' bytes by fours
  ForEach<kLanes / 2>([&](auto i) JAXSERVE_AVX512 __attribute__((always_inline)) {
    constexpr int r = 2 * i;
    for (int part = 0; part < kParts; ++part) sums[part][i] = _mm512_setzero_si512();
    if (r >= to.rows) return;
    const __m512i two = BytesOf(steps_of(r, 0), steps_of(r, 1), steps_of(r + 1, 0), steps_of(r + 1, 1));
    _mm512_mask_storeu_epi32(values + r * kBlock, static_cast<__mmask16>(r + 1 < to.rows ? 0xffff : 0xff), two);
    const __m512i fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), two);
    sums[0][i] = kWhole ? fours : _mm512_maskz_mov_epi32(0x0f0f, fours);
    if constexpr (!kWhole) sums[1][i] = _mm512_maskz_mov_epi32(0xf0f0, fours);
  });
  for (int part = 0; part < kParts; ++part) {
    const __m512i zeros = _mm512_mullo_epi32(SumsOfHalves(sums[part]), _mm512_set1_epi32(to.zero));
    const __m512i start = _mm512_sub_epi32(_mm512_castps_si512(steps.base), zeros);
    _mm512_mask_storeu_epi32(to.start + first * kParts + part * to.rows, present, start);
  }
}

// Blocks [begin, end) of a tile. A last tile repeats its last row: what follows of it is not stored.
template <typename Number, bool kWhole>
void RoundBlocks(const RoundJob& job, int64_t tile, int64_t begin, int64_t end) {
  const Number* rows[kLanes];
  for (int64_t r = 0; r < kLanes; ++r) {
    rows[r] = static_cast<const Number*>(job.x) + std::min(tile * job.to.rows + r, job.T - 1) * job.D;
  }
  for (int64_t block = begin; block < end; ++block) RoundBlock<Number, kWhole>(job.to, rows, tile, block);
}

void Round(const RoundJob& job, int64_t tile, int64_t begin, int64_t end) {
  const bool whole = job.to.parts == 1;
  if (job.bfloat16) return (whole ? RoundBlocks<BFloat16, true> : RoundBlocks<BFloat16, false>)(job, tile, begin, end);
  (whole ? RoundBlocks<float, true> : RoundBlocks<float, false>)(job, tile, begin, end);
}

// ---- products ----------------------------------------------------------------------------------

// Codes of a byte, of half of one, or of half of one with a zero point for each group, in eighths of a code.
enum class Codes { kBytes, kHalves, kEighths };

// sums += four bytes of each of kRows rows times a quad of codes. Written out, as GCC moves sums from register
// to register around its own intrinsic; it reads what nothing here writes.
template <int kRows>
JAXSERVE_AVX512 JAXSERVE_INLINE void AddProducts(__m512i (&sums)[kRows], const int8_t* bytes, __m512i quad) {
  ForEach<kRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) {
    asm("vpdpbusd %c3(%2)%{1to16%}, %1, %0" : "+v"(sums[r]) : "v"(quad), "r"(bytes), "i"(r * kBlock));
  });
}

// Adds up a part's products. Codes are read as unsigned: signed bytes as 128 more, codes of a group with its own
// zero point as eighths, 128 above that.
template <int kRows, Codes kCodes, int kParts>
JAXSERVE_AVX512 JAXSERVE_INLINE void AddPart(__m512i (&sums)[kRows], const int8_t* bytes, const uint8_t* codes,
                                             const uint8_t* zeros) {
  const __m512i most = _mm512_set1_epi8(static_cast<char>(0x80));
  if constexpr (kCodes == Codes::kBytes) {
    for (int q = 0; q < 8 / kParts; ++q) {
      AddProducts(sums, bytes + q * 4, _mm512_xor_si512(_mm512_loadu_si512(codes + q * 64), most));
    }
    return;
  }
  constexpr bool kEighths = kCodes == Codes::kEighths;
  const __m512i some = _mm512_set1_epi8(kEighths ? 0x78 : 15);
  __m512i above = _mm512_setzero_si512();
  if constexpr (kEighths) {
    const __m512i of_each = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)));
    const __m512i four_times = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    above = _mm512_sub_epi8(most, _mm512_shuffle_epi8(of_each, four_times));
  }
  for (int q = 0; q < 4; ++q) {
    const __m512i both = _mm512_loadu_si512(codes + q * 64);
    __m512i low = _mm512_and_si512(kEighths ? _mm512_slli_epi16(both, 3) : both, some);
    __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, kEighths ? 1 : 4), some);
    AddProducts(sums, bytes + q * 4, kEighths ? _mm512_add_epi8(low, above) : low);
    AddProducts(sums, bytes + q * 4 + 16, kEighths ? _mm512_add_epi8(high, above) : high);
  }
}

// A tile of kRows rows times one panel -> totals [kRows][kPanel].
template <int kRows, Codes kCodes, int kParts>
JAXSERVE_AVX512 void MultiplyTile(const Weight& w, const Bytes& x, int64_t tile, int64_t panel, float* totals) {
  constexpr int kAhead = 4096;  // bytes of codes
  constexpr int kLength = kBlock / kParts;
  constexpr bool kEighths = kCodes == Codes::kEighths;
  const uint8_t* codes = w.CodesOf(panel);
  const uint8_t* scale = w.OfPanel(w.scale, panel);
  const uint8_t* zeros = kEighths ? w.zeros + panel * x.blocks * kPanel : nullptr;
  __m512 total[kRows] = {};
  for (int64_t b = 0; b < x.blocks; ++b, codes += w.block_bytes()) {
#pragma GCC unroll 8
    for (int i = 0; i < (kCodes == Codes::kBytes ? 8 : 4); ++i) Prefetch(codes + kAhead + i * 64);
    Prefetch(scale + kAhead / 8);
    if constexpr (kEighths) Prefetch(zeros + kAhead / 16);
    const int64_t at = x.At(tile, b);
    const float* base = x.base + at;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const int32_t* start = x.start + at * kParts + part * kRows;
      __m512i sums[kRows];
      ForEach<kRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) {
        sums[r] = _mm512_set1_epi32(start[r]);
      });
      const int8_t* bytes = x.values + at * kBlock + part * kLength;
      AddPart<kRows, kCodes, kParts>(sums, bytes, codes + part * kLength * kPanel, zeros);
      const __m512 ws = Floats(w, scale);
      scale += w.scale_bytes();
      ForEach<kRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) {
        const __m512 sum = _mm512_sub_ps(_mm512_castsi512_ps(sums[r]), _mm512_set1_ps(base[r]));
        total[r] = _mm512_fmadd_ps(sum, ws, total[r]);
      });
    }
    if constexpr (kEighths) zeros += kPanel;
  }
  ForEach<kRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) {
    if constexpr (kEighths) total[r] = _mm512_mul_ps(total[r], _mm512_set1_ps(0.125f));
    _mm512_store_ps(totals + r * kPanel, total[r]);
  });
}

using TileKernel = void (*)(const Weight&, const Bytes&, int64_t tile, int64_t panel, float* totals);

template <int kRows>
TileKernel KernelOf(const Weight& w) {
  if (w.zeros != nullptr) return MultiplyTile<kRows, Codes::kEighths, 1>;
  if (w.bits == 4) return MultiplyTile<kRows, Codes::kHalves, 1>;
  return w.parts == 1 ? MultiplyTile<kRows, Codes::kBytes, 1> : MultiplyTile<kRows, Codes::kBytes, 2>;
}

template <int kRows = kMostRows>
TileKernel KernelOf(const Weight& w, int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return KernelOf<kRows - 1>(w, rows);
  }
  return KernelOf<kRows>(w);
}

// ---- the call ----------------------------------------------------------------------------------

// Which of them were made ready for w.
size_t Find(const Weight& w, const std::vector<RoundJob>& jobs) {
  size_t i = 0;
  while (i < jobs.size() && (jobs[i].to.zero != w.zero_point() || jobs[i].to.parts != w.parts)) ++i;
  return i;
}

}  // namespace

void MultiplyInt8(const Product* products, int64_t count, const void* x, bool bfloat16) {
  const int64_t T = products[0].w.T, D = products[0].w.D, blocks = products[0].w.blocks();
  const int64_t tiles = CeilDiv(T, kMostRows), rows = CeilDiv(T, tiles);
  std::vector<RoundJob> jobs;
  size_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    for (const Weight* w : {&products[i].w, &products[i].up}) {
      if (Find(*w, jobs) < jobs.size()) continue;
      jobs.push_back({x, bfloat16, T, D, Bytes(nullptr, w->zero_point(), w->parts, tiles, rows, blocks)});
      bytes += Bytes::Size(tiles, rows, blocks, w->parts);
    }
  }
  constexpr int64_t kTotals = kMostRows * kPanel;  // of a side
  Team team;
  char* memory = team.Scratch<char>(bytes + NumThreads() * 2 * kTotals * sizeof(float));
  float* totals = reinterpret_cast<float*>(memory + bytes);
  for (RoundJob& job : jobs) {
    job.to = Bytes(memory, job.to.zero, job.to.parts, tiles, rows, blocks);
    memory += Bytes::Size(tiles, rows, blocks, job.to.parts);
  }
  const int64_t cuts = tiles < NumThreads() ? NumThreads() : 1;
  team.ForEach(tiles * cuts, [&](int64_t task, int) {
    const int64_t cut = task % cuts;
    for (const RoundJob& job : jobs) {
      Round(job, task / cuts, blocks * cut / cuts, blocks * (cut + 1) / cuts);
    }
  });

  const int64_t pair_bytes = 2 * blocks * products[0].w.block_bytes();
  const int64_t task_pairs = std::max(CeilDiv(kTaskBytes, pair_bytes * std::min(rows, int64_t{4})),
                                      AllPairs(products, count) / (8 * NumThreads()));
  const auto run = [&](const Product& product, int64_t begin, int64_t end, int64_t tile0, int64_t tile1,
                       int thread) JAXSERVE_AVX512 {
    const Weight* weights[2] = {&product.w, &product.up};
    TileKernel kernels[2];
    const Bytes* inputs[2];
    for (int side = 0; side < 2; ++side) {
      kernels[side] = KernelOf(*weights[side], rows);
      inputs[side] = &jobs[Find(*weights[side], jobs)].to;
    }
    float* own = totals + thread * 2 * kTotals;
    // Tiles outside: what is rounded stays in L1 while panels pass.
    for (int64_t tile = tile0; tile < tile1; ++tile) {
      for (int64_t i = begin; i < end; ++i) {
        const Pair pair = PairOf(product, i);
        for (int side = 0; side < 2; ++side) {
          kernels[side](*pair.w[side], *inputs[side], tile, pair.panel[side], own + side * kTotals);
        }
        for (int64_t r = 0, row = tile * rows; r < rows && row < T; ++r, ++row) {
          const float* first = own + r * kPanel;
          FinishPair(product, pair, row, _mm512_load_ps(first), _mm512_load_ps(first + kTotals));
        }
      }
    }
  };
  ForEachTask(team, products, count, task_pairs, tiles, CeilDiv(kReuseBytes, rows * D), run);
}

}  // namespace jaxserve::groups

#endif  // JAXSERVE_X86

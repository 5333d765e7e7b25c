// linear with group-quantised weights, int8 inputs: AVX-512's rounding and its kernel. See cpu_groups.h.

#include <utility>
#include <vector>

#include "cpu_groups_short.h"

#if JAXSERVE_X86

namespace jaxserve::groups {
namespace {

constexpr int kMostRows = 12;              // of a tile: as many sums as registers hold
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

// What activations are rounded for: sums depend on the weights that they meet.
struct Form {
  int zero, parts;
  bool offsets;
};

struct RoundJob {
  const void* x;  // [T, D]
  bool bfloat16;  // or float32
  int64_t T, D;
  Form form;
  Rounded to;
};

constexpr int kLanes = 16;

JAXSERVE_AVX512 inline void Prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

// Lane i: `join` over all lanes of v[i], halves first, then quarters and so on, as SumOf adds.
template <typename Join>
JAXSERVE_AVX512 JAXSERVE_INLINE __m512i Across(const __m512i (&v)[kLanes], const Join& join) {
  __m512i eighths[8], quarters[4], pairs[2];
  for (int i = 0; i < 8; ++i) {  // of vectors i and i + 8
    eighths[i] = join(_mm512_shuffle_i64x2(v[i], v[i + 8], 0x44), _mm512_shuffle_i64x2(v[i], v[i + 8], 0xee));
  }
  for (int i = 0; i < 4; ++i) {  // vectors i, i + 4, i + 8 and i + 12, a quarter of the lanes each
    quarters[i] = join(_mm512_shuffle_i64x2(eighths[i], eighths[i + 4], 0x88),
                       _mm512_shuffle_i64x2(eighths[i], eighths[i + 4], 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    pairs[i] = join(_mm512_unpacklo_epi64(quarters[i], quarters[i + 2]),
                    _mm512_unpackhi_epi64(quarters[i], quarters[i + 2]));
  }
  const __m512 first = _mm512_castsi512_ps(pairs[0]), second = _mm512_castsi512_ps(pairs[1]);
  const __m512i joined = join(_mm512_castps_si512(_mm512_shuffle_ps(first, second, 0x88)),
                              _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0xdd)));
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_permutexvar_epi32(order, joined);
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

// A step, and what brings a row's numbers to such steps, for the largest magnitudes `bits` of 16 rows: see ScaleOf.
struct Steps {
  __m512 step, inverse;
};
JAXSERVE_AVX512 inline Steps StepsOf(__m512i bits) {
  const __m512i exponent = _mm512_srli_epi32(bits, 23);
  const __mmask16 some = _mm512_cmpge_epi32_mask(exponent, _mm512_set1_epi32(kLeastExponent));
  const __mmask16 bad = _mm512_cmpgt_epi32_mask(exponent, _mm512_set1_epi32(kMostExponent));
  const __m512 peak = _mm512_castsi512_ps(bits), most = _mm512_set1_ps(127);
  const __m512 step = _mm512_maskz_div_ps(some, peak, most);
  return {_mm512_mask_blend_ps(bad, step, _mm512_set1_ps(std::nanf(""))),
          _mm512_maskz_div_ps(some & ~bad, most, peak)};
}

// Rounds block `block` of a tile; see RoundToBytes, whose bits these are. A lane is a row: rows [r] begins row r.
template <typename Number, bool kWhole>
JAXSERVE_AVX512 void RoundBlock(const RoundJob& job, const Number* const* rows, int64_t tile, int64_t block) {
  constexpr int kParts = kWhole ? 1 : 2;
  const Rounded& to = job.to;
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
  const Steps steps = StepsOf(Across(all, [](__m512i a, __m512i b) JAXSERVE_AVX512 { return _mm512_max_epi32(a, b); }));
  _mm512_mask_storeu_ps(to.step + first, present, steps.step);
  for (int part = 0; job.form.offsets && part < kParts; ++part) {
    ForEach<kLanes>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) {
      const Number* x = rows[r] + begin;
      const __m512 sum = kWhole ? _mm512_add_ps(Read(x), Read(x + kLanes)) : Read(x + part * kLanes);
      all[r] = _mm512_castps_si512(sum);
    });
    const __m512i sums = Across(all, [](__m512i a, __m512i b) JAXSERVE_AVX512 {
      return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
    });
    _mm512_mask_storeu_ps(to.sum + first * kParts + part * to.rows, present, _mm512_castsi512_ps(sums));
  }
  alignas(64) float inverse[kLanes];
  _mm512_store_ps(inverse, steps.inverse);
  const __m512 shift = _mm512_set1_ps(12582912.0f);
  __m512i q[2][kLanes];
  int8_t* codes = to.Planes(tile, block);
  for (int64_t r = 0; r < to.rows; r += 2, codes += 2 * kBlock) {
    for (int64_t i = r; i < r + 2; ++i) {
      for (int half = 0; half < 2; ++half) {  // as Round does
        const __m512 x = Read(rows[i] + begin + half * kLanes);
        const __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(inverse[i]), shift);
        q[half][i] = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_castps_si512(shift));
      }
    }
    const __m512i two = BytesOf(q[0][r], q[1][r], q[0][r + 1], q[1][r + 1]);
    const auto some = static_cast<__mmask16>(r + 1 < to.rows ? 0xffff : 0xff);
    _mm512_mask_storeu_epi32(codes, some, two);
  }
  for (int part = 0; part < kParts; ++part) {
    __m512i start = _mm512_setzero_si512();
    if (job.form.zero != 0) {
      for (int64_t r = 0; r < to.rows; ++r) all[r] = kWhole ? _mm512_add_epi32(q[0][r], q[1][r]) : q[part][r];
      const __m512i sums = Across(all, [](__m512i a, __m512i b) JAXSERVE_AVX512 { return _mm512_add_epi32(a, b); });
      start = _mm512_mullo_epi32(sums, _mm512_set1_epi32(-job.form.zero));
    }
    _mm512_mask_storeu_epi32(to.start + 2 * (first * kParts + part * to.rows), present, start);
  }
}

// Blocks [begin, end) of a tile. A last tile repeats its last row: what follows of it is not stored.
template <typename Number, bool kWhole>
void RoundBlocks(const RoundJob& job, int64_t tile, int64_t begin, int64_t end) {
  const Number* rows[kLanes];
  for (int64_t r = 0; r < kLanes; ++r) {
    rows[r] = static_cast<const Number*>(job.x) + std::min(tile * job.to.rows + r, job.T - 1) * job.D;
  }
  for (int64_t block = begin; block < end; ++block) RoundBlock<Number, kWhole>(job, rows, tile, block);
}

void Round(const RoundJob& job, int64_t tile, int64_t begin, int64_t end) {
  const bool whole = job.to.parts == 1;
  if (job.bfloat16) return (whole ? RoundBlocks<BFloat16, true> : RoundBlocks<BFloat16, false>)(job, tile, begin, end);
  (whole ? RoundBlocks<float, true> : RoundBlocks<float, false>)(job, tile, begin, end);
}

// ---- products ----------------------------------------------------------------------------------

// sums += four bytes of each of kRows rows times a quad of codes. Written out, as GCC moves sums from register
// to register around its own intrinsic; it reads what nothing here writes.
template <int kRows>
JAXSERVE_AVX512 JAXSERVE_INLINE void AddProducts(__m512i (&sums)[kRows], const int8_t* bytes, __m512i quad) {
  ForEach<kRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) {
    asm("vpdpbusd %c3(%2)%{1to16%}, %1, %0" : "+v"(sums[r]) : "v"(quad), "r"(bytes), "i"(r * kBlock));
  });
}

// The same of a part's codes, read as unsigned: signed ones are 128 more.
template <int kRows, int kBits, int kParts>
JAXSERVE_AVX512 JAXSERVE_INLINE void AddPart(__m512i (&sums)[kRows], const int8_t* bytes, const uint8_t* codes) {
  if constexpr (kBits == 8) {
    for (int q = 0; q < 8 / kParts; ++q) {
      const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
      AddProducts(sums, bytes + q * 4, _mm512_xor_si512(_mm512_loadu_si512(codes + q * 64), flip));
    }
  } else {
    for (int q = 0; q < 4; ++q) {
      const __m512i both = _mm512_loadu_si512(codes + q * 64), nibble = _mm512_set1_epi8(15);
      AddProducts(sums, bytes + q * 4, _mm512_and_si512(both, nibble));
      AddProducts(sums, bytes + q * 4 + 16, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
    }
  }
}

// A tile of kRows rows times one panel -> totals [kRows][kPanel].
template <int kRows, int kBits, int kParts, bool kOffset>
JAXSERVE_AVX512 void MultiplyTile(const Weight& w, const Rounded& x, int64_t tile, int64_t panel, float* totals) {
  constexpr int kAhead = 4096;  // bytes of codes
  constexpr int kLength = kBlock / kParts;
  const uint8_t* codes = w.CodesOf(panel);
  const uint8_t* scale = w.OfPanel(w.scale, panel);
  const uint8_t* offset = w.OfPanel(w.offset, panel);
  __m512 total[kRows] = {};
  for (int64_t b = 0; b < x.blocks; ++b, codes += kBits * 64) {
#pragma GCC unroll 8
    for (int i = 0; i < kBits; ++i) Prefetch(codes + kAhead + i * 64);
    Prefetch(scale + kAhead / 8);
    if constexpr (kOffset) Prefetch(offset + kAhead / 8);
    const int64_t at = x.At(tile, b);
    const int8_t* bytes = x.Planes(tile, b);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const int32_t* start = x.start + 2 * (at * kParts + part * kRows);
      __m512i sums[kRows];
      ForEach<kRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) { sums[r] = _mm512_set1_epi32(start[r]); });
      AddPart<kRows, kBits, kParts>(sums, bytes + part * kLength, codes + part * kLength * kPanel);
      const __m512 ws = Floats(w, scale);
      scale += w.scale_bytes();
      ForEach<kRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) {
        const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r]), _mm512_set1_ps(x.step[at + r]));
        total[r] = _mm512_fmadd_ps(sum, ws, total[r]);
      });
      if constexpr (kOffset) {
        const __m512 wo = Floats(w, offset);
        offset += w.scale_bytes();
        const float* sum = x.sum + at * kParts + part * kRows;
        ForEach<kRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) { total[r] = _mm512_fmadd_ps(wo, _mm512_set1_ps(sum[r]), total[r]); });
      }
    }
  }
  ForEach<kRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) { _mm512_store_ps(totals + r * kPanel, total[r]); });
}

using TileKernel = void (*)(const Weight&, const Rounded&, int64_t tile, int64_t panel, float* totals);

template <int kRows>
TileKernel KernelOf(const Weight& w) {
  if (w.bits == 4) return w.offset ? MultiplyTile<kRows, 4, 1, true> : MultiplyTile<kRows, 4, 1, false>;
  if (w.parts == 1) return w.offset ? MultiplyTile<kRows, 8, 1, true> : MultiplyTile<kRows, 8, 1, false>;
  return w.offset ? MultiplyTile<kRows, 8, 2, true> : MultiplyTile<kRows, 8, 2, false>;
}

template <int kRows = kMostRows>
TileKernel KernelOf(const Weight& w, int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return KernelOf<kRows - 1>(w, rows);
  }
  return KernelOf<kRows>(w);
}

// ---- the call ----------------------------------------------------------------------------------

// The index in `forms` of what serves w.
int64_t Find(const Weight& w, std::vector<Form>& forms) {
  size_t i = 0;
  while (i < forms.size() && (forms[i].zero != w.zero_point() || forms[i].parts != w.parts)) ++i;
  if (i == forms.size()) forms.push_back({w.zero_point(), w.parts, false});
  forms[i].offsets |= w.offset != nullptr;
  return i;
}

}  // namespace

void MultiplyInt8(const Product* products, int64_t count, const void* x, bool bfloat16) {
  const Weight& w = products[0].w;
  const int64_t tiles = CeilDiv(w.T, kMostRows), rows = CeilDiv(w.T, tiles);
  std::vector<Form> forms;
  for (int64_t i = 0; i < count; ++i) Find(products[i].w, forms), Find(products[i].up, forms);
  size_t bytes = 0;
  for (const Form& form : forms) bytes += Rounded::Bytes(tiles, rows, w.blocks(), form.parts, 1) + kGap;
  constexpr int64_t kTotals = kMostRows * kPanel;  // of a side
  Team team;
  char* memory = team.Scratch<char>(bytes + NumThreads() * 2 * kTotals * sizeof(float));
  float* totals = reinterpret_cast<float*>(memory + bytes);

  std::vector<RoundJob> jobs;
  for (const Form& form : forms) {
    const Rounded to(memory, tiles, rows, w.blocks(), form.parts, 1);
    memory += Rounded::Bytes(tiles, rows, w.blocks(), form.parts, 1) + kGap;
    jobs.push_back({x, bfloat16, w.T, w.D, form, to});
  }
  const int64_t cuts = tiles < NumThreads() ? NumThreads() : 1;
  team.ForEach(tiles * cuts, [&](int64_t task, int) {
    const int64_t cut = task % cuts;
    for (const RoundJob& job : jobs) {
      Round(job, task / cuts, w.blocks() * cut / cuts, w.blocks() * (cut + 1) / cuts);
    }
  });

  const int64_t pair_bytes = 2 * w.blocks() * w.block_bytes();
  const int64_t task_pairs = std::max(CeilDiv(kTaskBytes, pair_bytes * std::min(rows, int64_t{4})),
                                      AllPairs(products, count) / (8 * NumThreads()));
  ForEachTask(team, products, count, task_pairs, tiles, CeilDiv(kReuseBytes, rows * w.D),
              [&](const Product& product, int64_t begin, int64_t end, int64_t tile0, int64_t tile1, int thread) JAXSERVE_AVX512 {
    const Weight* weights[2] = {&product.w, &product.up};
    TileKernel kernels[2];
    const Rounded* inputs[2];
    for (int side = 0; side < 2; ++side) {
      kernels[side] = KernelOf(*weights[side], rows);
      inputs[side] = &jobs[Find(*weights[side], forms)].to;
    }
    float* own = totals + thread * 2 * kTotals;
    // Tiles outside: what is rounded stays in L1 while panels pass.
    for (int64_t tile = tile0; tile < tile1; ++tile) {
      for (int64_t i = begin; i < end; ++i) {
        const Pair pair = PairOf(product, i);
        for (int side = 0; side < 2; ++side) {
          kernels[side](*pair.w[side], *inputs[side], tile, pair.panel[side], own + side * kTotals);
        }
        for (int64_t r = 0, row = tile * rows; r < rows && row < w.T; ++r, ++row) {
          const float* first = own + r * kPanel;
          FinishPair(product, pair, row, _mm512_load_ps(first), _mm512_load_ps(first + kTotals));
        }
      }
    }
  });
}

}  // namespace jaxserve::groups

#endif  // JAXSERVE_X86

// linear with group-quantised weights on AVX-512 (VNNI): rounding and the kernel. See cpu_groups.h.

#include <utility>
#include <vector>

#include "cpu_groups_short.h"

#if JAXSERVE_X86

namespace jaxserve::groups {
namespace {

constexpr int kMostSums = 12;             // of a tile: with as many totals they fill 24 registers
constexpr int64_t kTaskBytes = 32 << 10;  // of weights: below this a task is not worth handing out

// Rows of a tile, at most, whose activations have so many digits.
constexpr int MostRows(int digits) { return digits == 1 ? kMostSums : kMostSums / (digits - 1); }

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

// Activations as digits, for weights whose codes have this zero point and as many groups a block, in tiles of
// `rows` rows. Sums over a group's products come out as floats, without a conversion: they start at the bits of
// 1.5 * 2^23 units of their digit (and what makes the zero point cancel), count on in the mantissa, whose unit is
// the digit's, and in the end the same 1.5 * 2^23 units are taken off, exactly.
//
// Of a row's kFine digits the last is the one that only wide blocks have.
struct Digits {
  int zero, parts, count;  // count: digits of an activation, 1 or kFine
  int64_t rows, blocks;
  int8_t* values;   // [tile][block][rows][digits][32]
  float* base;      // [tile][block][rows][digits]: 1.5 * 2^23 units
  int32_t* start;   // [tile][block][part][rows][digits]
  // Of kFine digits only:
  float* sum;       // [tile][block][part][rows]: what a group's activations add up to, for offsets
  bool* wide;       // [tile][block]: whether any row's block is

  static size_t Size(int64_t tiles, int64_t rows, int64_t blocks, int parts, int count) {
    const size_t n = tiles * rows * blocks;
    return Align64(n * count * kBlock) + Align64(n * count * 4) + Align64(n * parts * count * 4) +
           Align64(n * parts * 4) + Align64(tiles * blocks) + kGap;
  }
  Digits(char* memory, int zero, int parts, int count, int64_t tiles, int64_t rows, int64_t blocks)
      : zero(zero), parts(parts), count(count), rows(rows), blocks(blocks) {
    const size_t n = tiles * rows * blocks;
    const auto take = [&](auto*& part, size_t bytes) {
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(memory);
      memory += Align64(bytes);
    };
    take(values, n * count * kBlock);
    take(base, n * count * 4);
    take(start, n * parts * count * 4);
    take(sum, n * parts * 4);
    take(wide, tiles * blocks);
  }
  int64_t At(int64_t tile, int64_t block) const { return (tile * blocks + block) * rows; }
};

struct RoundJob {
  const void* x;  // [T, D]
  bool bfloat16;  // or float32
  int64_t T, D;
  Digits to;
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

// Rounds block `block` of a tile to bytes; see RoundToBytes, whose bits these are. A lane is a row: rows[r]
// begins row r.
template <typename Number, bool kWhole>
JAXSERVE_AVX512 void RoundBlock(const Digits& to, const Number* const* rows, int64_t tile, int64_t block) {
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

// The same to kFine digits; see RoundFinely, whose bits these are.
template <bool kWhole>
JAXSERVE_AVX512 void RoundBlockFinely(const Digits& to, const float* const* rows, int64_t tile, int64_t block) {
  constexpr int kParts = kWhole ? 1 : 2, kMostRows = kLanes / kFine;
  const int64_t first = to.At(tile, block);
  const __m512i halves = _mm512_set1_epi32(static_cast<int>(0x80808080));
  const __m512i by_digit = _mm512_set4_epi32(0x0c080400, 0x0f0b0703, 0x0e0a0602, 0x0d090501);  // lowest last
  const __m512i lower = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(2));
  __m512i sums[kParts][kLanes / 2];  // of a row's bytes by fours: two digits, and the other two
  alignas(64) float bases[kLanes] = {}, steps[kMostRows] = {};
  bool wide = false;
  ForEach<kMostRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) {
    for (int part = 0; part < kParts; ++part) sums[part][2 * r] = sums[part][2 * r + 1] = _mm512_setzero_si512();
    if (r >= to.rows) return;
    const float* x = rows[r] + block * kBlock;
    const __m512 front = Read(x), back = Read(x + kLanes);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i sizes[2] = {_mm512_and_si512(_mm512_castps_si512(front), magnitude),
                              _mm512_and_si512(_mm512_castps_si512(back), magnitude)};
    const int32_t peak = _mm512_reduce_max_epi32(_mm512_max_epi32(sizes[0], sizes[1]));
    const __m512i large = _mm512_set1_epi32(peak - kFarBelow);
    const int many = __builtin_popcount(_mm512_cmpgt_epi32_mask(sizes[0], large)) +
                     __builtin_popcount(_mm512_cmpgt_epi32_mask(sizes[1], large));
    const FineSteps fine(peak, many);
    wide |= fine.wide;
    steps[r] = fine.step;
    _mm_store_ps(bases + kFine * r, _mm_mul_ps(_mm_set1_ps(12582912.0f * fine.step), _mm_loadu_ps(kDigitUnits)));
    const __m512 inverse = _mm512_set1_ps(fine.inverse);
    const auto digits_of = [&](__m512 x) JAXSERVE_AVX512 __attribute__((always_inline)) {
      const __m512i steps = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
      const __m512i whole = _mm512_sll_epi32(steps, _mm_cvtsi32_si128(fine.shift()));
      return _mm512_shuffle_epi8(_mm512_xor_si512(_mm512_add_epi32(whole, halves), halves), by_digit);
    };
    const __m512i of_front = digits_of(front), of_back = digits_of(back);
    int8_t* values = to.values + (first + r) * kFine * kBlock;
    for (int pair = 0; pair < 2; ++pair) {
      const __m512i two = _mm512_permutex2var_epi32(of_front, pair == 0 ? lower : upper, of_back);
      _mm512_storeu_si512(values + pair * 64, two);
      const __m512i fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), two);
      sums[0][2 * r + pair] = kWhole ? fours : _mm512_maskz_mov_epi32(0x0f0f, fours);
      if constexpr (!kWhole) sums[1][2 * r + pair] = _mm512_maskz_mov_epi32(0xf0f0, fours);
    }
  });
  to.wide[tile * to.blocks + block] = wide;
  const auto present = static_cast<__mmask16>((1u << to.rows * kFine) - 1);
  const __m512 base = _mm512_load_ps(bases), units = _mm512_broadcast_f32x4(_mm_loadu_ps(kDigitUnits));
  _mm512_mask_storeu_ps(to.base + first * kFine, present, base);
  for (int part = 0; part < kParts; ++part) {
    const __m512i sum = SumsOfHalves(sums[part]);
    const int64_t at = first * kParts + part * to.rows;
    const __m512i zeros = _mm512_mullo_epi32(sum, _mm512_set1_epi32(to.zero));
    _mm512_mask_storeu_epi32(to.start + at * kFine, present, _mm512_sub_epi32(_mm512_castps_si512(base), zeros));
    alignas(64) float parts[kLanes];
    _mm512_store_ps(parts, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), units));
    for (int64_t r = 0; r < to.rows; ++r) {
      const float* digit = parts + kFine * r;
      to.sum[at + r] = steps[r] * (digit[2] + (digit[1] + (digit[0] + digit[3])));
    }
  }
}

// Blocks [begin, end) of a tile. A last tile repeats its last row: what follows of it is not stored.
template <typename Number, bool kWhole>
void RoundBlocks(const RoundJob& job, int64_t tile, int64_t begin, int64_t end) {
  const Number* rows[kLanes];
  for (int64_t r = 0; r < kLanes; ++r) {
    rows[r] = static_cast<const Number*>(job.x) + std::min(tile * job.to.rows + r, job.T - 1) * job.D;
  }
  if constexpr (std::is_same_v<Number, float>) {  // bfloat16 is no more than a byte here
    if (job.to.count > 1) {
      for (int64_t block = begin; block < end; ++block) RoundBlockFinely<kWhole>(job.to, rows, tile, block);
      return;
    }
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

// Where sum i of kPlanes digits a row, from digit kFirst on, has its own among kCount digits a row.
template <int kCount, int kPlanes, int kFirst>
constexpr int PlaceOf(int i) {
  return i / kPlanes * kCount + i % kPlanes + kFirst;
}

// sums += four inputs' digits times a quad of codes of either panel. Written out, as GCC moves sums from register to
// register around its own intrinsic.
template <int kCount, int kPlanes, int kFirst, int kSums>
JAXSERVE_AVX512 JAXSERVE_INLINE void AddProducts(__m512i (&sums)[2][kSums], const int8_t* values,
                                                 const __m512i (&quad)[2]) {
  ForEach<kSums>([&](auto i) JAXSERVE_AVX512 __attribute__((always_inline)) {
    int32_t four;
    std::memcpy(&four, values + PlaceOf<kCount, kPlanes, kFirst>(i) * kBlock, sizeof(four));
    const __m512i value = _mm512_set1_epi32(four);
    asm("vpdpbusd %2, %1, %0" : "+v"(sums[0][i]) : "v"(quad[0]), "v"(value));
    asm("vpdpbusd %2, %1, %0" : "+v"(sums[1][i]) : "v"(quad[1]), "v"(value));
  });
}

struct Line {
  char bytes[64];
};

// Where a panel's next block lies.
struct Place {
  const uint8_t *codes, *scale, *offset, *zeros;

  Place(const Weight& w, int64_t panel)
      : codes(w.CodesOf(panel)),
        scale(w.OfPanel(w.scale, panel)),
        offset(w.OfPanel(w.offset, panel)),
        zeros(w.zeros == nullptr ? nullptr : w.zeros + panel * w.blocks() * kPanel) {}
};

// Adds up a part's products. Codes are read as unsigned: signed bytes as 128 more, codes of a group with its own
// zero point as eighths, 128 above that.
template <int kCount, int kPlanes, int kFirst, Codes kCodes, int kParts, int kSums>
JAXSERVE_AVX512 JAXSERVE_INLINE void AddPart(__m512i (&sums)[2][kSums], const int8_t* values, int part,
                                             const Place (&places)[2]) {
  const __m512i most = _mm512_set1_epi8(static_cast<char>(0x80));
  if constexpr (kCodes == Codes::kBytes) {
    constexpr int kQuads = 8 / kParts;
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
      __m512i quad[2];
      for (int side = 0; side < 2; ++side) {
        quad[side] = _mm512_xor_si512(_mm512_loadu_si512(places[side].codes + (part * kQuads + q) * 64), most);
      }
      AddProducts<kCount, kPlanes, kFirst>(sums, values + q * 4, quad);
    }
    return;
  }
  constexpr bool kEighths = kCodes == Codes::kEighths;
  const __m512i some = _mm512_set1_epi8(kEighths ? 0x78 : 15);
  __m512i above[2];
  if constexpr (kEighths) {
    const __m512i four_times = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    for (int side = 0; side < 2; ++side) {
      const auto* zeros = reinterpret_cast<const __m128i*>(places[side].zeros);
      const __m512i of_each = _mm512_cvtepu8_epi32(_mm_loadu_si128(zeros));
      above[side] = _mm512_sub_epi8(most, _mm512_shuffle_epi8(of_each, four_times));
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < 8; ++q) {
    __m512i quad[2];
    for (int side = 0; side < 2; ++side) {
      __m512i both;  // q and q + 4; asked for anew, as registers are short
      asm("vmovdqu64 %1, %0" : "=v"(both) : "m"(*reinterpret_cast<const Line*>(places[side].codes + q % 4 * 64)));
      if (q >= 4) both = _mm512_srli_epi16(both, kEighths ? 1 : 4);
      else if (kEighths) both = _mm512_slli_epi16(both, 3);
      quad[side] = _mm512_and_si512(both, some);
      if constexpr (kEighths) quad[side] = _mm512_add_epi8(quad[side], above[side]);
    }
    AddProducts<kCount, kPlanes, kFirst>(sums, values + q * 4, quad);
  }
}

// total += scale * the sum over a part of kPlanes digits, kFirst on, of each row's values, times the codes.
template <int kCount, int kPlanes, int kFirst, Codes kCodes, int kParts, int kRows>
JAXSERVE_AVX512 JAXSERVE_INLINE void AddDigits(__m512 (&total)[2][kRows], const __m512 (&scale)[2],
                                               const int8_t* values, int part, const Place (&places)[2],
                                               const int32_t* start, const float* base) {
  __m512i sums[2][kRows * kPlanes];
  ForEach<kRows * kPlanes>([&](auto i) JAXSERVE_AVX512 __attribute__((always_inline)) {
    sums[0][i] = sums[1][i] = _mm512_set1_epi32(start[PlaceOf<kCount, kPlanes, kFirst>(i)]);
  });
  AddPart<kCount, kPlanes, kFirst, kCodes, kParts>(sums, values, part, places);
  ForEach<kRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) {
    for (int side = 0; side < 2; ++side) {
      const auto digit = [&](auto plane) JAXSERVE_AVX512 __attribute__((always_inline)) {
        constexpr int i = r * kPlanes + plane;
        return _mm512_sub_ps(_mm512_castsi512_ps(sums[side][i]),
                             _mm512_set1_ps(base[PlaceOf<kCount, kPlanes, kFirst>(i)]));
      };
      __m512 sum = digit(std::integral_constant<int, 0>());
      if constexpr (kPlanes > 1) {
        sum = _mm512_add_ps(digit(std::integral_constant<int, 1>()), sum);
        sum = _mm512_add_ps(digit(std::integral_constant<int, 2>()), sum);
      }
      total[side][r] = _mm512_fmadd_ps(sum, scale[side], total[side][r]);
    }
  });
}

// A tile of kRows rows times two panels, of weights alike in form -> totals [2][kMostSums][kPanel].
//
// Two, because a digit that is spread over a register then serves two products: processors spread one a cycle
// where they multiply two.
template <int kRows, Codes kCodes, int kParts, int kCount>
JAXSERVE_AVX512 void MultiplyTile(const Pair& pair, const Digits& x, int64_t tile, float* totals) {
  constexpr int kAhead = 4096;  // bytes of codes
  constexpr int kLength = kBlock / kParts, kPlanes = kCount == 1 ? 1 : kCount - 1;
  constexpr bool kEighths = kCodes == Codes::kEighths;
  const int64_t block_bytes = pair.w[0]->block_bytes();
  Place places[2] = {Place(*pair.w[0], pair.panel[0]), Place(*pair.w[1], pair.panel[1])};
  __m512 total[2][kRows] = {};
  for (int64_t b = 0; b < x.blocks; ++b) {
    for (const Place& place : places) {
#pragma GCC unroll 8
      for (int i = 0; i < (kCodes == Codes::kBytes ? 8 : 4); ++i) Prefetch(place.codes + kAhead + i * 64);
      Prefetch(place.scale + kAhead / 8);
      if constexpr (kEighths) Prefetch(place.zeros + kAhead / 16);
    }
    const int64_t at = x.At(tile, b);
    const float* base = x.base + at * kCount;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const int64_t group = at * kParts + part * kRows;
      const int32_t* start = x.start + group * kCount;
      const int8_t* values = x.values + at * kCount * kBlock + part * kLength;
      __m512 scale[2];
      for (int side = 0; side < 2; ++side) {
        scale[side] = Floats(*pair.w[side], places[side].scale);
        places[side].scale += pair.w[side]->scale_bytes();
      }
      if constexpr (kCount > 1) {
        if (x.wide[tile * x.blocks + b]) {
          AddDigits<kCount, 1, kPlanes, kCodes, kParts>(total, scale, values, part, places, start, base);
        }
      }
      AddDigits<kCount, kPlanes, 0, kCodes, kParts>(total, scale, values, part, places, start, base);
      if constexpr (kCount > 1) {
        for (int side = 0; side < 2; ++side) {
          if (places[side].offset == nullptr) continue;
          const __m512 offset = Floats(*pair.w[side], places[side].offset);
          places[side].offset += pair.w[side]->scale_bytes();
          ForEach<kRows>([&](auto r) JAXSERVE_AVX512 __attribute__((always_inline)) {
            total[side][r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(x.sum[group + r]), total[side][r]);
          });
        }
      }
    }
    for (Place& place : places) {
      place.codes += block_bytes;
      if constexpr (kEighths) place.zeros += kPanel;
    }
  }
  ForEach<2 * kRows>([&](auto i) JAXSERVE_AVX512 __attribute__((always_inline)) {
    constexpr int side = i / kRows, r = i % kRows;
    const __m512 unit = _mm512_set1_ps(kEighths ? 0.125f : 1.0f);
    _mm512_store_ps(totals + (side * kMostSums + r) * kPanel, _mm512_mul_ps(total[side][r], unit));
  });
}

using TileKernel = void (*)(const Pair&, const Digits&, int64_t tile, float* totals);

template <int kRows, int kCount>
TileKernel KernelOf(const Weight& w) {
  if constexpr (kCount == 1) {
    if (w.zeros != nullptr) return MultiplyTile<kRows, Codes::kEighths, 1, kCount>;
  }
  if (w.bits == 4) return MultiplyTile<kRows, Codes::kHalves, 1, kCount>;
  return w.parts == 1 ? MultiplyTile<kRows, Codes::kBytes, 1, kCount> : MultiplyTile<kRows, Codes::kBytes, 2, kCount>;
}

template <int kCount, int kRows = MostRows(kCount)>
TileKernel KernelOf(const Weight& w, int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return KernelOf<kCount, kRows - 1>(w, rows);
  }
  return KernelOf<kRows, kCount>(w);
}

// ---- the call ----------------------------------------------------------------------------------

// Which of them were made ready for w.
size_t Find(const Weight& w, const std::vector<RoundJob>& jobs) {
  size_t i = 0;
  while (i < jobs.size() && (jobs[i].to.zero != w.zero_point() || jobs[i].to.parts != w.parts)) ++i;
  return i;
}

}  // namespace

void MultiplyDigits(const Product* products, int64_t count, const void* x, bool bfloat16, int digits) {
  const int64_t T = products[0].w.T, D = products[0].w.D, blocks = products[0].w.blocks();
  const int64_t tiles = CeilDiv(T, MostRows(digits)), rows = CeilDiv(T, tiles);
  std::vector<RoundJob> jobs;
  size_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    for (const Weight* w : {&products[i].w, &products[i].up}) {
      if (Find(*w, jobs) < jobs.size()) continue;
      jobs.push_back({x, bfloat16, T, D, Digits(nullptr, w->zero_point(), w->parts, digits, tiles, rows, blocks)});
      bytes += Digits::Size(tiles, rows, blocks, w->parts, digits);
    }
  }
  constexpr int64_t kSide = kMostSums * kPanel, kTotals = 4 * kSide;  // of a panel, of a thread
  Team team;
  char* memory = team.Scratch<char>(bytes + NumThreads() * kTotals * sizeof(float));
  float* totals = reinterpret_cast<float*>(memory + bytes);
  for (RoundJob& job : jobs) {
    job.to = Digits(memory, job.to.zero, job.to.parts, digits, tiles, rows, blocks);
    memory += Digits::Size(tiles, rows, blocks, job.to.parts, digits);
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
    const Digits* inputs[2];
    for (int side = 0; side < 2; ++side) {
      kernels[side] = digits == 1 ? KernelOf<1>(*weights[side], rows) : KernelOf<kFine>(*weights[side], rows);
      inputs[side] = &jobs[Find(*weights[side], jobs)].to;
    }
    const bool alike = kernels[0] == kernels[1] && inputs[0] == inputs[1];
    float* own = totals + thread * kTotals;
    // Tiles outside: what is rounded stays in L1 while panels pass.
    for (int64_t tile = tile0; tile < tile1; ++tile) {
      for (int64_t i = begin; i < end; ++i) {
        const Pair pair = PairOf(product, i);
        float* second = own + kSide;
        if (alike) {
          kernels[0](pair, *inputs[0], tile, own);
        } else {  // a gated unit's weights of two forms, which is rare: each twice
          second = own + 2 * kSide;
          for (int side = 0; side < 2; ++side) {
            const Pair twice{{pair.w[side], pair.w[side]}, {pair.panel[side], pair.panel[side]}};
            kernels[side](twice, *inputs[side], tile, side == 0 ? own : second);
          }
        }
        for (int64_t r = 0, row = tile * rows; r < rows && row < T; ++r, ++row) {
          FinishPair(product, pair, row, _mm512_load_ps(own + r * kPanel), _mm512_load_ps(second + r * kPanel));
        }
      }
    }
  };
  ForEachTask(team, products, count, task_pairs, tiles, CeilDiv(kReuseBytes, rows * D * digits), run);
}

}  // namespace jaxserve::groups

#endif  // JAXSERVE_X86

// linear with group-quantised weights: the AVX-512 (VNNI) kernel. See cpu_groups.h.

#include "cpu_groups.h"

#if JAXSERVE_X86

namespace jaxserve::groups {
namespace {

JAXSERVE_AVX512 inline __m512 Floats(const Weight& w, const uint8_t* at) {
  if (w.half) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  return _mm512_loadu_ps(at);
}

// The int32 at `at` in all lanes: four bytes of x for every feature.
JAXSERVE_AVX512 inline __m512i Broadcast(const int8_t* at) {
  int32_t four;
  std::memcpy(&four, at, sizeof(four));
  return _mm512_set1_epi32(four);
}

// A block's eight quads of codes, unsigned: signed ones plus 128.
template <int kBits>
JAXSERVE_AVX512 inline void UnsignedCodes(const uint8_t* at, __m512i* quads) {
  if constexpr (kBits == 8) {
    __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) quads[i] = _mm512_xor_si512(_mm512_loadu_si512(at + i * 64), flip);
  } else {
    __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512i both = _mm512_loadu_si512(at + i * 64);
      quads[i] = _mm512_and_si512(both, nibble);
      quads[i + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
  }
}

// 65536 * float(H) + float(L) of the four sums of products of bytes.
JAXSERVE_AVX512 inline __m512 Joined(const __m512i* sums) {
  __m512 high = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[1]));
  __m512 low = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sums[2], 8), sums[3]));
  return _mm512_fmadd_ps(high, _mm512_set1_ps(65536.0f), low);
}

// kRows rows of a tile, from row r0, times one panel.
template <int kRows, int kBits, int kParts, bool kOffset>
JAXSERVE_AVX512 inline void VnniRows(const Weight& w, const Rounded& x, void* y, int64_t tile,
                                     int64_t r0, int64_t panel) {
  constexpr int kQuads = 8 / kParts;
  const uint8_t* codes = w.CodesOf(panel);
  const uint8_t* scale = w.OfPanel(w.scale, panel);
  const uint8_t* offset = w.OfPanel(w.offset, panel);
  const int64_t plane = x.plane_bytes();
  __m512 total[kRows];
  for (auto& t : total) t = _mm512_setzero_ps();
  for (int64_t b = 0; b < x.blocks; ++b, codes += kBits * 64) {
    _mm_prefetch(reinterpret_cast<const char*>(codes + 4096), _MM_HINT_T0);
    __m512i quads[8];
    UnsignedCodes<kBits>(codes, quads);
    int64_t at = x.At(tile, b);
    const int8_t* bytes = x.Planes(tile, b) + r0 * kBlock;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      __m512 ws = Floats(w, scale);
      scale += w.scale_bytes();
      const int32_t* start = x.start + 2 * (at * kParts + part * x.rows) + r0;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        __m512i sums[kFine] = {};
        sums[1] = _mm512_set1_epi32(start[r]);
        sums[3] = _mm512_set1_epi32(start[x.rows + r]);
        const int8_t* row = bytes + r * kBlock;
#pragma GCC unroll 8
        for (int q = part * kQuads; q < (part + 1) * kQuads; ++q) {
#pragma GCC unroll 4
          for (int i = 0; i < kFine; ++i) {
            sums[i] = _mm512_dpbusd_epi32(sums[i], quads[q], Broadcast(row + i * plane + q * 4));
          }
        }
        const __m512 sum = _mm512_mul_ps(Joined(sums), _mm512_set1_ps(x.step[at + r0 + r]));
        total[r] = _mm512_fmadd_ps(sum, ws, total[r]);
      }
      if constexpr (kOffset) {
        __m512 wo = Floats(w, offset);
        offset += w.scale_bytes();
        const float* sum = x.sum + at * kParts + part * x.rows + r0;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          total[r] = _mm512_fmadd_ps(wo, _mm512_set1_ps(sum[r]), total[r]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    StoreRow(w, y, tile * x.rows + r0 + r, panel, reinterpret_cast<Lanes>(total[r]));
  }
}

template <int kBits, int kParts, bool kOffset>
JAXSERVE_AVX512 void VnniRegion(const Weight& w, const Rounded& x, void* y, const Region& region) {
  constexpr int kMost = 4;  // rows that share unpacked codes
  for (int64_t panel = region.panel0; panel < region.panel1; ++panel) {
    for (int64_t tile = region.tile0; tile < region.tile1; ++tile) {
      int64_t r = 0;
      for (; r + kMost <= x.rows; r += kMost) VnniRows<kMost, kBits, kParts, kOffset>(w, x, y, tile, r, panel);
      for (; r < x.rows; ++r) VnniRows<1, kBits, kParts, kOffset>(w, x, y, tile, r, panel);
    }
  }
}

Kernel RegionOf(const Weight& w) {
  if (w.bits == 4) return w.offset ? VnniRegion<4, 1, true> : VnniRegion<4, 1, false>;  // in groups of 32 only
  if (w.parts == 1) return w.offset ? VnniRegion<8, 1, true> : VnniRegion<8, 1, false>;
  return w.offset ? VnniRegion<8, 2, true> : VnniRegion<8, 2, false>;
}

}  // namespace

void Avx512(const Weight& w, const Rounded& x, void* y, const Region& region) { RegionOf(w)(w, x, y, region); }

}  // namespace jaxserve::groups

#endif  // JAXSERVE_X86

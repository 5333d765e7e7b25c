// linear with group-quantised weights: the AVX-512 (VNNI) and AMX kernels. See cpu_groups.h.

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

// total + float(256 * high + low) * x_scale * scale: the line all kernels share.
JAXSERVE_AVX512 inline __m512 Accumulate(__m512 total, __m512i high, __m512i low, float x_scale,
                                         __m512 scale) {
  __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
  __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(x_scale));
  return _mm512_fmadd_ps(scaled, scale, total);
}

// ---- AVX-512 -----------------------------------------------------------------------------------

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

// kRows rows of a tile, from row r0, times one panel.
template <int kRows, int kBits, int kParts, bool kOffset>
JAXSERVE_AVX512 inline void VnniRows(const Weight& w, const Rounded& x, const Output& y, int64_t tile,
                                     int64_t r0, int64_t panel) {
  constexpr int kQuads = 8 / kParts;
  const uint8_t* codes = w.CodesOf(panel);
  const uint8_t* scale = w.OfPanel(w.scale, panel);
  const uint8_t* offset = w.OfPanel(w.offset, panel);
  __m512 total[kRows];
  for (auto& t : total) t = _mm512_setzero_ps();
  for (int64_t b = 0; b < x.blocks; ++b, codes += kBits * 64) {
    _mm_prefetch(reinterpret_cast<const char*>(codes + 4096), _MM_HINT_T0);
    __m512i quads[8];
    UnsignedCodes<kBits>(codes, quads);
    int64_t at = x.At(tile, b);
    const int8_t* high_bytes = x.values + at * 64 + r0 * kBlock;
    const int8_t* low_bytes = high_bytes + x.rows * kBlock;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      __m512 ws = Floats(w, scale);
      scale += w.scale_bytes();
      const int32_t* start = x.start + at * kParts + part * x.rows + r0;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        // Start low so that the codes' zero point cancels.
        __m512i high = _mm512_setzero_si512(), low = _mm512_set1_epi32(start[r]);
#pragma GCC unroll 8
        for (int q = part * kQuads; q < (part + 1) * kQuads; ++q) {
          high = _mm512_dpbusd_epi32(high, quads[q], Broadcast(high_bytes + r * kBlock + q * 4));
          low = _mm512_dpbusd_epi32(low, quads[q], Broadcast(low_bytes + r * kBlock + q * 4));
        }
        total[r] = Accumulate(total[r], high, low, x.scale[at + r0 + r], ws);
      }
      if constexpr (kOffset) {
        __m512 wo = Floats(w, offset);
        offset += w.scale_bytes();
        const float* sum = x.sum + at * kParts + part * x.rows + r0;
#pragma GCC unroll 4
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
JAXSERVE_AVX512 void VnniRegion(const Weight& w, const Rounded& x, const Output& y, const Region& region) {
  for (int64_t panel = region.panel0; panel < region.panel1; ++panel) {
    for (int64_t tile = region.tile0; tile < region.tile1; ++tile) {
      int64_t r = 0;
      for (; r + 4 <= x.rows; r += 4) {
        VnniRows<4, kBits, kParts, kOffset>(w, x, y, tile, r, panel);
      }
      for (; r < x.rows; ++r) VnniRows<1, kBits, kParts, kOffset>(w, x, y, tile, r, panel);
    }
  }
}

// ---- AMX ---------------------------------------------------------------------------------------
//
// Tiles 0 and 1 (for odd groups 2 and 3) sum the high and low bytes of up to 16 rows times 16
// features; 4 and 5 hold the rows' bytes, 6 (7) the codes. While the tile unit works on a group, the
// vector units scale and add up the one before it.

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

JAXSERVE_AMX inline void ConfigureTiles(int rows, int parts) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    bool sums = i < 4, codes = i > 5;
    config.rows[i] = static_cast<uint8_t>(codes ? 8 / parts : rows);
    config.row_bytes[i] = static_cast<uint16_t>(sums || codes ? 64 : kBlock / parts);
  }
  _tile_loadconfig(&config);
}

template <int kOdd>
JAXSERVE_AMX inline void Multiply(const int8_t* high, const int8_t* low, const int8_t* codes) {
  if constexpr (kOdd) {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(7, codes, 64);
    _tile_loadd(4, high, kBlock);
    _tile_loadd(5, low, kBlock);
    _tile_dpbssd(2, 4, 7);
    _tile_dpbssd(3, 5, 7);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(6, codes, 64);
    _tile_loadd(4, high, kBlock);
    _tile_loadd(5, low, kBlock);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 5, 6);
  }
}

template <int kOdd>
JAXSERVE_AMX inline void Store(int32_t* high, int32_t* low) {
  if constexpr (kOdd) {
    _tile_stored(2, high, 64);
    _tile_stored(3, low, 64);
  } else {
    _tile_stored(0, high, 64);
    _tile_stored(1, low, 64);
  }
}

template <int kRows, int kParts, bool kOffset>
struct AmxTile {
  const Weight& w;
  const Rounded& x;
  const int8_t* codes;  // the panel's, signed
  const uint8_t* scale;
  const uint8_t* offset;
  int64_t tile;
  __m512 total[kRows];
  alignas(64) int32_t high[kRows * kPanel], low[kRows * kPanel];

  template <int kOdd>
  JAXSERVE_AMX inline void Start(int64_t g) {
    int64_t block = g / kParts, part = g % kParts;
    const int8_t* bytes = x.values + x.At(tile, block) * 64 + part * (kBlock / kParts);
    Multiply<kOdd>(bytes, bytes + kRows * kBlock, codes + g * (kBlock / kParts) * kPanel);
  }

  template <int kOdd>
  JAXSERVE_AMX inline void Finish(int64_t g) {
    Store<kOdd>(high, low);
    int64_t block = g / kParts, part = g % kParts;
    int64_t at = x.At(tile, block);
    const float* x_scale = x.scale + at;
    __m512 ws = Floats(w, scale + g * w.scale_bytes());
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      total[r] = Accumulate(total[r], _mm512_load_si512(high + r * kPanel),
                            _mm512_load_si512(low + r * kPanel), x_scale[r], ws);
    }
    if constexpr (kOffset) {
      __m512 wo = Floats(w, offset + g * w.scale_bytes());
      const float* sum = x.sum + at * kParts + part * kRows;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        total[r] = _mm512_fmadd_ps(wo, _mm512_set1_ps(sum[r]), total[r]);
      }
    }
  }

  JAXSERVE_AMX inline void Run() {
    for (auto& t : total) t = _mm512_setzero_ps();
    int64_t groups = x.blocks * kParts;
    Start<0>(0);
    int64_t g = 0;
    for (; g + 2 < groups; g += 2) {
      Start<1>(g + 1);
      Finish<0>(g);
      Start<0>(g + 2);
      Finish<1>(g + 1);
    }
    if (g + 1 < groups) {
      Start<1>(g + 1);
      Finish<0>(g);
      Finish<1>(g + 1);
    } else {
      Finish<0>(g);
    }
  }
};

// A panel's 4-bit codes as signed bytes less their zero point.
JAXSERVE_AVX512 inline void Expand(const Weight& w, const uint8_t* codes, int8_t* to) {
  __m512i zero = _mm512_set1_epi8(static_cast<char>(w.zero));
  for (int64_t b = 0; b < w.blocks(); ++b, codes += 256, to += 512) {
    __m512i quads[8];
    UnsignedCodes<4>(codes, quads);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      _mm512_storeu_si512(to + i * 64, _mm512_sub_epi8(quads[i], zero));
    }
  }
}

template <int kRows, int kParts, bool kOffset>
JAXSERVE_AMX void AmxRegion(const Weight& w, const Rounded& x, const Output& y, const Region& region,
                            int8_t* scratch) {
  ConfigureTiles(kRows, kParts);
  for (int64_t panel = region.panel0; panel < region.panel1; ++panel) {
    auto codes = reinterpret_cast<const int8_t*>(w.CodesOf(panel));
    if (w.bits == 4) {
      Expand(w, w.CodesOf(panel), scratch);
      codes = scratch;
    }
    for (int64_t tile = region.tile0; tile < region.tile1; ++tile) {
      AmxTile<kRows, kParts, kOffset> run{
          w, x, codes, w.OfPanel(w.scale, panel), w.OfPanel(w.offset, panel), tile, {}, {}, {}};
      run.Run();
      for (int r = 0; r < kRows; ++r) {
        StoreRow(w, y, tile * kRows + r, panel, reinterpret_cast<Lanes>(run.total[r]));
      }
    }
  }
  _tile_release();
}

template <int kRows>
void AmxOf(const Weight& w, const Rounded& x, const Output& y, const Region& region, int8_t* scratch) {
  auto run = w.parts == 1
                 ? (w.offset ? AmxRegion<kRows, 1, true> : AmxRegion<kRows, 1, false>)
                 : (w.offset ? AmxRegion<kRows, 2, true> : AmxRegion<kRows, 2, false>);
  run(w, x, y, region, scratch);
}

}  // namespace

void Avx512(const Weight& w, const Rounded& x, const Output& y, const Region& region, int8_t*) {
  if (w.bits == 8) {
    auto run = w.parts == 1 ? (w.offset ? VnniRegion<8, 1, true> : VnniRegion<8, 1, false>)
                            : (w.offset ? VnniRegion<8, 2, true> : VnniRegion<8, 2, false>);
    run(w, x, y, region);
  } else {  // 4-bit codes come in groups of 32 only
    auto run = w.offset ? VnniRegion<4, 1, true> : VnniRegion<4, 1, false>;
    run(w, x, y, region);
  }
}

void Amx(const Weight& w, const Rounded& x, const Output& y, const Region& region, int8_t* scratch) {
  static_assert(kMaxRows == 16);
  auto run = x.rows == 4 ? AmxOf<4> : x.rows == 8 ? AmxOf<8> : x.rows == 12 ? AmxOf<12> : AmxOf<16>;
  run(w, x, y, region, scratch);
}

}  // namespace jaxserve::groups

#endif  // JAXSERVE_X86

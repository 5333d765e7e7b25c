// AMX's tile unit, as the native CPU operations use it: eight tiles of up to 16 rows of 64 bytes.

#pragma once

#include "native.h"

#if JAXSERVE_X86

namespace jaxserve {

constexpr int kTileBytes = 1024;  // of a full tile

// Tiles [right, end) hold right operands, 16 rows; the others `rows`: left operands and sums.
JAXSERVE_AMX inline void ConfigureTiles(int64_t rows, int right, int end) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = static_cast<uint8_t>(i >= right && i < end ? 16 : rows);
    config.row_bytes[i] = 64;
  }
  asm volatile("" : : "r"(&config) : "memory");  // the intrinsic claims to read eight bytes of it
  _tile_loadconfig(&config);
}

// 2^x to a ten thousandth of it, exactly 1 at 0, and 0 far below: enough for numbers of 8 bits. The
// polynomial is the best one for 2^x on [0, 1] that is right at both ends.
JAXSERVE_AMX inline __m512 Exp2(__m512 x, __mmask16 some) {
  constexpr int kDown = 1;
  __m512 r = _mm512_reduce_ps(x, kDown);  // x - floor(x)
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.07826794f), r, _mm512_set1_ps(0.22630766f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69542440f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(some, p, x);  // times 2^floor(x)
}

}  // namespace jaxserve

#endif  // JAXSERVE_X86

// Arithmetic for numbers of 8 bits on vector units, where bfloat16 is at hand.

#pragma once

#include "native.h"

#if JAXSERVE_X86

namespace jaxserve {

// 2^x to a ten thousandth of it, exactly 1 at 0, and 0 far below: enough for numbers of 8 bits. The
// polynomial is the best one for 2^x on [0, 1] that is right at both ends.
JAXSERVE_AVX512 inline __m512 Exp2(__m512 x, __mmask16 some) {
  constexpr int kDown = 1;
  __m512 r = _mm512_reduce_ps(x, kDown);  // x - floor(x)
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.07826794f), r, _mm512_set1_ps(0.22630766f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69542440f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(some, p, x);  // times 2^floor(x)
}

}  // namespace jaxserve

#endif  // JAXSERVE_X86

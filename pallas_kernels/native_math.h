// Arithmetic on lanes that the native CPU operations share; see native.h for what a lane is.

#pragma once

#include <cstring>

#include "native.h"

namespace jaxserve {

JAXSERVE_INLINE Lanes LoadLanes(const float* at) {
  Lanes v;
  std::memcpy(&v, at, sizeof(v));
  return v;
}
JAXSERVE_INLINE void StoreLanes(float* at, const Lanes& v) { std::memcpy(at, &v, sizeof(v)); }

struct BFloat16 {
  uint16_t bits;
};

// 16 stored numbers as floats, and back.
JAXSERVE_INLINE Lanes Widen(const float* at) { return LoadLanes(at); }
JAXSERVE_INLINE Lanes Widen(const BFloat16* at) {
  HalfBits half;
  std::memcpy(&half, at, sizeof(half));
  return reinterpret_cast<Lanes>(__builtin_convertvector(half, Bits) << 16);
}
JAXSERVE_INLINE IntLanes NotANumber(const Lanes& x) {
  return (0x7f800000 - (reinterpret_cast<IntLanes>(x) & 0x7fffffff)) >> 31;
}
JAXSERVE_INLINE void Narrow(const Lanes& v, float* to) { StoreLanes(to, v); }
// Rounds to the nearest, of two as near to the even one; a NaN stays one.
JAXSERVE_INLINE void Narrow(const Lanes& v, BFloat16* to) {
  Bits bits = reinterpret_cast<Bits>(v);
  IntLanes nan = NotANumber(v);
  Bits rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  Bits chosen = (quiet & reinterpret_cast<Bits>(nan)) | (rounded & ~reinterpret_cast<Bits>(nan));
  auto half = __builtin_convertvector(chosen, HalfBits);
  std::memcpy(to, &half, sizeof(half));
}

// The first `n` of 16 numbers, the rest of the lanes zero, and back.
template <typename Number>
JAXSERVE_INLINE Lanes LoadSome(const Number* at, int64_t n) {
  if (n >= 16) return Widen(at);
  Number part[16] = {};
  std::memcpy(part, at, n * sizeof(Number));
  return Widen(part);
}
template <typename Number>
JAXSERVE_INLINE void StoreSome(Number* at, const Lanes& v, int64_t n) {
  if (n >= 16) return Narrow(v, at);
  Number part[16];
  Narrow(v, part);
  std::memcpy(at, part, n * sizeof(Number));
}

JAXSERVE_INLINE Lanes Fill(float value) { return Lanes{} + value; }

// Comparisons of vectors wider than the build's baseline compile to one branch a lane, so choices are
// made with signs and masks instead.
JAXSERVE_INLINE IntLanes Negative(const Lanes& x) { return reinterpret_cast<IntLanes>(x) >> 31; }
JAXSERVE_INLINE Lanes Select(const IntLanes& mask, const Lanes& yes, const Lanes& no) {
  return reinterpret_cast<Lanes>((reinterpret_cast<IntLanes>(yes) & mask) |
                                 (reinterpret_cast<IntLanes>(no) & ~mask));
}
JAXSERVE_INLINE Lanes Max(const Lanes& a, const Lanes& b) { return Select(Negative(a - b), b, a); }
JAXSERVE_INLINE Lanes Min(const Lanes& a, const Lanes& b) { return Select(Negative(a - b), a, b); }

JAXSERVE_INLINE Lanes Magnitude(const Lanes& x) {
  return reinterpret_cast<Lanes>(reinterpret_cast<Bits>(x) & 0x7fffffff);
}
// To the nearest integer, of two as near to the even one, for magnitudes below 2^22.
JAXSERVE_INLINE Lanes Round(const Lanes& x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: floats that large are integers
  return (x + kShift) - kShift;
}

// The lanes with the upper and lower `h` of every 2 h exchanged.
template <int h>
JAXSERVE_INLINE Lanes Exchange(const Lanes& v) {
  return __builtin_shufflevector(v, v, 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, 6 ^ h, 7 ^ h, 8 ^ h,
                                 9 ^ h, 10 ^ h, 11 ^ h, 12 ^ h, 13 ^ h, 14 ^ h, 15 ^ h);
}

JAXSERVE_INLINE float MaxOf(Lanes v) {
  v = Max(v, Exchange<8>(v));
  v = Max(v, Exchange<4>(v));
  v = Max(v, Exchange<2>(v));
  return Max(v, Exchange<1>(v))[0];
}

JAXSERVE_INLINE float SumOf(Lanes v) {
  v += Exchange<8>(v);
  v += Exchange<4>(v);
  v += Exchange<2>(v);
  return (v + Exchange<1>(v))[0];
}

// e^x = power * (1 + rest), for x in [-87, 88]: x = n ln 2 + r with |r| <= ln(2) / 2, power = 2^n and
// rest = e^r - 1 by its Taylor series to r^7, good to 5e-9 and exactly 0 at 0.
struct Power {
  Lanes power, rest;
};
JAXSERVE_INLINE Power PowerOf(const Lanes& x) {
  Lanes n = Round(x * 1.44269504f);
  Lanes r = x - n * 0.693359375f;  // ln 2 in two parts, the first exact in few bits
  r = r - n * -2.12194440e-4f;
  Lanes series = Fill(1.0f / 5040);
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  IntLanes exponent = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  return {reinterpret_cast<Lanes>(exponent), series * r};
}

// e^x for x up to 88: exactly 1 at 0, and 0 below -87.
JAXSERVE_INLINE Lanes Exp(const Lanes& x) {
  IntLanes tiny = Negative(x + 87.0f);
  Power e = PowerOf(Select(tiny, Fill(-87.0f), x));
  return Select(tiny, Fill(0.0f), e.power * (e.rest + 1.0f));
}

}  // namespace jaxserve

// Numbers as the cache stores them: floats, or codes with a scale per vector.

#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "../native_math.h"

namespace jaxserve::attention {

constexpr int kLanes = 16;

struct Float8 {  // e4m3fn
  uint8_t bits;
};

// Whether K and V are stored as codes with a scale per vector, and the largest code.
template <typename KV>
constexpr bool kCodes = false;
template <>
inline constexpr bool kCodes<int8_t> = true;
template <>
inline constexpr bool kCodes<int16_t> = true;
template <>
inline constexpr bool kCodes<Float8> = true;
template <typename KV>
constexpr float kLargestCode = 0;
template <>
inline constexpr float kLargestCode<int8_t> = 127;
template <>
inline constexpr float kLargestCode<int16_t> = 32767;
template <>
inline constexpr float kLargestCode<Float8> = 448;

// ---- stored numbers as floats ------------------------------------------------------------------

inline float ToFloat(Float8 x) {
  uint32_t exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
  float magnitude = exponent == 0 ? mantissa * 0x1p-9f
                                  : std::ldexp(1.0f + mantissa / 8.0f, int(exponent) - 7);
  if ((x.bits & 127) == 127) magnitude = std::nanf("");
  return x.bits & 128 ? -magnitude : magnitude;
}

struct Float8Table {
  float value[256];
  Float8Table() {
    for (int i = 0; i < 256; ++i) value[i] = ToFloat(Float8{static_cast<uint8_t>(i)});
  }
};
inline const Float8Table kFloat8;

// 16 stored numbers as floats, before any scale.
using jaxserve::Widen;
JAXSERVE_INLINE Lanes Widen(const int16_t* at) {
  int16_t code __attribute__((vector_size(32)));
  std::memcpy(&code, at, sizeof(code));
  return __builtin_convertvector(__builtin_convertvector(code, IntLanes), Lanes);
}
JAXSERVE_INLINE Lanes Widen(const int8_t* at) {
  int8_t byte __attribute__((vector_size(16)));
  std::memcpy(&byte, at, sizeof(byte));
  int16_t code __attribute__((vector_size(32)));
  code = __builtin_convertvector(byte, decltype(code));  // GCC 12 widens to four bytes one by one
  return __builtin_convertvector(__builtin_convertvector(code, IntLanes), Lanes);
}
JAXSERVE_INLINE Lanes Widen(const Float8* at) {
  Lanes v;
  for (int i = 0; i < kLanes; ++i) v[i] = kFloat8.value[at[i].bits];
  return v;
}

// Elements [e, e + 16) of a stored vector of E, zeros past its end.
template <typename KV>
JAXSERVE_INLINE Lanes LoadVector(const KV* at, int64_t e, int64_t E) {
  if (e + kLanes <= E) return Widen(at + e);
  KV part[kLanes] = {};
  std::memcpy(part, at + e, (E - e) * sizeof(KV));
  return Widen(part);
}

// ---- and back ----------------------------------------------------------------------------------

using jaxserve::Narrow;
// Codes from floats that are within the largest code, rounded to the nearest, of two as near to the even one.
JAXSERVE_INLINE void Narrow(const Lanes& v, int16_t* to) {
  auto code = __builtin_convertvector(Round(v), IntLanes);
  int16_t half __attribute__((vector_size(32)));
  half = __builtin_convertvector(code, decltype(half));
  std::memcpy(to, &half, sizeof(half));
}
JAXSERVE_INLINE void Narrow(const Lanes& v, int8_t* to) {
  auto code = __builtin_convertvector(Round(v), IntLanes);
  int8_t byte __attribute__((vector_size(16)));
  byte = __builtin_convertvector(code, decltype(byte));
  std::memcpy(to, &byte, sizeof(byte));
}
// A code below the smallest normal number becomes that or zero: see kv.quantise.
JAXSERVE_INLINE void Narrow(const Lanes& v, Float8* to) {
  constexpr float kLeast = 0x1p-6f;
  Bits magnitude = reinterpret_cast<Bits>(v) & 0x7fffffff;
  Lanes size = reinterpret_cast<Lanes>(magnitude);
  magnitude = reinterpret_cast<Bits>(Select(Negative(size - kLeast), Round(size / kLeast) * kLeast, size));
  Bits rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;  // three bits behind the leading one
  IntLanes code = reinterpret_cast<IntLanes>(rounded) - (120 << 3);    // bias 7 in place of 127
  code &= ~(code >> 31);                                               // zero has the lowest exponent
  code |= reinterpret_cast<IntLanes>(reinterpret_cast<Bits>(v) >> 24 & 0x80);
  uint8_t byte __attribute__((vector_size(16)));
  byte = __builtin_convertvector(code, decltype(byte));
  std::memcpy(to, &byte, sizeof(byte));
}

}  // namespace jaxserve::attention

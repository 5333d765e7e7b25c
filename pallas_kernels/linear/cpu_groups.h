// linear with group-quantised weights: what its kernels share.
//
// Weights are 4- or 8-bit codes in groups of 32 (or 16) inputs, value = (code - zero) * scale + offset.
// There are four ways through:
//
// - Bytes (cpu_groups.cc; on AVX-512 cpu_groups_avx512.cc). Reads each code once and is the fastest for a row or
//   two, where memory is the limit. The activations are rounded to integers, in steps of a power of two that suits
//   a row's block of 32 inputs: 127 * 2^16 steps at most, which is as fine as float32 is for the largest of them.
//   Where most of a block's inputs are far below its largest (a wide block), one in 256 of those steps, so that a
//   huge input does not drown its neighbours. Such an integer is a number of three signed digits of a byte, or
//   of four, because products of bytes are what processors multiply fast. With A, B, C and D the sums over a
//   group of (code - zero) times each digit, the highest first, an output is
//
//     sum over groups, in order:  step / 256 * float(D) * scale, of tiles with a wide row
//                                 + step * (65536 * float(A) + (256 * float(B) + float(C))) * scale
//                                 + step * (the same of the digits' own sums and, innermost, D / 256) * offset
//
//   in float32 multiply-adds. Integers are exact in any order and a power of two rounds nothing, so
//   only the order of the groups counts: it is the same in every tile and instruction set, hence so
//   are the bits (the plain path, without fused multiply-add, differs from the others in the last ones).
//
// - One byte, where int8 inputs are asked for: an activation is a byte, in steps of a power of two that suits its
//   block, and the sum over a group is that of one product of bytes. Such weights have no offsets: their groups
//   have zero points in eighths of a code.
//
// - Tiles (cpu_groups_amx.cc), where the processor has AMX and there are three rows or more. Weights
//   and activations become sums of two bfloat16 each, 16 bits of every value, which the tile unit
//   multiplies ten times faster than the vector units multiply bytes. Activations that come as bfloat16
//   take this way whatever their number, by weights of one bfloat16 each.
//
// - Pairs (cpu_groups_bfloat16.cc), for activations that come as bfloat16 where there is no AMX but vector
//   units multiply pairs of bfloat16: twice as fast as float32, and codes are exact.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../native_math.h"

namespace jaxserve::groups {

constexpr int kPanel = 16;   // output features side by side
constexpr int kBlock = 32;   // inputs that share an activation scale
constexpr int kFine = 4;       // digits of an activation that is not a byte; the last is for wide blocks

// One layer's weight, and what joins its product. codes: [F / 16][D / 4][16][4] int8, or
// [F / 16][D / 8][16][4] uint8 holding two codes a byte: of a block's eight quads of inputs, bytes of
// quad i < 4 hold quad i low, i + 4 high. scale, offset, zeros: [F / 16][D / group][16].
struct Weight {
  const uint8_t* codes;
  const uint8_t* scale;
  const uint8_t* offset;  // or null
  const uint8_t* zeros;   // or null: of 4-bit codes, each group's own zero point, in eighths
  int64_t T, D, F;
  int bits;        // 4 or 8
  int zero;        // of the 4-bit codes
  int parts;       // groups a block: 1 or 2
  bool half;       // scale and offset are float16, else float32
  const void* plus;  // [T, F] as y, which is added to y, or null
  bool bfloat16;     // its product alone and plus are that, else float32

  // The zero of codes as AVX-512 multiplies them, unsigned: of signed bytes 128, and so of eighths of a code.
  int zero_point() const { return bits == 8 || zeros != nullptr ? 128 : zero; }
  int64_t blocks() const { return D / kBlock; }
  int64_t block_bytes() const { return kBlock * kPanel * bits / 8; }
  int64_t scale_bytes() const { return kPanel * (half ? 2 : 4); }
  const uint8_t* CodesOf(int64_t panel) const { return codes + panel * blocks() * block_bytes(); }
  // The scales (or offsets) of a panel's first group.
  const uint8_t* OfPanel(const uint8_t* base, int64_t panel) const {
    return base == nullptr ? nullptr : base + panel * blocks() * parts * scale_bytes();
  }
};

JAXSERVE_INLINE float FromBits(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

JAXSERVE_INLINE float PowerOfTwo(int biased_exponent) { return FromBits(biased_exponent << 23); }

// Blocks below 2^-80 are rounded to zero; those of 2^110 and more, infinite or NaN make their row's outputs NaN
// (beyond those bounds the products would leave float32's range).
constexpr int kLeastExponent = 47, kMostExponent = 236;  // biased, of a block's largest value

// A byte's step, by the bits of its block's largest magnitude: the least power of two of which that is no more
// than 127. Added to those bits, kRoundUp makes the exponent one more where the mantissa is above 127 / 64.
constexpr int32_t kRoundUp = 0x1ffff;
constexpr int kStepsInByte = 6;  // bits: a block's largest value is up to 2^6 and 2^7 - 1 steps

// What a digit counts, in steps: from the lowest of three on, and last the one that only wide blocks have.
constexpr float kDigitUnits[kFine] = {1, 256, 65536, 1.0f / 256};

// A block is wide where fewer than kMany of its inputs are above a 64th of the largest.
constexpr int kMany = 8;
constexpr int32_t kFarBelow = 6 << 23;  // in the bits of a magnitude

// How a block is rounded to kFine digits, by the bits of its largest magnitude and how many are not far below.
struct FineSteps {
  bool wide;
  float step, inverse;  // inverse: of a step, or where the block is wide of a 256th

  FineSteps(int32_t peak_bits, int many) : wide(many < kMany) {
    constexpr int kStepsInPeak = kStepsInByte + 16;
    const int exponent = (peak_bits + kRoundUp) >> 23;
    const bool zero = exponent < kLeastExponent, bad = exponent > kMostExponent;
    inverse = zero || bad ? 0.0f : PowerOfTwo(254 + kStepsInPeak + (wide ? 8 : 0) - exponent);
    step = zero ? 0.0f : bad ? std::nanf("") : PowerOfTwo(exponent - kStepsInPeak);
  }
  int shift() const { return wide ? 0 : 8; }  // of steps, to those of a 256th
};

// What a call computes of x: y = x w^T, or with `up`, a gated unit: act(x w^T) * (x up^T).
enum class Activation : int { kSilu = 0, kGeluTanh = 1 };
struct Product {
  Weight w, up;
  bool gated;
  Activation activation;
  float* y;       // [T, F]
  bool bfloat16;  // y is that in truth
};

// Each takes all products of one x [T, D] at once, so that it is made ready only once.
void MultiplyTiles(const Product* products, int64_t count, const float* x);
void MultiplyBfloat16Tiles(const Product* products, int64_t count, const void* x);
void MultiplyBfloat16Pairs(const Product* products, int64_t count, const void* x);
// On AVX-512; x as it comes, `digits` of it taken: 1 or kFine.
void MultiplyDigits(const Product* products, int64_t count, const void* x, bool bfloat16, int digits);

// act(gate) * up: both activations are gate times the sigmoid of something (gelu's tanh form:
// Hendrycks and Gimpel, arXiv:1606.08415).
JAXSERVE_INLINE Lanes Gate(Activation activation, const Lanes& gate, const Lanes& up) {
  Lanes x = gate;
  if (activation == Activation::kGeluTanh) {
    x = 1.59576912f * (gate + 0.044715f * gate * gate * gate);  // 2 sqrt(2 / pi)
  }
  return gate / (1.0f + Exp(-Max(x, Fill(-87.0f)))) * up;
}

// Stores one panel of one row of y [T, F], cut at both, with what is to be added.
template <typename Number>
JAXSERVE_INLINE void StoreRow(const Weight& w, Number* y, int64_t row, int64_t panel, Lanes value) {
  if (row >= w.T) return;
  const int64_t at = row * w.F + panel * kPanel, n = std::min<int64_t>(kPanel, w.F - panel * kPanel);
  const auto* plus = static_cast<const Number*>(w.plus);
  if (plus != nullptr) value = LoadSome(plus + at, n) + value;
  StoreSome(y + at, value, n);
}
JAXSERVE_INLINE void StoreRow(const Weight& w, void* y, int64_t row, int64_t panel, const Lanes& value) {
  if (w.bfloat16) return StoreRow(w, static_cast<BFloat16*>(y), row, panel, value);
  StoreRow(w, static_cast<float*>(y), row, panel, value);
}

}  // namespace jaxserve::groups

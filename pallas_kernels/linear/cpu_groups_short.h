// What the ways through on AVX-512 and AMX share: tasks of two panels at a time, and results stored.

#pragma once

#include "../native_short.h"
#include "cpu_groups.h"

#if JAXSERVE_X86

namespace jaxserve::groups {

constexpr int64_t kReuseBytes = 1 << 20;  // of x, or of weights, that stays in L2 while the other passes
// Between what one thread writes and another reads: prefetchers run on past the end, and would take the
// lines behind it out of their writer's cache over and over (which made it three times slower).
constexpr size_t kGap = 16384;

JAXSERVE_AVX512 inline __m512 Floats(const Weight& w, const uint8_t* at) {
  if (w.half) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  return _mm512_loadu_ps(at);
}

// Two panels computed side by side: neighbours of one weight (or its last one twice), or, gated, the
// same of two weights.
struct Pair {
  const Weight* w[2];
  int64_t panel[2];
};

inline Pair PairOf(const Product& product, int64_t i) {
  if (product.gated) return {{&product.w, &product.up}, {i, i}};
  int64_t last = CeilDiv(product.w.F, kPanel) - 1;
  return {{&product.w, &product.w}, {2 * i, std::min(2 * i + 1, last)}};
}

inline int64_t PairsOf(const Product& product) {
  int64_t panels = CeilDiv(product.w.F, kPanel);
  return product.gated ? panels : CeilDiv(panels, 2);
}

// act(gate) * up to the bits that bfloat16 keeps; see Gate.
JAXSERVE_AVX512 inline __m512 ShortGate(Activation activation, __m512 gate, __m512 up) {
  __m512 x = gate;
  if (activation == Activation::kGeluTanh) {
    const __m512 square = _mm512_mul_ps(gate, gate);
    x = _mm512_mul_ps(gate, _mm512_fmadd_ps(square, _mm512_set1_ps(0.07135481f), _mm512_set1_ps(1.59576912f)));
  }
  const __m512 power = Exp2(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)), 0xffff);
  return _mm512_mul_ps(_mm512_mul_ps(gate, up), _mm512_rcp14_ps(_mm512_add_ps(power, _mm512_set1_ps(1.0f))));
}

JAXSERVE_AVX512 inline __m512 Widened(const BFloat16* at, __mmask16 some) {
  const __m512i half = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(half, 16));
}

// Stores one panel of one row of y [T, F], cut at F, with what is to be added.
JAXSERVE_AVX512 inline void StoreResult(const Product& product, int64_t row, int64_t panel, __m512 value) {
  const int64_t at = row * product.w.F + panel * kPanel;
  const int64_t n = std::min<int64_t>(product.w.F - panel * kPanel, kPanel);
  const auto some = static_cast<__mmask16>((1u << n) - 1);
  if (!product.bfloat16) {
    const auto* plus = static_cast<const float*>(product.w.plus);
    if (plus != nullptr) value = _mm512_add_ps(_mm512_maskz_loadu_ps(some, plus + at), value);
    return _mm512_mask_storeu_ps(product.y + at, some, value);
  }
  const auto* plus = static_cast<const BFloat16*>(product.w.plus);
  if (plus != nullptr) value = _mm512_add_ps(Widened(plus + at, some), value);
  BFloat16 narrow[kPanel];
  Narrow((Lanes)value, narrow);
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(narrow));
  _mm256_mask_storeu_epi16(reinterpret_cast<BFloat16*>(product.y) + at, some, half);
}

// A pair's sums in one row to y.
JAXSERVE_AVX512 inline void FinishPair(const Product& product, const Pair& pair, int64_t row, __m512 first,
                                    __m512 second) {
  if (!product.gated) {
    StoreResult(product, row, pair.panel[0], first);
    return StoreResult(product, row, pair.panel[1], second);
  }
  const __m512 value = product.bfloat16
                           ? ShortGate(product.activation, first, second)
                           : (__m512)Gate(product.activation, (Lanes)first, (Lanes)second);
  StoreResult(product, row, pair.panel[0], value);
}

// Hands out tasks of `task_pairs` pairs of any one product for up to task_tiles of `tiles` tiles of rows:
// run(product, begin_pair, end_pair, tile0, tile1, thread).
template <typename Run>
void ForEachTask(const Team& team, const Product* products, int64_t count, int64_t task_pairs, int64_t tiles,
                 int64_t task_tiles, const Run& run) {
  int64_t across = 0;
  for (int64_t i = 0; i < count; ++i) across += CeilDiv(PairsOf(products[i]), task_pairs);
  team.ForEach(across * CeilDiv(tiles, task_tiles), [&](int64_t task, int thread) {
    const int64_t tile = task / across * task_tiles;
    int64_t index = task % across;
    const Product* product = products;
    while (index >= CeilDiv(PairsOf(*product), task_pairs)) {
      index -= CeilDiv(PairsOf(*product++), task_pairs);
    }
    const int64_t begin = index * task_pairs, end = std::min(begin + task_pairs, PairsOf(*product));
    run(*product, begin, end, tile, std::min(tile + task_tiles, tiles), thread);
  });
}

inline int64_t AllPairs(const Product* products, int64_t count) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < count; ++i) pairs += PairsOf(products[i]);
  return pairs;
}

}  // namespace jaxserve::groups

#endif  // JAXSERVE_X86

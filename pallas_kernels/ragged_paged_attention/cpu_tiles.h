// What the two ways by tiles share (cpu_tiles.cc, cpu_codes.cc), and either with both of its units, AMX's tile
// unit and the vector units of AVX-512; see cpu.h.

#pragma once

#include "../native_tiles.h"
#include "cpu.h"

#if JAXSERVE_X86

namespace jaxserve::attention {

constexpr int kFirstRight = 5;  // tiles 0 to 3 hold sums, 4 the left operand, 5 to 7 the right one
constexpr float kLog2E = 1.44269504f;

// Gives out working memory, at multiples of 64 bytes.
struct Memory {
  float* at;

  template <typename T>
  void Take(T*& part, int64_t bytes) {
    part = reinterpret_cast<T*>(at);
    at += Align64(bytes) / sizeof(float);
  }
};

template <typename T>
JAXSERVE_AVX512 inline void Prefetch(const T* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

// Into the second cache: that one has more lines on their way at a time.
template <typename T>
JAXSERVE_AVX512 inline void PrefetchFar(const T* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T1);
}

// The keys of a block that a tile's token sees, a bit each.
inline uint64_t Seen(const Sight& sight, int64_t token) {
  const int64_t high = sight.high(token), low = sight.low(token);
  if (high <= low) return 0;
  return (~uint64_t{0} >> (kBlock - high)) & (~uint64_t{0} << low);
}

// Calls visit(sight, groups, next) for the blocks of a segment. next: the groups to ask memory for
// meanwhile, of the next block or of the tile that comes after.
template <typename KV, typename Visit>
JAXSERVE_AVX512 void ForEachBlock(const Call<KV>& call, const Tile& tile, int64_t segment,
                                  const Tile& after, const Visit& visit) {
  Sight sight = FirstSight(call, tile, segment);
  if (sight.from >= sight.to) return;
  Groups<KV> groups(call, tile, sight);
  while (true) {
    const Sight ahead(call, tile, sight.base + kBlock);
    const bool more = ahead.from < ahead.to;
    const Groups<KV> next(call, more ? tile : after,
                          more ? ahead : FirstSight(call, after, after.segment0));
    WriteOnly(call, tile, sight);
    visit(sight, groups, next);
    if (!more || ahead.base >= (segment + 1) * kSegment) return;
    sight = ahead;
    groups = next;
  }
}

// ---- the vector units' products ------------------------------------------------------------------

// Calls piece(kRows, row), the first a compile-time number, for pieces that cover `rows`, of which there
// are a multiple of kStep. Six rows by four columns have 24 sums: with their operands they fit the 32
// registers, and even two rows have enough sums for the unit not to wait for the last product.
template <int kStep, int kRows = 6, typename Piece>
JAXSERVE_AVX512 inline void CoverRows(int64_t rows, const Piece& piece, int64_t row = 0) {
  for (; row + kRows <= rows; row += kRows) piece(std::integral_constant<int, kRows>(), row);
  if constexpr (kRows > kStep) CoverRows<kStep, kRows - kStep>(rows, piece, row);
}

// Four bytes of a left operand, 16 times.
JAXSERVE_AVX512 inline __m512i Broadcast(const void* at) {
  int32_t four;
  std::memcpy(&four, at, sizeof(four));
  return _mm512_set1_epi32(four);
}

}  // namespace jaxserve::attention

#endif  // JAXSERVE_X86

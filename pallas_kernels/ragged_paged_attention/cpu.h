// Ragged paged attention on the CPU: what its parts share.
//
// Queries go in tiles: some tokens of one row times the query heads that share a KV head. A tile
// walks its keys in blocks of kBlock, aligned to position 0, with a running maximum, sum and weighted
// value (online softmax: Milakov and Gimelshein, arXiv:1805.02867), starting afresh every kSegment
// keys; segments are joined in order. So long rows split over threads, and every query goes through
// the same operations in the same order whatever tile it is in: a key that a query does not see leaves
// its state as it was, to the bit.
//
// There are three ways through a segment: by lanes (cpu_lanes.cc), anywhere, in float32; and in pages that 16
// divides, over a cache of int8 by products of bytes (cpu_codes.cc) and, where queries come as bfloat16, over
// one of that by its products (cpu_tiles.cc), which AMX's tile unit makes or, without one, the vector units of
// AVX-512. Which one depends on the engine's types alone, never on the batch.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu_stored.h"

namespace jaxserve::attention {

constexpr int kBlock = 64;       // keys of a block
constexpr int kKeyGroups = kBlock / kLanes;
constexpr int kSegment = 512;    // keys of a segment
constexpr int kFewestVectors = 48;  // query vectors of a tile, about
constexpr float kNone = -1e30f;  // the maximum over no keys: below any score, and finite

// `count` tokens of row s from packed token t0, for KV head j, over segments [segment0, segment1).
// state < 0: the tile is computed whole and goes to the output. Otherwise its one segment's state
// goes to that place and is joined with the others later.
struct Tile {
  int64_t s, j, t0, count, segment0, segment1, state;
};

// What a call says, in plain numbers and pointers.
template <typename KV>
struct Call {
  int64_t T, H, J, E, S, P, K, G;
  const void* q_THE;  // bfloat16 or float32, as k, v and the output
  void* out_THE;
  bool bfloat16;
  const void* k_TJE;
  const void* v_TJE;
  KV* pages;      // of this layer: [G, J, 2, K, E], K turned
  float* scales;  // of this layer: [G, J, 2, K]; null unless pages hold codes
  const int32_t* page_table_SP;
  const int32_t* kv_len_S;
  const int32_t* cu_q_len_S1;
  int64_t num_rows;
  const float* sinks_H;  // or null
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
  Isa isa;

  int64_t group() const { return H / J; }
  int64_t depth() const { return CeilDiv(E, kLanes) * kLanes; }
  // How many tokens of this step a row has.
  int64_t Tokens(int64_t s) const { return cu_q_len_S1[s + 1] - cu_q_len_S1[s]; }
  // Position of a row's first token of this step.
  int64_t FirstPosition(int64_t s) const { return kv_len_S[s] - Tokens(s); }
  int64_t FirstVisible(int64_t position) const {
    return window == 0 ? 0 : std::max<int64_t>(0, position - window + 1);
  }
  // Slots whose K lie side by side: [K / lanes][E][lanes]. Pages that 16 does not divide have one group.
  int64_t lanes() const { return K % kLanes == 0 ? kLanes : K; }
  // Which vector of the pages' a position's K is, for head j: a page has K of K, then K of V. Its V, like
  // V's scale, is K further.
  int64_t VectorAt(int64_t s, int64_t j, int64_t position) const {
    return (page_table_SP[s * P + position / K] * J + j) * 2 * K + position % K;
  }
  // Element 0 of a position's K; element e is e * lanes() further.
  KV* KeyAt(int64_t s, int64_t j, int64_t position) const {
    int64_t lane = position % K % lanes();
    return pages + (VectorAt(s, j, position) - lane) * E + lane;
  }
  KV* ValueAt(int64_t s, int64_t j, int64_t position) const {
    return pages + (VectorAt(s, j, position) + K) * E;
  }
  // Of pages of codes: the scale of a position's K.
  float* ScaleAt(int64_t s, int64_t j, int64_t position) const {
    return scales + VectorAt(s, j, position);
  }
  // Element 0 of a tile's query vector m in q or the output, counted in elements.
  int64_t QueryAt(const Tile& tile, int64_t m) const {
    return ((tile.t0 + m / group()) * H + tile.j * group() + m % group()) * E;
  }
};

// Running maximum, sum and unnormalised value of M query vectors. Memory is there for M rounded up to
// whole tiles of 16.
struct State {
  float* max;    // [M]
  float* sum;    // [M]
  float* value;  // [M][depth]

  static int64_t Floats(int64_t M, int64_t depth) {
    return CeilDiv(M, kLanes) * kLanes * (depth + 2);
  }
  static State At(float* memory, int64_t M, int64_t depth) {
    int64_t head = CeilDiv(M, kLanes) * kLanes;
    return {memory, memory + head, memory + 2 * head};
  }
};

// The keys of one block that a tile's queries see among them: [base + from, base + to). Slots outside
// may belong to anybody, or to nobody: their scores count for nothing, their values are not read.
// The tile's token i sees those before base + high(i) and, with a window, not before base + low(i).
struct Sight {
  int64_t base, from, to, position, group, window;

  template <typename KV>
  Sight(const Call<KV>& call, const Tile& tile, int64_t base)
      : base(base),
        position(call.FirstPosition(tile.s) + tile.t0 - call.cu_q_len_S1[tile.s]),
        group(call.group()),
        window(call.window) {
    from = std::max<int64_t>(call.FirstVisible(position) - base, 0);
    to = std::min<int64_t>(position + tile.count - base, kBlock);
  }
  int64_t high(int64_t i) const { return std::min<int64_t>(position + i + 1 - base, kBlock); }
  int64_t low(int64_t i) const {
    return window == 0 ? 0 : std::max<int64_t>(position + i + 1 - base - window, 0);
  }
};

// The first block of a segment of which a tile may see keys.
template <typename KV>
Sight FirstSight(const Call<KV>& call, const Tile& tile, int64_t segment) {
  const int64_t position = call.FirstPosition(tile.s) + tile.t0 - call.cu_q_len_S1[tile.s];
  return {call, tile, std::max(segment * kSegment, call.FirstVisible(position) / kBlock * kBlock)};
}

// Where a block's keys and values lie: K [E][16] and V [16][E] of each group of 16.
template <typename KV>
struct Groups {
  const KV *key[kKeyGroups], *value[kKeyGroups];
  const float *key_scale[kKeyGroups], *value_scale[kKeyGroups];  // of codes

  // For groups with nothing in sight, the first one that has.
  Groups(const Call<KV>& call, const Tile& tile, const Sight& sight) {
    for (int64_t g = 0; g < kKeyGroups; ++g) {
      const bool seen = g * kLanes < sight.to && (g + 1) * kLanes > sight.from;
      const int64_t position = sight.base + (seen ? g * kLanes : sight.from / kLanes * kLanes);
      const int64_t vector = call.VectorAt(tile.s, tile.j, position);
      key[g] = call.pages + vector * call.E;
      value[g] = key[g] + call.K * call.E;
      if constexpr (kCodes<KV>) {
        key_scale[g] = call.scales + vector;
        value_scale[g] = key_scale[g] + call.K;
      }
    }
  }
};

// Calls visit(key, count) for runs of keys whose slots lie one behind the other in a page.
template <typename KV, typename Visit>
JAXSERVE_INLINE void ForEachRun(const Call<KV>& call, const Sight& sight, const Visit& visit) {
  for (int64_t key = sight.from; key < sight.to;) {
    int64_t count = std::min(sight.to - key, call.K - (sight.base + key) % call.K);
    visit(key, count);
    key += count;
  }
}

// cap * tanh(score / cap), as m / (m + 2) with m = e^(2 score / cap) - 1, which is precise near 0.
JAXSERVE_INLINE Lanes SoftCap(const Lanes& score, float cap) {
  Lanes x = score * (2.0f / cap);
  x = Max(x, Fill(-40.0f));
  Power e = PowerOf(-Max(-x, Fill(-40.0f)));
  Lanes m = e.power * e.rest + (e.power - 1.0f);
  return Select(NotANumber(score), score, cap * m / (m + 2.0f));
}

// Writes the keys and values of rows with several tokens into their pages.
template <typename KV>
void WriteChunks(const Call<KV>& call, const Team& team);
// Writes the key and value of row s's token t for KV head j.
template <typename KV>
void WriteToken(const Call<KV>& call, int64_t s, int64_t j, int64_t t);

// A row's only token is written when its block's turn has come (no other row reads that page): by then the
// page's lines, as many as a turned key has elements, have been asked for, and nobody waits for them.
template <typename KV>
void WriteOnly(const Call<KV>& call, const Tile& tile, const Sight& sight) {
  if (call.Tokens(tile.s) == 1 && sight.position < sight.base + kBlock) {
    WriteToken(call, tile.s, tile.j, tile.t0);
  }
}

// A way through a tile's segments. Its working memory starts at a multiple of 64 bytes.
template <typename KV>
struct Way {
  int64_t most_vectors;  // of a tile, about: as many as share a block's keys from near caches
  int64_t (*floats)(const Call<KV>& call, int64_t M);  // of working memory
  // Makes a tile's queries ready in `memory`.
  void (*start)(const Call<KV>& call, const Tile& tile, float* memory);
  // The state of a started tile's queries over the keys of one segment. `after`: the tile that this thread
  // is likely to get next.
  void (*attend)(const Call<KV>& call, const Tile& tile, int64_t segment, const Tile& after,
                 float* memory, const State& state);
};

template <typename KV>
Way<KV> ByLanes();
Way<BFloat16> ByTiles(Isa isa);
constexpr int64_t kLongestCodes = 512;  // elements of a vector whose products int32 adds up
Way<int8_t> ByCodes(Isa isa);

}  // namespace jaxserve::attention

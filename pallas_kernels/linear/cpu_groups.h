// linear with group-quantised weights: what its instruction sets share.
//
// Weights are 4- or 8-bit codes in groups of 32 (or 16) inputs; the activations are rounded to 16
// bits per row and block of 32 inputs. A group's sum of products is an exact integer. An output is
//
//   sum over groups, in order:  float(sum of (code - zero) * q) * x_scale * scale
//                               + x_scale * float(sum of q) * offset
//
// in float32 multiply-adds. A row in which a few inputs dwarf the rest would lose those in the rounding:
// what is left of it after rounding is rounded again and goes through as one more row, whose outputs
// are added to the first's. Integers are exact in any order, so only the order of the groups counts:
// it is the same in every tile and instruction set, hence so are the bits (the plain path, without
// fused multiply-add, differs from the others in the last ones).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../native.h"

namespace jaxserve::groups {

constexpr int kPanel = 16;   // output features side by side
constexpr int kBlock = 32;   // inputs that share an activation scale
constexpr int kMaxRows = 16;  // rows of a tile

// One layer's weight. codes: [F / 16][D / 4][16][4] int8, or [F / 16][D / 8][16][4] uint8 holding two
// codes a byte: of a block's eight quads of inputs, bytes of quad i < 4 hold quad i low, i + 4 high.
// scale, offset: [F / 16][D / group][16].
struct Weight {
  const uint8_t* codes;
  const uint8_t* scale;
  const uint8_t* offset;  // or null
  int64_t T, D, F;
  int bits;        // 4 or 8
  int zero;        // of the 4-bit codes
  int parts;       // groups a block: 1 or 2
  bool half;       // scale and offset are float16, else float32

  int64_t blocks() const { return D / kBlock; }
  int64_t block_bytes() const { return kBlock * kPanel * bits / 8; }
  int64_t scale_bytes() const { return kPanel * (half ? 2 : 4); }
  const uint8_t* CodesOf(int64_t panel) const { return codes + panel * blocks() * block_bytes(); }
  // The scales (or offsets) of a panel's first group.
  const uint8_t* OfPanel(const uint8_t* base, int64_t panel) const {
    return base == nullptr ? nullptr : base + panel * blocks() * parts * scale_bytes();
  }
};

// The rounded activations, in tiles of `rows` rows (the last one filled up with zeros).
struct Rounded {
  int64_t rows, tiles, blocks;
  int parts;
  // Per tile and block: for AVX-512 and AMX the high bytes of x as int8 [rows][32], then the low
  // bytes (value = 256 * high + low, both signed); for the others int16 [rows][32].
  int8_t* values;
  float* scale;    // [tile][block][rows]
  float* sum;      // [tile][block][part][rows]: scale * sum of q
  int32_t* start;  // [tile][block][part][rows]: what the integer sum starts at, -zero * sum of q

  static size_t Bytes(int64_t tiles, int64_t rows, int64_t blocks, int parts) {
    size_t n = tiles * rows * blocks;
    return Align64(n * 64) + Align64(n * 4) + 2 * Align64(n * parts * 4);
  }
  Rounded(char* memory, int64_t tiles, int64_t rows, int64_t blocks, int parts)
      : rows(rows), tiles(tiles), blocks(blocks), parts(parts) {
    size_t n = tiles * rows * blocks;
    values = reinterpret_cast<int8_t*>(memory);
    scale = reinterpret_cast<float*>(memory + Align64(n * 64));
    sum = reinterpret_cast<float*>(memory + Align64(n * 64) + Align64(n * 4));
    start = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(sum) + Align64(n * parts * 4));
  }
  int64_t At(int64_t tile, int64_t block) const { return (tile * blocks + block) * rows; }
};

// Where rows of outputs go: the first T to y, those of remainders to `more`.
struct Output {
  float* y;
  float* more;
  int64_t rows, more_rows;
};

// A rectangle of the output: tiles of rows times panels of features.
struct Region {
  int64_t tile0, tile1, panel0, panel1;
};

// Each computes a region for one instruction set. `scratch` is a thread's own, ScratchBytes long.
using Kernel = void (*)(const Weight&, const Rounded&, const Output&, const Region&, int8_t* scratch);
void Plain(const Weight&, const Rounded&, const Output&, const Region&, int8_t* scratch);
void Avx2(const Weight&, const Rounded&, const Output&, const Region&, int8_t* scratch);
void Avx512(const Weight&, const Rounded&, const Output&, const Region&, int8_t* scratch);
void Amx(const Weight&, const Rounded&, const Output&, const Region&, int8_t* scratch);

// Stores one panel of one row, cut at F.
JAXSERVE_INLINE void StoreRow(const Weight& w, const Output& to, int64_t row, int64_t panel,
                              const Lanes& value) {
  if (row >= to.rows + to.more_rows) return;
  float* base = row < to.rows ? to.y + row * w.F : to.more + (row - to.rows) * w.F;
  int64_t at = panel * kPanel;
  std::memcpy(base + at, &value, sizeof(float) * std::min<int64_t>(kPanel, w.F - at));
}

}  // namespace jaxserve::groups

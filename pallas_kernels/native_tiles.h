// AMX's tile unit, as the native CPU operations use it: eight tiles of up to 16 rows of 64 bytes. Code that
// also runs without one, on AVX-512 with products of bytes and of bfloat16 (Isa::kAvx512Bf16), may be marked
// JAXSERVE_AMX as well: that permits instructions, it asks for none.

#pragma once

#include "native_short.h"

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

}  // namespace jaxserve

#endif  // JAXSERVE_X86

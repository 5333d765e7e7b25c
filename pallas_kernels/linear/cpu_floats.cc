// linear with float32 or bfloat16 weights in panels of 16 output features: y_TF = x_TD w_FD^T.
//
// An output element is the sum, over blocks of kBlock inputs in order, of the sum over the block's
// inputs in order, each a float32 multiply-add. Tiles decide only which elements are computed side
// by side, so a row's result does not depend on the rows around it.

#include <algorithm>
#include <cstring>

#include "../native.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {
namespace {

namespace ffi = xla::ffi;

constexpr int kPanel = 16;               // output features side by side
constexpr int64_t kBlock = 256;          // inputs summed before they join the total
constexpr int64_t kReuseBytes = 1 << 20;  // of x that stays in cache while panels pass: half an L2

struct BFloat16 {
  uint16_t bits;
};

// Loads the weights of 16 features for one input (float32), or for an even and an odd one that
// share 32-bit lanes (bfloat16).
template <typename Weight>
constexpr int kInputsPerLoad = sizeof(float) / sizeof(Weight);

JAXSERVE_INLINE void Load(const float* at, Lanes* w) { std::memcpy(w, at, sizeof(Lanes)); }
JAXSERVE_INLINE void Load(const BFloat16* at, Lanes* w) {
  Bits pair;
  std::memcpy(&pair, at, sizeof(pair));
  w[0] = reinterpret_cast<Lanes>(pair << 16);
  w[1] = reinterpret_cast<Lanes>(pair & 0xffff0000u);
}

struct Shape {
  int64_t T, D, F;
  int64_t depth;      // inputs of a panel: D, padded for bfloat16
  int64_t tile_rows;  // rows of a tile of packed x: [tiles][depth][tile_rows]
};

// R rows times P panels: y[r, p * 16 ...] for the whole depth. x: [depth][R].
template <typename Weight, int R, int P>
JAXSERVE_INLINE void Tile(const Shape& shape, const float* x, const Weight* w, float* y,
                          int64_t features) {
  constexpr int kStep = kInputsPerLoad<Weight>;
  Lanes total[R][P];
  for (int64_t start = 0; start < shape.depth; start += kBlock) {
    Lanes sum[R][P] = {};
    int64_t end = std::min(start + kBlock, shape.depth);
    for (int64_t k = start; k < end; k += kStep) {
      Lanes weights[P][kStep];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) Load(w + (p * shape.depth + k) * kPanel, weights[p]);
#pragma GCC unroll 2
      for (int i = 0; i < kStep; ++i) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          float value = x[(k + i) * R + r];
#pragma GCC unroll 8
          for (int p = 0; p < P; ++p) sum[r][p] += weights[p][i] * value;
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) total[r][p] = start == 0 ? sum[r][p] : total[r][p] + sum[r][p];
    }
  }
  for (int r = 0; r < R; ++r) {
    size_t bytes = sizeof(float) * std::min<int64_t>(features, P * kPanel);
    std::memcpy(y + r * shape.F, total[r], bytes);
  }
}

// Tile for a number of rows known only now, at most kRows.
template <typename Weight, int kRows, int P>
JAXSERVE_INLINE void TileOfRows(int64_t rows, const Shape& shape, const float* x, const Weight* w,
                                float* y, int64_t features) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return Tile<Weight, kRows, P>(shape, x, w, y, features);
    TileOfRows<Weight, kRows - 1, P>(rows, shape, x, w, y, features);
  }
}

// All rows of tiles [tile0, tile1) times panels [panel0, panel1).
template <typename Weight, int kRows, int P>
JAXSERVE_INLINE void Region(const Shape& shape, const float* x, const Weight* w, float* y,
                            int64_t tile0, int64_t tile1, int64_t panel0, int64_t panel1) {
  int64_t panel = panel0;
  auto pass = [&](auto count) __attribute__((always_inline)) {
    for (int64_t tile = tile0; tile < tile1; ++tile) {
      int64_t row = tile * shape.tile_rows;
      TileOfRows<Weight, kRows, decltype(count)::value>(
          std::min(shape.tile_rows, shape.T - row), shape, x + row * shape.depth,
          w + panel * shape.depth * kPanel, y + row * shape.F + panel * kPanel,
          shape.F - panel * kPanel);
    }
  };
  for (; panel + P <= panel1; panel += P) pass(std::integral_constant<int, P>());
  if constexpr (P > 1) {
    for (; panel < panel1; ++panel) pass(std::integral_constant<int, 1>());
  }
}

// Register budgets: sums, P weights and one broadcast in 32 (AVX-512) or 16 registers.
template <typename Weight>
struct Kernel {
  using Function = void (*)(const Shape&, const float*, const Weight*, float*, int64_t, int64_t,
                            int64_t, int64_t);
  static constexpr int kPlainRows = 2, kAvx2Rows = 6, kAvx512Rows = 12;

  static void Plain(const Shape& s, const float* x, const Weight* w, float* y, int64_t t0,
                    int64_t t1, int64_t p0, int64_t p1) {
    Region<Weight, kPlainRows, 1>(s, x, w, y, t0, t1, p0, p1);
  }
#if JAXSERVE_X86
  JAXSERVE_AVX2 static void Avx2(const Shape& s, const float* x, const Weight* w, float* y,
                                 int64_t t0, int64_t t1, int64_t p0, int64_t p1) {
    Region<Weight, kAvx2Rows, 1>(s, x, w, y, t0, t1, p0, p1);
  }
  JAXSERVE_AVX512 static void Avx512(const Shape& s, const float* x, const Weight* w, float* y,
                                     int64_t t0, int64_t t1, int64_t p0, int64_t p1) {
    Region<Weight, kAvx512Rows, 2>(s, x, w, y, t0, t1, p0, p1);
  }
#endif

  static std::pair<Function, int> For(Isa isa) {
#if JAXSERVE_X86
    if (isa >= Isa::kAvx512) return {Avx512, kAvx512Rows};
    if (isa == Isa::kAvx2) return {Avx2, kAvx2Rows};
#endif
    return {Plain, kPlainRows};
  }
};

// x [T, D] -> [tiles][depth][rows of the tile], zeros past D.
void PackRows(const Shape& shape, const float* x, float* packed, int64_t tile) {
  int64_t row = tile * shape.tile_rows;
  int64_t rows = std::min(shape.tile_rows, shape.T - row);
  float* to = packed + row * shape.depth;
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = x + (row + r) * shape.D;
    for (int64_t k = 0; k < shape.D; ++k) to[k * rows + r] = from[k];
    for (int64_t k = shape.D; k < shape.depth; ++k) to[k * rows + r] = 0;
  }
}

template <typename Weight>
void Linear(Shape shape, const float* x, const Weight* w, float* y, Isa isa) {
  auto [region, max_rows] = Kernel<Weight>::For(isa);
  int64_t tiles = CeilDiv(shape.T, max_rows);
  shape.tile_rows = CeilDiv(shape.T, tiles);
  tiles = CeilDiv(shape.T, shape.tile_rows);
  Team team;
  if (shape.T > 1 || shape.depth != shape.D) {
    float* packed = team.Scratch<float>(shape.T * shape.depth);
    team.ForEach(tiles, [&, x](int64_t tile, int) { PackRows(shape, x, packed, tile); });
    x = packed;
  }
  // A task is some tiles times some panels: rows few enough to stay in cache, panels few enough to
  // give every thread several tasks.
  int64_t panels = CeilDiv(shape.F, kPanel);
  int64_t tile_bytes = shape.tile_rows * shape.depth * sizeof(float);
  int64_t task_tiles = std::clamp<int64_t>(kReuseBytes / tile_bytes, 1, tiles);
  int64_t task_panels = std::max<int64_t>(1, panels / (8 * NumThreads()));
  task_panels = CeilDiv(task_panels, 2) * 2;
  int64_t across = CeilDiv(panels, task_panels);
  team.ForEach(across * CeilDiv(tiles, task_tiles), [&, region = region](int64_t task, int) {
    int64_t tile = task / across * task_tiles, panel = task % across * task_panels;
    region(shape, x, w, y, tile, std::min(tile + task_tiles, tiles), panel,
           std::min(panel + task_panels, panels));
  });
}

// x [T, D], panels [L, F / 16, depth, 16] (bfloat16: [L, F / 16, depth / 2, 16, 2]), layer [].
ffi::Error LinearFloats(ffi::Buffer<ffi::F32> x, ffi::AnyBuffer panels, ffi::Buffer<ffi::S32> layer,
                        ffi::ResultBuffer<ffi::F32> y, int64_t isa) {
  bool half = panels.element_type() == ffi::BF16;
  auto dims = panels.dimensions();
  Shape shape{};
  shape.D = x.dimensions()[1];
  shape.F = y->dimensions()[1];
  shape.T = UsedRows(x.typed_data(), x.dimensions()[0], shape.D, false);
  std::fill(y->typed_data() + shape.T * shape.F, y->typed_data() + y->element_count(), 0.0f);
  shape.depth = dims[2] * (half ? 2 : 1);
  int64_t index = layer.typed_data()[0];
  if (index < 0 || index >= dims[0]) return ffi::Error::InvalidArgument("linear: no such layer");
  int64_t offset = index * dims[1] * shape.depth * kPanel;
  if (shape.T == 0) return ffi::Error::Success();
  if (half) {
    Linear(shape, x.typed_data(), static_cast<const BFloat16*>(panels.untyped_data()) + offset,
           y->typed_data(), ChooseIsa(isa));
  } else {
    Linear(shape, x.typed_data(), static_cast<const float*>(panels.untyped_data()) + offset,
           y->typed_data(), ChooseIsa(isa));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_linear_floats, jaxserve::LinearFloats,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("isa"));

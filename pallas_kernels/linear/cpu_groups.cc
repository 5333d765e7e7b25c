// linear with group-quantised weights: rounding the activations, sharing out the work, and the
// plain and AVX2 kernels. See cpu_groups.h for the arithmetic.

#include "cpu_groups.h"

#include "xla/ffi/api/ffi.h"

namespace jaxserve::groups {
namespace {

namespace ffi = xla::ffi;

constexpr int kStepsInPeak = 29;  // bits: a block's largest value is 2^29 to 2^30 steps
constexpr int kLeastExponent = 47, kMostExponent = 240;  // biased, of a block's largest value
constexpr int64_t kReuseBytes = 1 << 20;  // of x that stays in cache while panels pass: half an L2
constexpr int64_t kTaskBytes = 32 << 10;  // of weights: below this a task is not worth handing out
constexpr int64_t kTilesFromRows = 3;     // fewer rows wait for memory, whatever multiplies them

struct RoundJob {
  const float* x;  // [T, D]
  int64_t T, D;
  int zero;
  Rounded to;
};

float PowerOfTwo(int biased_exponent) {
  int32_t bits = biased_exponent << 23;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The biased exponent of a block's largest magnitude; 255 where one is infinite or NaN.
JAXSERVE_INLINE int PeakExponent(const float* x) {
  int32_t peak = 0;
  for (int k = 0; k < kBlock; ++k) {
    int32_t bits;  // of a magnitude: they order as it does
    std::memcpy(&bits, x + k, sizeof(bits));
    peak = std::max(peak, bits & 0x7fffffff);
  }
  return peak >> 23;
}

// 16-bit values as 256 * upper + lower, signed bytes.
JAXSERVE_INLINE void StoreBytes(const int32_t* values, int8_t* to, int64_t plane_bytes) {
  for (int k = 0; k < kBlock; ++k) {
    int32_t lower = static_cast<int8_t>(values[k]);
    to[k] = static_cast<int8_t>((values[k] - lower) >> 8);
    to[k + plane_bytes] = static_cast<int8_t>(lower);
  }
}

// Rounds one block of a row. Blocks below 2^-80 are zero; those of 2^114 and more, infinite or NaN make
// their row's outputs NaN (beyond those bounds the products would leave float32's range).
JAXSERVE_INLINE void RoundBlock(const float* x, const RoundJob& job, int64_t tile, int64_t block,
                                int64_t row) {
  const Rounded& to = job.to;
  int exponent = PeakExponent(x);
  bool zero = exponent < kLeastExponent, bad = exponent > kMostExponent;
  float inverse = zero || bad ? 0.0f : PowerOfTwo(254 + kStepsInPeak - exponent);
  float step = zero ? 0.0f : bad ? std::nanf("") : PowerOfTwo(exponent - kStepsInPeak);
  int32_t high[kBlock], low[kBlock];
  for (int k = 0; k < kBlock; ++k) {
    float value = inverse > 0 ? x[k] * inverse : 0.0f;
    int32_t q = static_cast<int32_t>(std::nearbyint(value));
    low[k] = ((q + 0x8080) & 0xffff) - 0x8080;  // within two signed bytes' range
    high[k] = (q - low[k]) >> 16;
  }
  int8_t* bytes = to.Planes(tile, block) + row * kBlock;
  StoreBytes(high, bytes, to.plane_bytes());
  StoreBytes(low, bytes + 2 * to.plane_bytes(), to.plane_bytes());
  int64_t first = to.At(tile, block);
  to.step[first + row] = step;
  int length = kBlock / to.parts;
  for (int part = 0; part < to.parts; ++part) {
    int32_t highs = 0, lows = 0;
    for (int k = part * length; k < (part + 1) * length; ++k) highs += high[k], lows += low[k];
    to.sum[first * to.parts + part * to.rows + row] =
        step * (static_cast<float>(highs) * 65536.0f + static_cast<float>(lows));
    int32_t* start = to.start + 2 * (first * to.parts + part * to.rows) + row;
    start[0] = -job.zero * highs;
    start[to.rows] = -job.zero * lows;
  }
}

// Blocks [begin, end) of a tile.
struct RoundOp {
  using Signature = void(const RoundJob& job, int64_t tile, int64_t begin, int64_t end);
  template <Isa>
  static JAXSERVE_INLINE void Run(const RoundJob& job, int64_t tile, int64_t begin, int64_t end) {
    static const float kZeros[kBlock] = {};
    for (int64_t block = begin; block < end; ++block) {
      for (int64_t r = 0; r < job.to.rows; ++r) {
        int64_t row = tile * job.to.rows + r;
        const float* x = row < job.T ? job.x + row * job.D + block * kBlock : kZeros;
        RoundBlock(x, job, tile, block, r);
      }
    }
  }
};

template <typename Op>
using Entry = PerIsa<Op, typename Op::Signature>;

// ---- plain and AVX2 ----------------------------------------------------------------------------

// A block's codes less their zero point, as int8 [8 quads][16][4].
JAXSERVE_INLINE const int8_t* BlockCodes(const Weight& w, const uint8_t* codes, int8_t* to) {
  if (w.bits == 8) return reinterpret_cast<const int8_t*>(codes);
  for (int i = 0; i < 256; ++i) {
    to[i] = static_cast<int8_t>((codes[i] & 15) - w.zero);
    to[i + 256] = static_cast<int8_t>((codes[i] >> 4) - w.zero);
  }
  return to;
}

float FromHalf(uint16_t bits) {
  uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float magnitude;
  if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  } else {
    uint32_t wide = (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    std::memcpy(&magnitude, &wide, sizeof(wide));
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

// sums[n] = sum over quads of code[quad][n][0..3] * x[quad * 4 + 0..3].
struct PlainDot {
  static JAXSERVE_INLINE IntLanes Dot(const int8_t* codes, const int8_t* x, int quads) {
    int32_t sums[kPanel] = {};
    for (int quad = 0; quad < quads; ++quad) {
      for (int n = 0; n < kPanel; ++n) {
        const int8_t* c = codes + (quad * kPanel + n) * 4;
        const int8_t* v = x + quad * 4;
        sums[n] += c[0] * v[0] + c[1] * v[1] + c[2] * v[2] + c[3] * v[3];
      }
    }
    IntLanes result;
    std::memcpy(&result, sums, sizeof(result));
    return result;
  }

  static JAXSERVE_INLINE Lanes Floats(const Weight& w, const uint8_t* at) {
    Lanes values;
    if (w.half) {
      for (int n = 0; n < kPanel; ++n) {
        uint16_t bits;
        std::memcpy(&bits, at + 2 * n, 2);
        values[n] = FromHalf(bits);
      }
    } else {
      std::memcpy(&values, at, sizeof(values));
    }
    return values;
  }
};

#if JAXSERVE_X86
struct Avx2Dot {
  JAXSERVE_AVX2 static inline IntLanes Dot(const int8_t* codes, const int8_t* x, int quads) {
    __m256i sums[4] = {};  // [i]: two partial sums of each of the features 4 i .. 4 i + 3
    for (int quad = 0; quad < quads; ++quad) {
      int32_t four;
      std::memcpy(&four, x + quad * 4, sizeof(four));
      __m256i v = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
      for (int i = 0; i < 4; ++i) {
        auto at = reinterpret_cast<const __m128i*>(codes + (quad * 4 + i) * 16);
        __m256i c = _mm256_cvtepi8_epi16(_mm_loadu_si128(at));
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(c, v));
      }
    }
    __m256i halves[2];
    for (int i = 0; i < 2; ++i) {  // hadd works within 128 bits: put the middle two pairs right
      __m256i pairs = _mm256_hadd_epi32(sums[2 * i], sums[2 * i + 1]);
      halves[i] = _mm256_permute4x64_epi64(pairs, 0xd8);
    }
    IntLanes result;
    std::memcpy(&result, halves, sizeof(result));
    return result;
  }

  JAXSERVE_AVX2 static inline Lanes Floats(const Weight& w, const uint8_t* at) {
    Lanes values;
    if (w.half) {
      auto halves = reinterpret_cast<const __m128i*>(at);
      __m256 floats[2] = {_mm256_cvtph_ps(_mm_loadu_si128(halves)),
                          _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
      std::memcpy(&values, floats, sizeof(values));
    } else {
      std::memcpy(&values, at, sizeof(values));
    }
    return values;
  }
};
#endif

template <typename Dots>
JAXSERVE_INLINE void RegionOf(const Weight& w, const Rounded& x, float* y, const Region& region) {
  int quads = kBlock / 4 / w.parts;
  for (int64_t panel = region.panel0; panel < region.panel1; ++panel) {
    for (int64_t tile = region.tile0; tile < region.tile1; ++tile) {
      const uint8_t* codes = w.CodesOf(panel);
      const uint8_t* scale = w.OfPanel(w.scale, panel);
      const uint8_t* offset = w.OfPanel(w.offset, panel);
      Lanes total[kMaxRows] = {};
      for (int64_t b = 0; b < x.blocks; ++b, codes += w.block_bytes()) {
        alignas(64) int8_t expanded[kBlock * kPanel];
        const int8_t* block = BlockCodes(w, codes, expanded);
        int64_t at = x.At(tile, b);
        for (int part = 0; part < w.parts; ++part) {
          Lanes ws = Dots::Floats(w, scale), wo = {};
          if (offset != nullptr) wo = Dots::Floats(w, offset);
          const float* sums = x.sum + at * w.parts + part * x.rows;
          for (int64_t r = 0; r < x.rows; ++r) {
            const int8_t* bytes = x.Planes(tile, b) + r * kBlock + part * quads * 4;
            IntLanes dot[kBytes];
            for (int i = 0; i < kBytes; ++i, bytes += x.plane_bytes()) {
              dot[i] = Dots::Dot(block + part * quads * kPanel * 4, bytes, quads);
            }
            Lanes high = __builtin_convertvector(dot[0] * 256 + dot[1], Lanes);
            Lanes low = __builtin_convertvector(dot[2] * 256 + dot[3], Lanes);
            total[r] += (high * 65536.0f + low) * x.step[at + r] * ws;
            if (offset != nullptr) total[r] += wo * sums[r];
          }
          scale += w.scale_bytes();
          if (offset != nullptr) offset += w.scale_bytes();
        }
      }
      for (int64_t r = 0; r < x.rows; ++r) StoreRow(w, y, tile * x.rows + r, panel, total[r]);
    }
  }
}

// ---- the call ----------------------------------------------------------------------------------

Kernel Choose(Isa isa) {
#if JAXSERVE_X86
  if (isa >= Isa::kAvx512) return Avx512;
  if (isa == Isa::kAvx2) return Avx2;
#endif
  return Plain;
}

void MultiplyBytes(const Team& team, const Weight& w, const float* x, float* y, Isa isa) {
  int64_t tiles = CeilDiv(w.T, kMaxRows), rows = CeilDiv(w.T, tiles), panels = CeilDiv(w.F, kPanel);
  char* memory = team.Scratch<char>(Rounded::Bytes(tiles, rows, w.blocks(), w.parts));
  // AVX-512 multiplies unsigned codes: signed ones are read as code + 128.
  int zero = w.bits == 8 ? 128 : w.zero;
  RoundJob job{x, w.T, w.D, zero, Rounded(memory, tiles, rows, w.blocks(), w.parts)};
  auto round = Entry<RoundOp>::For(isa);
  int64_t cuts = tiles < NumThreads() ? std::min<int64_t>(NumThreads(), w.T) : 1;
  team.ForEach(tiles * cuts, [&](int64_t task, int) {
    int64_t cut = task % cuts;
    round(job, task / cuts, w.blocks() * cut / cuts, w.blocks() * (cut + 1) / cuts);
  });

  Kernel kernel = Choose(isa);
  int64_t task_tiles = std::clamp<int64_t>(kReuseBytes / (rows * w.D * kBytes), 1, tiles);
  int64_t row_tasks = CeilDiv(tiles, task_tiles);
  int64_t worth = CeilDiv(kTaskBytes, w.blocks() * w.block_bytes() * std::min(rows, int64_t{4}));
  int64_t task_panels = std::max(worth, panels / (8 * NumThreads()));
  int64_t across = CeilDiv(panels, task_panels);
  team.ForEach(across * row_tasks, [&](int64_t task, int) {
    int64_t tile = task / across * task_tiles, panel = task % across * task_panels;
    kernel(w, job.to, y,
           {tile, std::min(tile + task_tiles, tiles), panel, std::min(panel + task_panels, panels)});
  });
}

void Linear(const Weight& w, const float* x, float* y, Isa isa) {
  Team team;
#if JAXSERVE_X86
  if (isa == Isa::kAmx && w.T >= kTilesFromRows) return MultiplyTiles(team, w, x, y);
#endif
  MultiplyBytes(team, w, x, y, isa);
}

// x [T, D]; codes, scale, offset (empty: none) with a leading layer axis, see Weight; layer [].
ffi::Error LinearGroups(ffi::Buffer<ffi::F32> x, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                        ffi::AnyBuffer offset, ffi::Buffer<ffi::S32> layer,
                        ffi::ResultBuffer<ffi::F32> y, int64_t bits, int64_t group, int64_t zero,
                        int64_t isa) {
  int64_t layers = codes.dimensions()[0], index = layer.typed_data()[0];
  if (index < 0 || index >= layers) return ffi::Error::InvalidArgument("linear: no such layer");
  auto slice = [&](const ffi::AnyBuffer& all) -> const uint8_t* {
    if (all.element_count() == 0) return nullptr;
    return static_cast<const uint8_t*>(all.untyped_data()) + all.size_bytes() / layers * index;
  };
  Weight w{};
  w.codes = slice(codes);
  w.scale = slice(scale);
  w.offset = slice(offset);
  w.T = x.dimensions()[0];
  w.D = x.dimensions()[1];
  w.F = y->dimensions()[1];
  w.bits = static_cast<int>(bits);
  w.zero = static_cast<int>(zero);
  w.parts = static_cast<int>(kBlock / group);
  w.half = scale.element_type() == ffi::F16;
  Linear(w, x.typed_data(), y->typed_data(), ChooseIsa(isa));
  return ffi::Error::Success();
}

}  // namespace

void Plain(const Weight& w, const Rounded& x, float* y, const Region& region) {
  RegionOf<PlainDot>(w, x, y, region);
}
#if JAXSERVE_X86
JAXSERVE_AVX2 void Avx2(const Weight& w, const Rounded& x, float* y, const Region& region) {
  RegionOf<Avx2Dot>(w, x, y, region);
}
#endif

}  // namespace jaxserve::groups

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_linear_groups, jaxserve::groups::LinearGroups,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("zero")
                                  .Attr<int64_t>("isa"));

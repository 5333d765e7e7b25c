// linear with group-quantised weights: rounding the activations, sharing out the work, and the
// plain and AVX2 kernels. See cpu_groups.h for the arithmetic.

#include "cpu_groups.h"

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxserve::groups {
namespace {

namespace ffi = xla::ffi;

constexpr int kLargest = 32512;           // 127 * 256: the high byte of a rounded x stays in int8
constexpr int64_t kReuseBytes = 1 << 20;  // of x that stays in cache while panels pass: half an L2
constexpr int64_t kTaskBytes = 32 << 10;  // of weights: below this a task is not worth handing out
constexpr float kPeaks = 0.5f;            // see PeaksOp; rows of normal numbers have about 0.2
constexpr int64_t kAmxFromRows = 4;       // fewer rows are faster without tiles

struct RoundJob {
  const float* x;  // [T, D]
  int64_t T, D;
  const int32_t* remainders;  // the rows that go through twice
  int64_t num_remainders;
  bool split;  // high and low bytes apart
  int zero;
  Rounded to;
};

// A block's largest magnitude, as bits: they order like the magnitudes, infinity and NaN on top.
JAXSERVE_INLINE int32_t PeakBits(const float* x) {
  int32_t peak = 0;
  for (int k = 0; k < kBlock; ++k) {
    int32_t bits;
    std::memcpy(&bits, x + k, sizeof(bits));
    peak = std::max(peak, bits & 0x7fffffff);
  }
  return peak;
}

// The step of a block's rounding: kLargest steps are the largest value. 0 where all is 0 (or below
// 1e-30, where the quotient would overflow), NaN where that value is infinite or NaN: its row's
// outputs are NaN then, and no other row's.
JAXSERVE_INLINE float StepOf(const float* x) {
  int32_t bits = PeakBits(x);
  float peak;
  std::memcpy(&peak, &bits, sizeof(peak));
  if (bits >= 0x7f800000) return std::nanf("");
  return peak > 1e-30f ? peak / kLargest : 0.0f;
}

JAXSERVE_INLINE void RoundValues(const float* x, float step, int32_t* q) {
  float inverse = step > 0 ? 1.0f / step : 0.0f;  // of NaN: 0
  for (int k = 0; k < kBlock; ++k) {
    float value = step > 0 ? x[k] * inverse : 0.0f;
    q[k] = static_cast<int32_t>(std::nearbyint(value));
  }
}

// Rounds one block of a row, or what its first rounding left over.
JAXSERVE_INLINE void RoundBlock(const float* x, bool remainder, const RoundJob& job, int64_t tile,
                                int64_t block, int64_t row) {
  const Rounded& to = job.to;
  float step = StepOf(x);
  int32_t q[kBlock];
  RoundValues(x, step, q);
  if (remainder) {
    float left[kBlock];
    for (int k = 0; k < kBlock; ++k) left[k] = step > 0 ? x[k] - q[k] * step : 0.0f;
    step = StepOf(left);
    RoundValues(left, step, q);
  }
  int64_t at = to.At(tile, block);
  int8_t* values = to.values + at * 64;
  if (job.split) {
    int8_t* high = values + row * kBlock;
    int8_t* low = high + to.rows * kBlock;
    for (int k = 0; k < kBlock; ++k) {
      int32_t h = (q[k] + 128) >> 8;
      high[k] = static_cast<int8_t>(h);
      low[k] = static_cast<int8_t>(q[k] - h * 256);
    }
  } else {
    int16_t* whole = reinterpret_cast<int16_t*>(values) + row * kBlock;
    for (int k = 0; k < kBlock; ++k) whole[k] = static_cast<int16_t>(q[k]);
  }
  to.scale[at + row] = step;
  int length = kBlock / to.parts;
  for (int part = 0; part < to.parts; ++part) {
    int32_t sum = 0;
    for (int k = 0; k < length; ++k) sum += q[part * length + k];
    to.sum[at * to.parts + part * to.rows + row] = step * static_cast<float>(sum);
    to.start[at * to.parts + part * to.rows + row] = -job.zero * sum;
  }
}

struct RoundOp {
  using Signature = void(const RoundJob& job, int64_t tile);
  template <Isa>
  static JAXSERVE_INLINE void Run(const RoundJob& job, int64_t tile) {
    for (int64_t r = 0; r < job.to.rows; ++r) {
      static const float kZeros[kBlock] = {};
      int64_t row = tile * job.to.rows + r, again = row - job.T;
      int64_t source = again < 0 ? row : again < job.num_remainders ? job.remainders[again] : -1;
      for (int64_t b = 0; b < job.to.blocks; ++b) {
        const float* x = source < 0 ? kZeros : job.x + source * job.D + b * kBlock;
        RoundBlock(x, again >= 0, job, tile, b, r);
      }
    }
  }
};

// Marks the rows whose rounding would drown most of their inputs: where the blocks' largest values
// together have more energy than kPeaks times all the others.
struct PeaksOp {
  using Signature = void(const float* x, int64_t rows, int64_t D, int8_t* marks);
  template <Isa>
  static JAXSERVE_INLINE void Run(const float* x, int64_t rows, int64_t D, int8_t* marks) {
    for (int64_t row = 0; row < rows; ++row, x += D) {
      Lanes squares = {};
      float peaks = 0;
      for (int64_t at = 0; at < D; at += kBlock) {
        int32_t bits = PeakBits(x + at);
        float peak;
        std::memcpy(&peak, &bits, sizeof(peak));
        peaks += peak * peak;
        for (int half = 0; half < kBlock; half += kPanel) {
          Lanes v;
          std::memcpy(&v, x + at + half, sizeof(v));
          squares += v * v;
        }
      }
      float energy = 0;
      for (int i = 0; i < kPanel; ++i) energy += squares[i];
      marks[row] = peaks > kPeaks * (energy - peaks);
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
  static JAXSERVE_INLINE IntLanes Dot(const int8_t* codes, const int16_t* x, int quads) {
    int32_t sums[kPanel] = {};
    for (int quad = 0; quad < quads; ++quad) {
      for (int n = 0; n < kPanel; ++n) {
        const int8_t* c = codes + (quad * kPanel + n) * 4;
        const int16_t* v = x + quad * 4;
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
  JAXSERVE_AVX2 static inline IntLanes Dot(const int8_t* codes, const int16_t* x, int quads) {
    __m256i sums[4] = {};  // [i]: two partial sums of each of the features 4 i .. 4 i + 3
    for (int quad = 0; quad < quads; ++quad) {
      int64_t four;
      std::memcpy(&four, x + quad * 4, sizeof(four));
      __m256i v = _mm256_set1_epi64x(four);
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
JAXSERVE_INLINE void RegionOf(const Weight& w, const Rounded& x, const Output& y, const Region& region) {
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
        auto values = reinterpret_cast<const int16_t*>(x.values + at * 64);
        for (int part = 0; part < w.parts; ++part) {
          Lanes ws = Dots::Floats(w, scale), wo = {};
          if (offset != nullptr) wo = Dots::Floats(w, offset);
          const float* sums = x.sum + at * w.parts + part * x.rows;
          for (int64_t r = 0; r < x.rows; ++r) {
            IntLanes dot = Dots::Dot(block + part * quads * kPanel * 4,
                                    values + r * kBlock + part * quads * 4, quads);
            total[r] += __builtin_convertvector(dot, Lanes) * x.scale[at + r] * ws;
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

struct Choice {
  Kernel kernel;
  bool split;
  int64_t multiple;  // tile rows are a multiple of this
};

Choice Choose(Isa isa, int64_t rows) {
#if JAXSERVE_X86
  if (isa == Isa::kAmx && rows >= kAmxFromRows) return {Amx, true, 4};
  if (isa >= Isa::kAvx512) return {Avx512, true, 1};
  if (isa == Isa::kAvx2) return {Avx2, false, 1};
#endif
  return {Plain, false, 1};
}

void Linear(const Weight& w, const float* x, float* y, Isa isa) {
  Team team;
  std::vector<int8_t> marks(w.T);
  auto peaks = Entry<PeaksOp>::For(isa);
  team.ForEach(CeilDiv(w.T, kMaxRows), [&](int64_t task, int) {
    int64_t row = task * kMaxRows;
    peaks(x + row * w.D, std::min<int64_t>(kMaxRows, w.T - row), w.D, marks.data() + row);
  });
  std::vector<int32_t> remainders;
  for (int64_t row = 0; row < w.T; ++row) {
    if (marks[row]) remainders.push_back(static_cast<int32_t>(row));
  }
  int64_t again = static_cast<int64_t>(remainders.size()), T = w.T + again;

  Choice choice = Choose(isa, T);
  int64_t rows = CeilDiv(T, CeilDiv(T, kMaxRows));  // tiles of about the same height
  rows = CeilDiv(rows, choice.multiple) * choice.multiple;
  int64_t tiles = CeilDiv(T, rows), panels = CeilDiv(w.F, kPanel);

  size_t rounded_bytes = Rounded::Bytes(tiles, rows, w.blocks(), w.parts);
  size_t more_bytes = Align64(again * w.F * sizeof(float));
  size_t thread_bytes = Align64(w.D * kPanel);  // one panel's codes, expanded
  char* memory = team.Scratch<char>(rounded_bytes + more_bytes + thread_bytes * NumThreads());
  char* expanded = memory + rounded_bytes + more_bytes;
  Output out{y, reinterpret_cast<float*>(memory + rounded_bytes), w.T, again};
  // AVX-512 multiplies unsigned codes: signed ones are read as code + 128.
  int zero = w.bits == 8 ? 128 : w.zero;
  RoundJob job{x, w.T, w.D, remainders.data(), again, choice.split, zero,
               Rounded(memory, tiles, rows, w.blocks(), w.parts)};
  auto round = Entry<RoundOp>::For(isa);
  team.ForEach(tiles, [&](int64_t tile, int) { round(job, tile); });

  int64_t task_tiles = std::clamp<int64_t>(kReuseBytes / (rows * w.D * 2), 1, tiles);
  int64_t row_tasks = CeilDiv(tiles, task_tiles);
  int64_t worth = CeilDiv(kTaskBytes, w.blocks() * w.block_bytes() * std::min(rows, int64_t{4}));
  int64_t task_panels = std::max(worth, panels / (8 * NumThreads()));
  int64_t across = CeilDiv(panels, task_panels);
  team.ForEach(across * row_tasks, [&](int64_t task, int thread) {
    int64_t tile = task / across * task_tiles, panel = task % across * task_panels;
    Region region{tile, std::min(tile + task_tiles, tiles), panel,
                  std::min(panel + task_panels, panels)};
    choice.kernel(w, job.to, out, region, reinterpret_cast<int8_t*>(expanded + thread * thread_bytes));
  });
  for (int64_t i = 0; i < again; ++i) {
    float* row = y + remainders[i] * w.F;
    for (int64_t f = 0; f < w.F; ++f) row[f] += out.more[i * w.F + f];
  }
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

void Plain(const Weight& w, const Rounded& x, const Output& y, const Region& region, int8_t*) {
  RegionOf<PlainDot>(w, x, y, region);
}
#if JAXSERVE_X86
JAXSERVE_AVX2 void Avx2(const Weight& w, const Rounded& x, const Output& y, const Region& region,
                        int8_t*) {
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

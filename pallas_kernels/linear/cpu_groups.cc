// linear with group-quantised weights: rounding the activations, sharing out the work, and the
// plain and AVX2 kernels. See cpu_groups.h for the arithmetic.

#include "cpu_groups.h"

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxserve::groups {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxRows = 16;  // of a tile
constexpr int64_t kReuseBytes = 1 << 20;  // of x that stays in cache while panels pass: half an L2
constexpr int64_t kTaskBytes = 32 << 10;  // of weights: below this a task is not worth handing out
constexpr int64_t kTilesFromRows = 3;     // fewer rows wait for memory, whatever multiplies them

// The rounded activations, in tiles of `rows` rows (the last one filled up with zeros).
struct Rounded {
  int64_t rows, tiles, blocks;
  int parts, bytes;  // bytes of a value: kFine or 1
  int8_t* values;    // [tile][block][the bytes, highest first][rows][32]
  float* step;       // [tile][block][rows]
  float* sum;        // [tile][block][part][rows]: what a group's activations add up to
  bool* wide;        // [tile][block]: whether any row's block is

  static size_t Bytes(int64_t tiles, int64_t rows, int64_t blocks, int parts, int bytes) {
    size_t n = tiles * rows * blocks;
    return Align64(n * bytes * kBlock) + Align64(n * 4) + Align64(n * parts * 4) + Align64(tiles * blocks);
  }
  Rounded(char* memory, int64_t tiles, int64_t rows, int64_t blocks, int parts, int bytes)
      : rows(rows), tiles(tiles), blocks(blocks), parts(parts), bytes(bytes) {
    size_t n = tiles * rows * blocks;
    auto take = [&](size_t bytes) {
      char* at = memory;
      memory += Align64(bytes);
      return at;
    };
    values = reinterpret_cast<int8_t*>(take(n * bytes * kBlock));
    step = reinterpret_cast<float*>(take(n * 4));
    sum = reinterpret_cast<float*>(take(n * parts * 4));
    wide = reinterpret_cast<bool*>(take(tiles * blocks));
  }
  int64_t At(int64_t tile, int64_t block) const { return (tile * blocks + block) * rows; }
  int64_t plane_bytes() const { return rows * kBlock; }  // of a tile's block
  int8_t* Planes(int64_t tile, int64_t block) const {
    return values + bytes * kBlock * At(tile, block);
  }
};

struct RoundJob {
  const void* x;  // [T, D]
  bool bfloat16;  // or float32
  int64_t T, D;
  Rounded to;
};

// They order as magnitudes do.
JAXSERVE_INLINE int32_t MagnitudeBits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffff;
}

// A block's largest magnitude, by its bits; from 0x7f800000 on where one is infinite or NaN.
JAXSERVE_INLINE int32_t PeakBits(const float* x) {
  int32_t peak = 0;
  for (int k = 0; k < kBlock; ++k) peak = std::max(peak, MagnitudeBits(x[k]));
  return peak;
}

// Rounds one block of a row to kFine bytes.
JAXSERVE_INLINE void RoundFinely(const float* x, const RoundJob& job, int64_t tile, int64_t block,
                                 int64_t row) {
  const Rounded& to = job.to;
  const int32_t peak = PeakBits(x);
  int many = 0;
  for (int k = 0; k < kBlock; ++k) many += MagnitudeBits(x[k]) > peak - kFarBelow;
  const FineSteps fine(peak, many);
  int32_t sums[kFine][2] = {};  // by part
  int8_t* bytes = to.Planes(tile, block) + row * kBlock;
  for (int k = 0; k < kBlock; ++k) {
    const float value = fine.inverse > 0 ? x[k] * fine.inverse : 0.0f;
    const auto q = static_cast<uint32_t>(static_cast<int32_t>(std::nearbyint(value))) << fine.shift();
    const uint32_t digits = (q + 0x80808080u) ^ 0x80808080u;
    for (int i = 0; i < kFine; ++i) {
      const auto digit = static_cast<int8_t>(digits >> 8 * (kFine - 1 - i));
      bytes[i * to.plane_bytes() + k] = digit;
      sums[i][k * to.parts / kBlock] += digit;
    }
  }
  const int64_t first = to.At(tile, block);
  to.step[first + row] = fine.step;
  to.wide[tile * to.blocks + block] |= fine.wide;
  for (int part = 0; part < to.parts; ++part) {
    float sum[kFine];
    for (int i = 0; i < kFine; ++i) sum[i] = static_cast<float>(sums[i][part]);
    to.sum[first * to.parts + part * to.rows + row] =
        fine.step * (sum[0] * 65536.0f + (sum[1] * 256.0f + (sum[2] + sum[3] * (1.0f / 256))));
  }
}

// Rounds one block of a row to bytes.
JAXSERVE_INLINE void RoundToBytes(const float* x, const RoundJob& job, int64_t tile, int64_t block,
                                  int64_t row) {
  constexpr int kHalf = kBlock / 2;
  const Rounded& to = job.to;
  const int exponent = (PeakBits(x) + kRoundUp) >> 23;
  const bool zero = exponent < kLeastExponent, bad = exponent > kMostExponent;
  const float inverse = zero || bad ? 0.0f : PowerOfTwo(254 + kStepsInByte - exponent);
  to.step[to.At(tile, block) + row] = zero ? 0.0f : bad ? std::nanf("") : PowerOfTwo(exponent - kStepsInByte);
  for (int half = 0; half < 2; ++half) {
    const Lanes q = inverse > 0 ? Round(LoadLanes(x + half * kHalf) * inverse) : Fill(0.0f);
    int8_t codes __attribute__((vector_size(kHalf)));
    codes = __builtin_convertvector(__builtin_convertvector(q, IntLanes), decltype(codes));
    std::memcpy(to.Planes(tile, block) + row * kBlock + half * kHalf, &codes, sizeof(codes));
  }
}

JAXSERVE_INLINE void Read(const RoundJob& job, int64_t at, float* to) {
  for (int half = 0; half < kBlock; half += 16) {
    StoreLanes(to + half, job.bfloat16 ? Widen(static_cast<const BFloat16*>(job.x) + at + half)
                                       : Widen(static_cast<const float*>(job.x) + at + half));
  }
}

// Blocks [begin, end) of a tile.
struct RoundOp {
  using Signature = void(const RoundJob& job, int64_t tile, int64_t begin, int64_t end);
  template <Isa>
  static JAXSERVE_INLINE void Run(const RoundJob& job, int64_t tile, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      job.to.wide[tile * job.to.blocks + block] = false;
      for (int64_t r = 0; r < job.to.rows; ++r) {
        int64_t row = tile * job.to.rows + r;
        float x[kBlock] = {};
        if (row < job.T) Read(job, row * job.D + block * kBlock, x);
        job.to.bytes == 1 ? RoundToBytes(x, job, tile, block, r) : RoundFinely(x, job, tile, block, r);
      }
    }
  }
};

template <typename Op>
using Entry = PerIsa<Op, typename Op::Signature>;

// ---- plain and AVX2 ----------------------------------------------------------------------------

// A block's codes less their zero point, as int8 [8 quads][16][4]. zeros: a group's own, in eighths, as what
// comes of it then is; or null.
JAXSERVE_INLINE const int8_t* BlockCodes(const Weight& w, const uint8_t* codes, const uint8_t* zeros, int8_t* to) {
  if (w.bits == 8) return reinterpret_cast<const int8_t*>(codes);
  for (int i = 0; i < 256; ++i) {
    const int low = codes[i] & 15, high = codes[i] >> 4, zero = zeros == nullptr ? w.zero : zeros[i / 4 % kPanel];
    to[i] = static_cast<int8_t>(zeros == nullptr ? low - zero : 8 * low - zero);
    to[i + 256] = static_cast<int8_t>(zeros == nullptr ? high - zero : 8 * high - zero);
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

// A rectangle of the output: tiles of rows times panels of features.
struct Region {
  int64_t tile0, tile1, panel0, panel1;
};

template <typename Dots>
JAXSERVE_INLINE void RegionOf(const Weight& w, const Rounded& x, void* y, const Region& region) {
  int quads = kBlock / 4 / w.parts;
  for (int64_t panel = region.panel0; panel < region.panel1; ++panel) {
    for (int64_t tile = region.tile0; tile < region.tile1; ++tile) {
      const uint8_t* codes = w.CodesOf(panel);
      const uint8_t* scale = w.OfPanel(w.scale, panel);
      const uint8_t* offset = w.OfPanel(w.offset, panel);
      Lanes total[kMaxRows] = {};
      for (int64_t b = 0; b < x.blocks; ++b, codes += w.block_bytes()) {
        alignas(64) int8_t expanded[kBlock * kPanel];
        const uint8_t* zeros = w.zeros == nullptr ? nullptr : w.zeros + (panel * x.blocks + b) * kPanel;
        const int8_t* block = BlockCodes(w, codes, zeros, expanded);
        int64_t at = x.At(tile, b);
        const bool wide = x.wide[tile * x.blocks + b];
        for (int part = 0; part < w.parts; ++part) {
          Lanes ws = Dots::Floats(w, scale), wo = {};
          if (offset != nullptr) wo = Dots::Floats(w, offset);
          const float* sums = x.sum + at * w.parts + part * x.rows;
          for (int64_t r = 0; r < x.rows; ++r) {
            const int8_t* bytes = x.Planes(tile, b) + r * kBlock + part * quads * 4;
            auto dot = [&](int i) {
              const int8_t* digits = bytes + i * x.plane_bytes();
              return __builtin_convertvector(Dots::Dot(block + part * quads * kPanel * 4, digits, quads), Lanes);
            };
            const float step = x.step[at + r];
            if (wide) total[r] += dot(3) * (step * (1.0f / 256)) * ws;
            Lanes sum = dot(0);
            if (x.bytes > 1) sum = sum * 65536.0f + (dot(1) * 256.0f + dot(2));
            total[r] += sum * step * ws;
            if (offset != nullptr) total[r] += wo * sums[r];
          }
          scale += w.scale_bytes();
          if (offset != nullptr) offset += w.scale_bytes();
        }
      }
      const float unit = w.zeros == nullptr ? 1.0f : 0.125f;
      for (int64_t r = 0; r < x.rows; ++r) StoreRow(w, y, tile * x.rows + r, panel, total[r] * unit);
    }
  }
}

void Plain(const Weight& w, const Rounded& x, void* y, const Region& region) {
  RegionOf<PlainDot>(w, x, y, region);
}
#if JAXSERVE_X86
JAXSERVE_AVX2 void Avx2(const Weight& w, const Rounded& x, void* y, const Region& region) {
  RegionOf<Avx2Dot>(w, x, y, region);
}
#endif

// ---- the call ----------------------------------------------------------------------------------

auto* Choose(Isa isa) {
#if JAXSERVE_X86
  if (isa >= Isa::kAvx2) return Avx2;
#endif
  return Plain;
}

template <typename Number>
struct GateOp {
  using Signature = void(Activation activation, const float* gate, const float* up, Number* y,
                         int64_t count);
  template <Isa>
  static JAXSERVE_INLINE void Run(Activation activation, const float* gate, const float* up, Number* y,
                                  int64_t count) {
    for (int64_t i = 0; i < count; i += kPanel) {
      Lanes g = LoadSome(gate + i, count - i), u = LoadSome(up + i, count - i);
      StoreSome(y + i, Gate(activation, g, u), count - i);
    }
  }
};

// y = x w^T for each of the weights, which are alike but for their features.
struct Part {
  const Weight* w;
  void* y;
};

// Activations [T, D], float32 or bfloat16, and the bytes they are rounded to.
struct Input {
  const void* x;
  bool bfloat16;
  int bytes;
};

void MultiplyBytes(const Team& team, const std::vector<Part>& parts, const Input& input, char* memory,
                   Isa isa) {
  const Weight& w = *parts[0].w;
  int64_t tiles = CeilDiv(w.T, kMaxRows), rows = CeilDiv(w.T, tiles);
  RoundJob job{input.x, input.bfloat16, w.T, w.D,
               Rounded(memory, tiles, rows, w.blocks(), w.parts, input.bytes)};
  auto round = Entry<RoundOp>::For(isa);
  int64_t cuts = tiles < NumThreads() ? std::min<int64_t>(NumThreads(), w.T) : 1;
  team.ForEach(tiles * cuts, [&](int64_t task, int) {
    int64_t cut = task % cuts;
    round(job, task / cuts, w.blocks() * cut / cuts, w.blocks() * (cut + 1) / cuts);
  });

  auto* kernel = Choose(isa);
  int64_t task_tiles = std::clamp<int64_t>(kReuseBytes / (rows * w.D * input.bytes), 1, tiles);
  int64_t worth = CeilDiv(kTaskBytes, w.blocks() * w.block_bytes() * std::min(rows, int64_t{4}));
  int64_t panels = 0, across = 0;
  for (const Part& part : parts) panels += CeilDiv(part.w->F, kPanel);
  int64_t task_panels = std::max(worth, panels / (8 * NumThreads()));
  auto tasks_of = [&](const Part& part) {
    return CeilDiv(CeilDiv(part.w->F, kPanel), task_panels);
  };
  for (const Part& part : parts) across += tasks_of(part);
  team.ForEach(across * CeilDiv(tiles, task_tiles), [&](int64_t task, int) {
    int64_t tile = task / across * task_tiles, index = task % across;
    const Part* part = parts.data();
    while (index >= tasks_of(*part)) index -= tasks_of(*part++);
    int64_t panel = index * task_panels, end = CeilDiv(part->w->F, kPanel);
    kernel(*part->w, job.to, part->y,
           {tile, std::min(tile + task_tiles, tiles), panel, std::min(panel + task_panels, end)});
  });
}

// Without AVX-512: a gated product's two factors go to scratch memory and are joined afterwards.
void MultiplyAll(const std::vector<Product>& products, const Input& input, Isa isa) {
  Team team;
  size_t factor_bytes = 0, rounded_bytes = 0;
  for (const Product& p : products) {
    int64_t tiles = CeilDiv(p.w.T, kMaxRows), rows = CeilDiv(p.w.T, tiles);
    for (int parts : {p.w.parts, p.up.parts}) {
      rounded_bytes = std::max(rounded_bytes, Rounded::Bytes(tiles, rows, p.w.blocks(), parts, input.bytes));
    }
    if (p.gated) factor_bytes += 2 * Align64(p.w.T * p.w.F * sizeof(float));
  }
  char* memory = team.Scratch<char>(rounded_bytes + factor_bytes);
  char* factors = memory + rounded_bytes;
  std::vector<Part> all;
  for (const Product& p : products) {
    if (!p.gated) {
      all.push_back({&p.w, p.y});
      continue;
    }
    for (const Weight* w : {&p.w, &p.up}) {
      all.push_back({w, reinterpret_cast<float*>(factors)});
      factors += Align64(p.w.T * p.w.F * sizeof(float));
    }
  }
  for (size_t begin = 0, end; begin < all.size(); begin = end) {
    const Weight& first = *all[begin].w;
    auto alike = [&](const Weight& w) {
      return w.bits == first.bits && w.parts == first.parts;
    };
    for (end = begin + 1; end < all.size() && alike(*all[end].w);) ++end;
    MultiplyBytes(team, {all.begin() + begin, all.begin() + end}, input, memory, isa);
  }
  factors = memory + rounded_bytes;
  for (const Product& p : products) {
    if (!p.gated) continue;
    const float* first = reinterpret_cast<float*>(factors);
    const float* second = first + Align64(p.w.T * p.w.F * sizeof(float)) / sizeof(float);
    factors += 2 * Align64(p.w.T * p.w.F * sizeof(float));
    team.ForEach(p.w.T, [&](int64_t row, int) {
      const int64_t at = row * p.w.F;
      auto gate = [&](auto* y) {
        using Number = std::remove_pointer_t<decltype(y)>;
        Entry<GateOp<Number>>::For(isa)(p.activation, first + at, second + at, y + at, p.w.F);
      };
      p.bfloat16 ? gate(reinterpret_cast<BFloat16*>(p.y)) : gate(p.y);
    });
  }
}

// One layer of a weight whose codes, scale and offset (empty: none) have a leading layer axis, see
// Weight; form: bits, group, zero.
Weight WeightOf(const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scale,
                const ffi::AnyBuffer& offset, int64_t index, const int64_t* form) {
  int64_t layers = codes.dimensions()[0];
  auto slice = [&](const ffi::AnyBuffer& all) -> const uint8_t* {
    if (all.element_count() == 0) return nullptr;
    return static_cast<const uint8_t*>(all.untyped_data()) + all.size_bytes() / layers * index;
  };
  Weight w{};
  w.codes = slice(codes);
  w.scale = slice(scale);
  (offset.element_type() == ffi::U8 ? w.zeros : w.offset) = slice(offset);
  w.bits = static_cast<int>(form[0]);
  w.parts = static_cast<int>(kBlock / form[1]);
  w.zero = static_cast<int>(form[2]);
  w.half = scale.element_type() == ffi::F16;
  return w;
}

// What rows of zeros come to, from row `used` of y on: what is added, or nothing.
void FillUnused(const Product& product, ffi::AnyBuffer y, int64_t used) {
  const size_t row_bytes = y.size_bytes() / std::max<int64_t>(y.dimensions()[0], 1);
  auto* to = static_cast<char*>(y.untyped_data()) + used * row_bytes;
  const size_t size = y.size_bytes() - used * row_bytes;
  const auto* plus = static_cast<const char*>(product.w.plus);
  plus == nullptr ? std::memset(to, 0, size) : std::memcpy(to, plus + used * row_bytes, size);
}

// args: x [T, D], layer [], then codes, scale and offset (uint8: zero points) of each weight, then, of one
// weight, what is added to the result, or an empty array. forms: bits, group and zero of each.
// activation < 0: one result [T, F] a weight; else one, of two weights, gated. x is float32 or, where there
// are instructions for it or `bytes` is 1, bfloat16; then results may be either. bytes: of a rounded activation,
// kFine or 1.
ffi::Error LinearGroups(ffi::RemainingArgs args, ffi::RemainingRets results,
                        ffi::Span<const int64_t> forms, int64_t activation, int64_t bytes, int64_t isa) {
  auto buffer = [&](size_t i) { return args.get<ffi::AnyBuffer>(i).value(); };
  ffi::AnyBuffer x = buffer(0), layer = buffer(1);
  int64_t index = *static_cast<const int32_t*>(layer.untyped_data());
  const int64_t T = x.dimensions()[0], D = x.dimensions()[1];
  const bool gated = activation >= 0, bfloat16 = x.element_type() == ffi::BF16;
  const int64_t used = UsedRows(x.untyped_data(), T, D, bfloat16);
  const bool amx = ChooseIsa(isa) == Isa::kAmx;
  if (bytes != 1 && bytes != kFine) return ffi::Error::InvalidArgument("linear: bytes must be 1 or 4");
  if (bfloat16 && bytes > 1 && ChooseIsa(isa) < Isa::kAvx512Bf16) {
    return ffi::Error::InvalidArgument("linear: no instructions for bfloat16");
  }
  std::vector<Product> products;
  for (size_t i = 0; i < results.size(); ++i) {
    auto y = results.get<ffi::AnyBuffer>(i).value();
    Product product{};
    product.gated = gated;
    product.activation = static_cast<Activation>(gated ? activation : 0);
    product.y = static_cast<float*>(y->untyped_data());
    product.bfloat16 = y->element_type() == ffi::BF16;
    if (product.bfloat16 && !bfloat16) return ffi::Error::InvalidArgument("linear: results are float32");
    auto read = [&](size_t n, Weight* w) {
      ffi::AnyBuffer codes = buffer(2 + 3 * n);
      if (index < 0 || index >= codes.dimensions()[0]) return false;
      *w = WeightOf(codes, buffer(3 + 3 * n), buffer(4 + 3 * n), index, forms.begin() + 3 * n);
      w->T = used;
      w->D = D;
      w->F = y->dimensions()[1];
      w->bfloat16 = product.bfloat16 && !gated;
      return true;
    };
    bool found = read(i, &product.w);
    ffi::AnyBuffer plus = buffer(args.size() - 1);
    if (plus.element_count() > 0) product.w.plus = plus.untyped_data();
    if (gated) found = found && read(i + 1, &product.up);
    else product.up = product.w;
    if (!found) return ffi::Error::InvalidArgument("linear: no such layer");
    for (const Weight* w : {&product.w, &product.up}) {
      if ((bytes == 1 ? w->offset : w->zeros) != nullptr) {
        return ffi::Error::InvalidArgument("linear: int8 inputs ask for zero points, others for offsets");
      }
    }
    FillUnused(product, *y, used);
    products.push_back(product);
  }
  if (used == 0) return ffi::Error::Success();
  const Input input{x.untyped_data(), bfloat16, static_cast<int>(bytes)};
#if JAXSERVE_X86
  if (bytes > 1 && bfloat16) {
    auto multiply = amx ? MultiplyBfloat16Tiles : MultiplyBfloat16Pairs;
    multiply(products.data(), products.size(), x.untyped_data());
    return ffi::Error::Success();
  }
  if (bytes > 1 && amx && T >= kTilesFromRows) {  // by all rows: a step's padding must not choose
    MultiplyTiles(products.data(), products.size(), static_cast<const float*>(x.untyped_data()));
    return ffi::Error::Success();
  }
  if (ChooseIsa(isa) >= Isa::kAvx512) {
    MultiplyDigits(products.data(), products.size(), x.untyped_data(), bfloat16, static_cast<int>(bytes));
    return ffi::Error::Success();
  }
#endif
  MultiplyAll(products, input, ChooseIsa(isa));
  return ffi::Error::Success();
}

}  // namespace

}  // namespace jaxserve::groups

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_linear_groups, jaxserve::groups::LinearGroups,
                              xla::ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("forms")
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("bytes")
                                  .Attr<int64_t>("isa"));

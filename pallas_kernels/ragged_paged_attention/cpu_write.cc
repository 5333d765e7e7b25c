// Writes a step's keys and values into their pages, as codes where the cache holds codes; see cpu.h.

#include <algorithm>
#include <limits>

#include "cpu.h"

namespace jaxserve::attention {
namespace {

constexpr int64_t kTaskTokens = 32;  // writing fewer is not worth handing out

// One vector of E numbers, its elements `stride` apart in the page. Codes make its largest magnitude
// the largest code, as kv.quantise does.
template <typename KV, typename Number>
struct WriteOp {
  using Signature = void(const Number* from, int64_t E, KV* to, int64_t stride, float* scale);
  template <Isa>
  static JAXSERVE_INLINE void Run(const Number* from, int64_t E, KV* to, int64_t stride,
                                  float* scale) {
    constexpr float kLargest = std::numeric_limits<float>::max();
    float inverse = 1;
    if constexpr (kCodes<KV>) {
      Lanes top = Fill(0);
      for (int64_t e = 0; e < E; e += kLanes) top = Max(top, Magnitude(LoadSome(from + e, E - e)));
      float amax = std::min(MaxOf(top), kLargest);
      *scale = amax > 0 ? std::max(amax * (1 / kLargestCode<KV>), std::numeric_limits<float>::min()) : 1;
      inverse = 1 / *scale;
    }
    for (int64_t e = 0; e < E; e += kLanes) {
      Lanes x = LoadSome(from + e, E - e);
      if constexpr (kCodes<KV>) {
        x = Max(Min(x, Fill(kLargest)), Fill(-kLargest)) * inverse;
        x = Max(Min(x, Fill(kLargestCode<KV>)), Fill(-kLargestCode<KV>));
      }
      KV part[kLanes];
      Narrow(x, part);
      int64_t count = std::min<int64_t>(kLanes, E - e);
      for (int64_t i = 0; i < count; ++i) to[(e + i) * stride] = part[i];
    }
  }
};

template <typename KV, typename Number>
void WriteVectors(const Call<KV>& call, int64_t s, int64_t j, int64_t t) {
  auto write = PerIsa<WriteOp<KV, Number>, typename WriteOp<KV, Number>::Signature>::For(call.isa);
  int64_t position = call.FirstPosition(s) + t - call.cu_q_len_S1[s];
  int64_t from = (t * call.J + j) * call.E;
  float* k_scale = kCodes<KV> ? call.ScaleAt(s, j, position) : nullptr;
  float* v_scale = kCodes<KV> ? k_scale + call.K : nullptr;
  write(static_cast<const Number*>(call.k_TJE) + from, call.E, call.KeyAt(s, j, position), call.lanes(),
        k_scale);
  write(static_cast<const Number*>(call.v_TJE) + from, call.E, call.ValueAt(s, j, position), 1, v_scale);
}

}  // namespace

template <typename KV>
void WriteToken(const Call<KV>& call, int64_t s, int64_t j, int64_t t) {
  call.bfloat16 ? WriteVectors<KV, BFloat16>(call, s, j, t) : WriteVectors<KV, float>(call, s, j, t);
}

template <typename KV>
void WriteChunks(const Call<KV>& call, const Team& team) {
  const int32_t* starts = call.cu_q_len_S1;
  int64_t row = 0;
  while (row < call.num_rows && call.Tokens(row) <= 1) ++row;
  const int64_t begin = starts[row], used = starts[call.num_rows];
  team.ForEach(CeilDiv(used - begin, kTaskTokens), [&](int64_t task, int) {
    int64_t first = begin + task * kTaskTokens, end = std::min(first + kTaskTokens, used);
    int64_t s = std::upper_bound(starts, starts + call.num_rows, first) - starts - 1;
    for (int64_t t = first; t < end; ++t) {
      while (t >= starts[s + 1]) ++s;
      for (int64_t j = 0; j < call.J && call.Tokens(s) > 1; ++j) WriteToken(call, s, j, t);
    }
  });
}

template void WriteToken(const Call<float>&, int64_t, int64_t, int64_t);
template void WriteChunks(const Call<float>&, const Team&);
template void WriteToken(const Call<BFloat16>&, int64_t, int64_t, int64_t);
template void WriteChunks(const Call<BFloat16>&, const Team&);
template void WriteToken(const Call<int16_t>&, int64_t, int64_t, int64_t);
template void WriteChunks(const Call<int16_t>&, const Team&);
template void WriteToken(const Call<int8_t>&, int64_t, int64_t, int64_t);
template void WriteChunks(const Call<int8_t>&, const Team&);
template void WriteToken(const Call<Float8>&, int64_t, int64_t, int64_t);
template void WriteChunks(const Call<Float8>&, const Team&);

}  // namespace jaxserve::attention

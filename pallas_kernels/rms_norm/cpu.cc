// rms_norm on the CPU: each row by its root mean square, times a weight.

#include <algorithm>
#include <cmath>

#include "../native_math.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve::rms_norm {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kLanes = 16;
constexpr int64_t kTaskBytes = 64 << 10;  // less is not worth handing out

template <typename Number>
struct NormOp {
  using Signature = void(const Number* x, const float* weight, int64_t D, float eps, Number* out);
  template <Isa>
  static JAXSERVE_INLINE void Run(const Number* x, const float* weight, int64_t D, float eps,
                                  Number* out) {
    Lanes squares = Fill(0);
    for (int64_t d = 0; d < D; d += kLanes) {
      Lanes v = LoadSome(x + d, D - d);
      squares += v * v;
    }
    const float inverse = 1 / std::sqrt(SumOf(squares) / D + eps);
    for (int64_t d = 0; d < D; d += kLanes) {
      const int64_t n = D - d;
      StoreSome(out + d, LoadSome(x + d, n) * inverse * LoadSome(weight + d, n), n);
    }
  }
};

template <typename Number>
void Norm(const Number* x, const float* weight, int64_t rows, int64_t D, float eps, Isa isa,
          Number* out) {
  auto norm = PerIsa<NormOp<Number>, typename NormOp<Number>::Signature>::For(isa);
  const int64_t rows_a_task = std::max<int64_t>(1, kTaskBytes / (D * sizeof(Number)));
  Team team;
  team.ForEach(CeilDiv(rows, rows_a_task), [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * rows_a_task);
    for (int64_t r = task * rows_a_task; r < end; ++r) norm(x + r * D, weight, D, eps, out + r * D);
  });
}

// x [..., D] and the output alike; of weight [L, D] row `layer`.
ffi::Error RmsNorm(ffi::AnyBuffer x, ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::S32> layer,
                   ffi::Result<ffi::AnyBuffer> out, float eps, int64_t isa) {
  const int64_t D = weight.dimensions()[1], index = layer.typed_data()[0];
  if (index < 0 || index >= weight.dimensions()[0]) {
    return ffi::Error::InvalidArgument("rms_norm: no such layer");
  }
  if (x.dimensions().size() == 0 || x.dimensions().back() != D) {
    return ffi::Error::InvalidArgument("rms_norm: the weight is not as long as a row");
  }
  const float* row = weight.typed_data() + index * D;
  const int64_t rows = x.element_count() / D;
  if (x.element_type() == ffi::F32) {
    Norm(x.typed_data<float>(), row, rows, D, eps, ChooseIsa(isa), out->typed_data<float>());
  } else if (x.element_type() == ffi::BF16) {
    Norm(static_cast<const BFloat16*>(x.untyped_data()), row, rows, D, eps, ChooseIsa(isa),
         static_cast<BFloat16*>(out->untyped_data()));
  } else {
    return ffi::Error::InvalidArgument("rms_norm: x must be float32 or bfloat16");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve::rms_norm

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_rms_norm, jaxserve::rms_norm::RmsNorm,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()              // x
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // weight
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // layer
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("isa"));

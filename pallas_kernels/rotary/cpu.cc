// rotary on the CPU: turns the heads of queries and keys.

#include <utility>

#include "../native_math.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve::rotary {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kLanes = 16;
constexpr int64_t kTaskBytes = 64 << 10;  // less is not worth handing out

// Heads [T, count, E], where they go, and the tables [T, R] that turn them.
struct Heads {
  const void* x;
  void* to;
  int64_t count, E;
  const float *cos, *sin;
  int64_t R;
};

template <typename Number>
struct RotateOp {
  using Signature = void(const Heads& heads, int64_t begin, int64_t end);
  template <Isa>
  static JAXSERVE_INLINE void Run(const Heads& heads, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *cos = heads.cos + t * heads.R, *sin = heads.sin + t * heads.R;
      const Number* head = static_cast<const Number*>(heads.x) + t * heads.count * heads.E;
      Number* to = static_cast<Number*>(heads.to) + t * heads.count * heads.E;
      for (int64_t h = 0; h < heads.count; ++h, head += heads.E, to += heads.E) {
        for (int64_t i = 0; i < heads.R; i += kLanes) {
          const int64_t n = heads.R - i;
          Lanes c = LoadSome(cos + i, n), s = LoadSome(sin + i, n);
          Lanes first = LoadSome(head + i, n), second = LoadSome(head + heads.R + i, n);
          StoreSome(to + i, first * c - second * s, n);
          StoreSome(to + heads.R + i, second * c + first * s, n);
        }
        std::memcpy(to + 2 * heads.R, head + 2 * heads.R, (heads.E - 2 * heads.R) * sizeof(Number));
      }
    }
  }
};

// q [T, H, E] and k [T, J, E], turned by cos and sin [T, R].
ffi::Error Rotate(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::Buffer<ffi::F32> cos,
                  ffi::Buffer<ffi::F32> sin, ffi::Result<ffi::AnyBuffer> new_q,
                  ffi::Result<ffi::AnyBuffer> new_k, int64_t isa) {
  auto run = [&](ffi::AnyBuffer& x, ffi::AnyBuffer& to, auto number) {
    using Number = decltype(number);
    auto dims = x.dimensions();
    Heads heads{x.untyped_data(), to.untyped_data(), dims[1], dims[2],
                cos.typed_data(), sin.typed_data(), cos.dimensions()[1]};
    if (2 * heads.R > heads.E) return ffi::Error::InvalidArgument("rotary: more pairs than elements");
    const int64_t T = dims[0], row_bytes = dims[1] * dims[2] * sizeof(Number);
    const int64_t rows = std::max<int64_t>(1, kTaskBytes / row_bytes);
    auto rotate = PerIsa<RotateOp<Number>, typename RotateOp<Number>::Signature>::For(ChooseIsa(isa));
    Team team;
    team.ForEach(CeilDiv(T, rows), [&](int64_t task, int) {
      rotate(heads, task * rows, std::min(T, (task + 1) * rows));
    });
    return ffi::Error::Success();
  };
  for (auto [x, to] : {std::pair{&q, &*new_q}, std::pair{&k, &*new_k}}) {
    ffi::Error error = ffi::Error::Success();
    if (x->element_type() == ffi::F32) error = run(*x, *to, float{});
    else if (x->element_type() == ffi::BF16) error = run(*x, *to, BFloat16{});
    else error = ffi::Error::InvalidArgument("rotary: heads must be float32 or bfloat16");
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve::rotary

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_rotate, jaxserve::rotary::Rotate,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()              // q
                                  .Arg<xla::ffi::AnyBuffer>()              // k
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // cos
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()  // sin
                                  .Ret<xla::ffi::AnyBuffer>()              // q
                                  .Ret<xla::ffi::AnyBuffer>()              // k
                                  .Attr<int64_t>("isa"));

// The sampler's products and attention on CPUs, as XLA FFI handlers.
//
// product     x [n, D] times packed weights -> [n, E], for the rows in use (product.h)
// rotate      rotary positions of queries or keys
// attend      one token per row: write its key and value into its page, attend to the row's pages
// attend_new  new tokens of some sequences: attend to the sequence's pages and to each other
//
// A row's result does not depend on the other rows of a call: the order of sums is fixed.

#include "attention.h"
#include "product.h"

namespace {

// Rotate pairs (i, i + T) of the first 2 T components of x [n, heads, K] by cos and sin [n, T].
ffi::Error rotate(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                  ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = x.dimensions();
  const int64_t n = shape[0], heads = shape[1], K = shape[2], T = cos.dimensions()[1];
  if (2 * T > K || cos.dimensions()[0] != n)
    return ffi::Error::InvalidArgument("rotate: shapes do not fit");
  for (int64_t i = 0; i < n; ++i) {
    const float *c = cos.typed_data() + i * T, *s = sin.typed_data() + i * T;
    for (int64_t h = 0; h < heads; ++h) {
      const float* from = x.typed_data() + (i * heads + h) * K;
      float* to = y->typed_data() + (i * heads + h) * K;
      for (int64_t t = 0; t < T; ++t) {
        const float a = from[t], b = from[t + T];
        to[t] = a * c[t] - b * s[t];
        to[t + T] = b * c[t] + a * s[t];
      }
      for (int64_t t = 2 * T; t < K; ++t) to[t] = from[t];
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_rotate, rotate,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("rounds"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_attend, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxrl_async_attend_new, attend_new,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap"));

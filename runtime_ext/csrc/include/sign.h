// Formulas and wire layout of the one-bit codecs. runtime_ext/reference/ is the specification.
#pragma once

#include "portable.h"

namespace cgx {

// Values that Python passes.
constexpr int kEfSignSgd = 0;
constexpr int kOneBit = 1;

// Bytes of a bucket's means on the wire. A message is the means of every bucket, float32, then one bit per
// element.
CGX_INLINE constexpr int mean_bytes(int kind) { return kind == kOneBit ? 8 : 4; }

// The numbers to which elements of either sign decode.
struct Means {
    float low;
    float high;
};

// -0 counts as negative, and so does a NaN with the sign bit.
CGX_INLINE bool is_positive(float x) { return static_cast<int32_t>(float_bits(x)) >= 0; }

// Every NaN gets the same bits, because those of a sum of NaNs depend on the machine. A count of 0 counts as
// 1.
CGX_INLINE float make_mean(float sum, int64_t count) {
    const float mean = sum / static_cast<float>(count > 0 ? count : 1);
    return mean == mean ? mean : bits_float(0x7FC00000u);
}

CGX_INLINE Means means_around_zero(float mean) { return {-mean, mean}; }

CGX_INLINE float choose_mean(bool positive, Means means) { return positive ? means.high : means.low; }

}  // namespace cgx

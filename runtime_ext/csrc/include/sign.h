// Formulas and wire layout of the one-bit codecs. runtime_ext/reference.py is the specification.
#pragma once

#include "portable.h"

namespace cgx {

// Values that Python passes.
constexpr int kEfSignSgd = 0;
constexpr int kOneBit = 1;

// Every bucket's means, float32, then one bit an element.
CGX_INLINE constexpr int mean_bytes(int kind) { return kind == kOneBit ? 8 : 4; }

// What an element of either sign decodes to.
struct Means {
    float low;
    float high;
};

// -0 counts as negative and so does half of the NaNs.
CGX_INLINE bool is_positive(float x) { return static_cast<int32_t>(float_bits(x)) >= 0; }

// One NaN for all, because which one a sum of NaNs gives depends on the machine. count 0 counts as 1.
CGX_INLINE float make_mean(float sum, int64_t count) {
    const float mean = sum / static_cast<float>(count > 0 ? count : 1);
    return mean == mean ? mean : bits_float(0x7FC00000u);
}

CGX_INLINE Means means_around_zero(float mean) { return {-mean, mean}; }

CGX_INLINE float choose_mean(bool positive, Means means) { return positive ? means.high : means.low; }

}  // namespace cgx

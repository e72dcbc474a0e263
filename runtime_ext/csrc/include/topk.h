// Formulas of the top-k selection. runtime_ext/reference.py is the specification.
#pragma once

#include "portable.h"

namespace cgx {

constexpr uint32_t kNanMagnitude = 0x7F800001u;

// |x| as an integer of the same order; every NaN is equal and above Inf.
CGX_INLINE uint32_t magnitude(float x) {
    const uint32_t bits = float_bits(x) & 0x7FFFFFFFu;
    return bits < kNanMagnitude ? bits : kNanMagnitude;
}

}  // namespace cgx

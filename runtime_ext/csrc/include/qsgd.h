// Formulas and wire layout of the qsgd codec. runtime_ext/reference/ is the specification.
#pragma once

#include "portable.h"

namespace cgx {

// Values that Python passes.
constexpr int kMaxMin = 0;
constexpr int kL2 = 1;
constexpr int kLinf = 2;

// Bytes of a grid on the wire. A message is the grid of every bucket, then all levels; the level of element i
// begins at bit i * bits.
CGX_INLINE constexpr int grid_bytes(int grid) { return grid == kMaxMin ? 4 : 2; }

// The largest level. Grids around zero have an odd number of levels, so that zero is one of them.
CGX_INLINE constexpr int32_t top_level(int bits, bool around_zero) {
    return (1 << bits) - (around_zero ? 2 : 1);
}

// Maps the bits of floats to integers in the same order, with -0 below +0 and NaN outside the infinities. It
// is its own inverse.
CGX_INLINE int32_t flip_negative(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

CGX_INLINE float bf16_floor(float x) {
    uint32_t bits = float_bits(x);
    return bits_float((bits + (bits >> 31) * 0xFFFFu) & 0xFFFF0000u);
}

// x >= +0
CGX_INLINE float bf16_ceil(float x) { return bits_float((float_bits(x) + 0xFFFFu) & 0xFFFF0000u); }

// Level k stands for lo + k * scale. Scale, and lo unless around zero, are exact in bfloat16.
struct Grid {
    float lo;
    float scale;
};

constexpr uint32_t kNan = 0x7FC00000u;

// Both numbers are NaN if a decoded element could be other than finite.
CGX_INLINE Grid make_grid(float min, float max, int32_t top_level) {
    const float top = static_cast<float>(top_level);
    const float lo = bf16_floor(min);
    const float scale = bf16_ceil((max - lo) / top);
    const bool finite = is_finite(max - min) && is_finite(lo + top * scale);
    return {finite ? lo : bits_float(kNan), finite ? scale : bits_float(kNan)};
}

CGX_INLINE Grid grid_around_zero(float scale, int32_t top_level) {
    return {-static_cast<float>(top_level / 2) * scale, scale};
}

// norm: the largest magnitude, or the Euclidean norm, of the bucket. NaN as in make_grid.
CGX_INLINE Grid make_grid_around_zero(float norm, int32_t top_level) {
    const float scale = bf16_ceil(norm / static_cast<float>(top_level / 2));
    const bool finite = is_finite(norm) && is_finite(static_cast<float>(top_level) * scale);
    return finite ? grid_around_zero(scale, top_level) : Grid{bits_float(kNan), bits_float(kNan)};
}

// Powers of two that scale a bucket for its sum of squares, so that squares neither overflow nor vanish:
// norm = sqrt(sum of (x * down)^2) * up
struct NormScale {
    float down;
    float up;
};

// largest: float bits of the largest magnitude, with any NaN above Inf
CGX_INLINE NormScale norm_scale(uint32_t largest) {
    uint32_t exponent = largest >> 23;
    exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
    return {bits_float((254 - exponent) << 23), bits_float(exponent << 23)};
}

// Returns 0 if the scale is 0, NaN, or too small to divide by. Every element of the bucket then has
// unusable_level.
CGX_INLINE float inverse_scale(Grid grid) {
    const float inverse = 1.0f / grid.scale;
    return is_finite(inverse) ? inverse : 0.0f;
}

CGX_INLINE constexpr int32_t unusable_level(int32_t top_level, bool around_zero) {
    return around_zero ? top_level / 2 : 0;
}

// rounding is in [0, 1): 0.5 rounds to nearest. Not for an inverse of 0.
template <bool kAroundZero>
CGX_INLINE int32_t quantize(float x, float lo, float inverse, float rounding, int32_t top_level) {
    // Around zero, zero must be a level exactly, which lo * inverse need not be.
    const float t = kAroundZero ? x * inverse + static_cast<float>(top_level / 2) : (x - lo) * inverse;
    // Rounding errors take t at most a fraction below 0, and truncation makes that 0.
    const int32_t level = static_cast<int32_t>(t + rounding);
    return level < top_level ? level : top_level;
}

CGX_INLINE float dequantize(int32_t level, Grid grid) {
    return grid.lo + static_cast<float>(level) * grid.scale;
}

// A bucket's grid on the wire: lo and scale. Grids around zero have the scale only.
CGX_INLINE uint32_t pack_grid(Grid grid) {
    return float_bits(grid.lo) >> 16 | (float_bits(grid.scale) & 0xFFFF0000u);
}

CGX_INLINE Grid unpack_grid(uint32_t word) {
    return {bits_float(word << 16), bits_float(word & 0xFFFF0000u)};
}

CGX_INLINE uint16_t pack_grid_around_zero(Grid grid) {
    return static_cast<uint16_t>(float_bits(grid.scale) >> 16);
}

CGX_INLINE Grid unpack_grid_around_zero(uint16_t word, int32_t top_level) {
    return grid_around_zero(bits_float(static_cast<uint32_t>(word) << 16), top_level);
}

// The low `kept` bits of every second lane of `width` bits, from lane `first` (0 or 1) on.
constexpr uint64_t lane_mask(int width, int kept, int first) {
    uint64_t mask = 0;
    for (int bit = 0; bit < 64; ++bit) {
        const bool in_lane = bit / width % 2 == first && bit % width < kept;
        mask |= static_cast<uint64_t>(in_lane) << bit;
    }
    return mask;
}

// Moves every second lane of kWidth bits, of which kKept are used, next to the lane below it.
template <int kWidth, int kKept>
CGX_INLINE uint64_t join_lanes(uint64_t x) {
    constexpr uint64_t kLow = lane_mask(kWidth, kKept, 0), kHigh = lane_mask(kWidth, kKept, 1);
    return (x & kLow) | (x & kHigh) >> (kWidth - kKept);
}

template <int kWidth, int kKept>
CGX_INLINE uint64_t split_lanes(uint64_t x) {
    constexpr uint64_t kLow = lane_mask(kWidth, kKept, 0), kHigh = lane_mask(kWidth, kKept, 1);
    return (x & kLow) | (x << (kWidth - kKept) & kHigh);
}

// Packs eight levels, one per byte, to 8 * kBits adjacent bits.
template <int kBits>
CGX_INLINE uint64_t pack_eight(uint64_t levels) {
    return join_lanes<32, 4 * kBits>(join_lanes<16, 2 * kBits>(join_lanes<8, kBits>(levels)));
}

template <int kBits>
CGX_INLINE uint64_t unpack_eight(uint64_t packed) {
    return split_lanes<8, kBits>(split_lanes<16, 2 * kBits>(split_lanes<32, 4 * kBits>(packed)));
}

}  // namespace cgx

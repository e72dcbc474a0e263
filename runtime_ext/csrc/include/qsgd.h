// Formulas of the qsgd codec. runtime_ext/reference.py is the specification.
#pragma once

#include "portable.h"

namespace cgx {

// Integers in the order of the floats, -0 below +0 and NaN outside the infinities. Its own inverse.
CGX_INLINE int32_t flip_negative(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

CGX_INLINE float bf16_floor(float x) {
    uint32_t bits = float_bits(x);
    return bits_float((bits + (bits >> 31) * 0xFFFFu) & 0xFFFF0000u);
}

// x >= +0
CGX_INLINE float bf16_ceil(float x) { return bits_float((float_bits(x) + 0xFFFFu) & 0xFFFF0000u); }

// Level k stands for lo + k * scale; both numbers are exact in bfloat16.
struct Grid {
    float lo;
    float scale;
};

// Both NaN if a decoded element could be anything but finite.
CGX_INLINE Grid make_grid(float min, float max, int top_level) {
    const float lo = bf16_floor(min);
    const float scale = bf16_ceil((max - lo) / static_cast<float>(top_level));
    if (is_finite(max - min) && is_finite(lo + static_cast<float>(top_level) * scale)) return {lo, scale};
    return {bits_float(0x7FC00000u), bits_float(0x7FC00000u)};
}

// 0 if every element of the bucket has level 0: scale is 0, NaN, or too small to divide by.
CGX_INLINE float inverse_scale(Grid grid) {
    const float inverse = 1.0f / grid.scale;
    return is_finite(inverse) ? inverse : 0.0f;
}

// rounding is in [0, 1): 0.5 rounds to nearest.
CGX_INLINE int32_t quantize(float x, Grid grid, float inverse, float rounding, int32_t top_level) {
    const int32_t level = static_cast<int32_t>((x - grid.lo) * inverse + rounding);
    return level < top_level ? level : top_level;
}

CGX_INLINE float dequantize(int32_t level, Grid grid) {
    return grid.lo + static_cast<float>(level) * grid.scale;
}

// A bucket's lo and scale on the wire.
CGX_INLINE uint32_t pack_grid(Grid grid) {
    return float_bits(grid.lo) >> 16 | (float_bits(grid.scale) & 0xFFFF0000u);
}

CGX_INLINE Grid unpack_grid(uint32_t word) {
    return {bits_float(word << 16), bits_float(word & 0xFFFF0000u)};
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

// Eight levels, one a byte, to 8 * kBits adjacent bits.
template <int kBits>
CGX_INLINE uint64_t pack_eight(uint64_t levels) {
    return join_lanes<32, 4 * kBits>(join_lanes<16, 2 * kBits>(join_lanes<8, kBits>(levels)));
}

template <int kBits>
CGX_INLINE uint64_t unpack_eight(uint64_t packed) {
    return split_lanes<8, kBits>(split_lanes<16, 2 * kBits>(split_lanes<32, 4 * kBits>(packed)));
}

}  // namespace cgx

// What the formulas need to compile for the host and, under a CUDA compiler, for the device.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define CGX_INLINE __host__ __device__ __forceinline__
#else
#define CGX_INLINE inline __attribute__((always_inline))
#endif

namespace cgx {

CGX_INLINE uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

CGX_INLINE float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

CGX_INLINE bool is_finite(float x) { return (float_bits(x) & 0x7F800000u) != 0x7F800000u; }

}  // namespace cgx

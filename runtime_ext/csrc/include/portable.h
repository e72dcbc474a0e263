// Lets the formulas compile for the host and, under a CUDA compiler, for the device.
#pragma once

#if defined(__CUDACC_RTC__)
// NVRTC compiles without the standard library's headers.
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using size_t = decltype(sizeof 0);
#else
#include <cmath>
#include <cstdint>
#include <cstring>
#endif

#if defined(__CUDACC__)
#define CGX_INLINE __host__ __device__ __forceinline__
#define CGX_DEVICE __device__ __forceinline__
#else
#define CGX_INLINE inline __attribute__((always_inline))
#define CGX_DEVICE CGX_INLINE  // in the emulator of the tests
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

// Elements of a gradient, as their bits. Conversion is exact; a NaN stays a NaN.
struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

CGX_INLINE float to_float(float x) { return x; }

CGX_INLINE float to_float(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

CGX_INLINE float to_float(Half x) {
#if defined(__CUDA_ARCH__)
    float converted;
    asm("cvt.f32.f16 %0, %1;" : "=f"(converted) : "h"(x.bits));
    return converted;
#else
    const uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7FFFu;
    // Infinities and NaN have the largest exponent in both formats.
    if (magnitude >= 0x7C00u) return bits_float(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
    // Read as a float, these bits give a number that is 2^(127 - 15) times smaller, from the offsets of the
    // exponents.
    const float scaled = bits_float(magnitude << 13) * bits_float((254u - 15u) << 23);
    return bits_float(sign | float_bits(scaled));
#endif
}

}  // namespace cgx

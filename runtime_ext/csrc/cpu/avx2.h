// Vectors of AVX2 and FMA. Include it before our other headers: everything that is defined after it,
// templates too, is compiled for x86-64-v3. A function that is not inlined must have internal linkage,
// otherwise the linker might keep this copy of it for all machines.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#pragma GCC target("arch=x86-64-v3")

#include "portable.h"

namespace cgx {

// See vectors.h for the names.
struct Avx2Vectors {
    static constexpr int kWidth = 8;
    typedef float Floats __attribute__((vector_size(32)));
    typedef int32_t Ints __attribute__((vector_size(32)));
    typedef uint32_t Uints __attribute__((vector_size(32)));

    static CGX_INLINE Ints iota() { return Ints{0, 1, 2, 3, 4, 5, 6, 7}; }

    static CGX_INLINE Floats fill(float x) { return _mm256_set1_ps(x); }
    static CGX_INLINE Ints fill(int32_t x) { return (Ints)_mm256_set1_epi32(x); }
    static CGX_INLINE Uints fill(uint32_t x) { return (Uints)fill(static_cast<int32_t>(x)); }

    static CGX_INLINE Floats load(const float* x) { return _mm256_loadu_ps(x); }
    static CGX_INLINE void store(float* x, Floats y) { _mm256_storeu_ps(x, y); }
    static CGX_INLINE void stream(float* x, Floats y) { _mm256_stream_ps(x, y); }
    static CGX_INLINE Floats load_first(const float* x, int count) {
        return _mm256_maskload_ps(x, (__m256i)(iota() < count));
    }
    static CGX_INLINE void store_first(float* x, Floats y, int count) {
        _mm256_maskstore_ps(x, (__m256i)(iota() < count), y);
    }

    static CGX_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static CGX_INLINE Ints max(Ints a, Ints b) { return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
    static CGX_INLINE Ints min(Ints a, Ints b) { return (Ints)_mm256_min_epi32((__m256i)a, (__m256i)b); }
    static CGX_INLINE Uints max(Uints a, Uints b) { return (Uints)_mm256_max_epu32((__m256i)a, (__m256i)b); }
    static CGX_INLINE Uints min(Uints a, Uints b) { return (Uints)_mm256_min_epu32((__m256i)a, (__m256i)b); }

    // Returns `negative` where `sign` has the sign bit, `positive` elsewhere.
    static CGX_INLINE Floats choose(Floats sign, Floats negative, Floats positive) {
        return _mm256_blendv_ps(positive, negative, sign);
    }

    // Returns the low or the high two of every four numbers, each split into its 16-bit halves.
    static CGX_INLINE Ints low_halves(Uints x) {
        return (Ints)_mm256_unpacklo_epi16((__m256i)x, _mm256_setzero_si256());
    }
    static CGX_INLINE Ints high_halves(Uints x) {
        return (Ints)_mm256_unpackhi_epi16((__m256i)x, _mm256_setzero_si256());
    }

    // Undoes the order in which four vectors of 32-bit numbers are packed to bytes.
    static CGX_INLINE __m256i in_order(__m256i bytes) {
        return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
};

}  // namespace cgx

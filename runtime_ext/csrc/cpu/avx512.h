// Vectors of AVX-512 (F, BW, CD, DQ and VL). Everything that is defined after it is compiled for x86-64-v4;
// otherwise as avx2.h.
#pragma once

// GCC 12 takes the undefined operands in its own header for mistakes.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#pragma GCC target("arch=x86-64-v4")

#include "portable.h"

namespace cgx {

// See vectors.h for the names.
struct Avx512Vectors {
    static constexpr int kWidth = 16;
    typedef float Floats __attribute__((vector_size(64)));
    typedef int32_t Ints __attribute__((vector_size(64)));
    typedef uint32_t Uints __attribute__((vector_size(64)));

    static CGX_INLINE Ints iota() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
    static CGX_INLINE __mmask16 first(int count) { return static_cast<__mmask16>((1 << count) - 1); }

    static CGX_INLINE Floats fill(float x) { return _mm512_set1_ps(x); }
    static CGX_INLINE Ints fill(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
    static CGX_INLINE Uints fill(uint32_t x) { return (Uints)fill(static_cast<int32_t>(x)); }

    static CGX_INLINE Floats load(const float* x) { return _mm512_loadu_ps(x); }
    static CGX_INLINE void store(float* x, Floats y) { _mm512_storeu_ps(x, y); }
    static CGX_INLINE void stream(float* x, Floats y) { _mm512_stream_ps(x, y); }
    static CGX_INLINE Floats load_first(const float* x, int count) {
        return _mm512_maskz_loadu_ps(first(count), x);
    }
    static CGX_INLINE void store_first(float* x, Floats y, int count) {
        _mm512_mask_storeu_ps(x, first(count), y);
    }

    static CGX_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static CGX_INLINE Ints max(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
    static CGX_INLINE Ints min(Ints a, Ints b) { return (Ints)_mm512_min_epi32((__m512i)a, (__m512i)b); }
    static CGX_INLINE Uints max(Uints a, Uints b) { return (Uints)_mm512_max_epu32((__m512i)a, (__m512i)b); }
    static CGX_INLINE Uints min(Uints a, Uints b) { return (Uints)_mm512_min_epu32((__m512i)a, (__m512i)b); }

    static CGX_INLINE Floats choose(Floats sign, Floats negative, Floats positive) {
        return _mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)sign), positive, negative);
    }

    static CGX_INLINE Ints low_halves(Uints x) {
        return (Ints)_mm512_unpacklo_epi16((__m512i)x, _mm512_setzero_si512());
    }
    static CGX_INLINE Ints high_halves(Uints x) {
        return (Ints)_mm512_unpackhi_epi16((__m512i)x, _mm512_setzero_si512());
    }
};

}  // namespace cgx

// Helpers for the loops for AVX2. Include it before our other headers: everything that is defined after it,
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

#include "chunks.h"

namespace cgx {

template <typename T>
CGX_INLINE __m256i load_32(const T* data) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

CGX_INLINE void store_32(uint8_t* data, __m256i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), x);
}

// Stores the low kBytes bytes.
template <int kBytes>
CGX_INLINE void store_low(uint8_t* data, __m128i x) {
    if constexpr (kBytes == 16) return _mm_storeu_si128(reinterpret_cast<__m128i*>(data), x);
    if constexpr (kBytes >= 8) {
        store<uint64_t>(data, static_cast<uint64_t>(_mm_cvtsi128_si64(x)));
        store_bytes<kBytes - 8>(data + 8, static_cast<uint64_t>(_mm_extract_epi64(x, 1)));
    } else {
        store_bytes<kBytes>(data, static_cast<uint64_t>(_mm_cvtsi128_si64(x)));
    }
}

CGX_INLINE __m256 load_fed_8(Fed fed, int64_t i) {
    const __m256 x = _mm256_loadu_ps(fed.grad + i);
    return fed.residual == nullptr ? x : _mm256_add_ps(x, _mm256_loadu_ps(fed.residual + i));
}

// Undoes the order in which four vectors of 32-bit numbers are packed to bytes.
CGX_INLINE __m256i in_order(__m256i bytes) {
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <typename F>
CGX_INLINE int32_t reduce(__m256i x, F f) {
    __m128i y = f(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = f(y, _mm_shuffle_epi32(y, 0b01'00'11'10));
    return _mm_cvtsi128_si32(f(y, _mm_shuffle_epi32(y, 0b10'11'00'01)));
}

// Calls f(bits) for every 8 elements. Elements left over come one by one, each repeated in all lanes.
template <typename F>
CGX_INLINE void for_each_8(Fed fed, int64_t count, F f) {
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        for (int v = 0; v < 4; ++v) f(_mm256_castps_si256(load_fed_8(fed, i + 8 * v)));
    }
    for (; i + 8 <= count; i += 8) f(_mm256_castps_si256(load_fed_8(fed, i)));
    for (; i < count; ++i) f(_mm256_set1_epi32(static_cast<int>(float_bits(fed[i]))));
}

// LaneSum of chunks.h, with vectors.
struct LaneSum8 {
    __m256 lane[4];

    CGX_INLINE LaneSum8() {
        for (__m256& sum : lane) sum = _mm256_set1_ps(-0.0f);
    }

    CGX_INLINE float total() const {
        const __m256 a = _mm256_add_ps(_mm256_add_ps(lane[0], lane[2]), _mm256_add_ps(lane[1], lane[3]));
        const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
    }
};

// Calls f(x), x (4,) vectors, for every kLanes elements. The last ones are filled up with +0.
template <typename F>
CGX_INLINE void for_each_row(Fed fed, int64_t count, F f) {
    __m256 x[4];
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (int v = 0; v < 4; ++v) x[v] = load_fed_8(fed, i + 8 * v);
        f(x);
    }
    if (i == count) return;
    float rest[kChunk];
    load_rest(fed.from(i), count - i, 0.0f, rest);
    for (int v = 0; v < 4; ++v) x[v] = _mm256_loadu_ps(rest + 8 * v);
    f(x);
}

}  // namespace cgx

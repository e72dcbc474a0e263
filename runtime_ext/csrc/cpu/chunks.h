// Helpers for the codecs that send every element: how to read a gradient, add it up and store packed bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "portable.h"

static_assert(std::endian::native == std::endian::little, "the wire format is the memory's");

namespace cgx {

// For functions that several loops call: inlined, they would be compiled again for each number of bits.
#define CGX_NOINLINE __attribute__((noinline))

// Elements of a loop of constant length, which the compiler unrolls fully at every vector width.
constexpr int kChunk = 64;
constexpr int kLanes = 32;  // of a sum, see lane_sum in reference/buckets.py

// Buckets whose statistics are found together, so that their divisions overlap.
constexpr int kBatch = 16;
constexpr int64_t kBatchNumel = 2048;  // 8 KB, so that a gradient, a residual and a next stay in 32 KB of L1

CGX_INLINE int64_t batch_numel(int64_t bucket_size) {
    return std::clamp<int64_t>(kBatchNumel / bucket_size, 1, kBatch) * bucket_size;
}

// The error-fed gradient, which is gradient plus residual, from some element on. `residual` may be null.
struct Fed {
    const float* grad;
    const float* residual;

    CGX_INLINE Fed from(int64_t i) const { return {grad + i, residual == nullptr ? nullptr : residual + i}; }
    CGX_INLINE float operator[](int64_t i) const {
        return residual == nullptr ? grad[i] : grad[i] + residual[i];
    }
};

// Fetches the elements that come a batch or two later: the prefetcher of the hardware stops at every page and
// during long computations. Without a residual twice as far fits the L1 cache.
CGX_INLINE void prefetch_chunk(Fed fed) {
    const size_t distance = (fed.residual == nullptr ? 2 : 1) * kBatchNumel * sizeof(float);
    for (const float* x : {fed.grad, fed.residual}) {
        if (x == nullptr) continue;
        // An integer, because the address may lie beyond the array.
        const uintptr_t begin = reinterpret_cast<uintptr_t>(x) + distance;
        for (size_t line = 0; line < kChunk * sizeof(float); line += 64) {
            __builtin_prefetch(reinterpret_cast<const void*>(begin + line));
        }
    }
}

// Where the part of the error-fed gradient that is not sent goes, from some element on. `data` may be null.
struct Next {
    float* data;
    bool streams;  // past the caches

    CGX_INLINE Next from(int64_t i) const { return {data == nullptr ? nullptr : data + i, streams}; }
};

// Sets x (kChunk,) to `count` elements of `fed`, then to `fill`.
CGX_INLINE void load_rest(Fed fed, int64_t count, float fill, float* x) {
    for (int64_t i = 0; i < kChunk; ++i) x[i] = i < count ? fed[i] : fill;
}

// The sum of a bucket in the one order that all implementations keep.
struct LaneSum {
    float lane[kLanes];

    // Adding a number to -0 gives that number, also if it is -0.
    CGX_INLINE LaneSum() {
        for (float& sum : lane) sum = -0.0f;
    }

    // row (kLanes,)
    CGX_INLINE void add(const float* row) {
        for (int i = 0; i < kLanes; ++i) lane[i] += row[i];
    }

    CGX_INLINE float total() {
        for (int half = kLanes / 2; half > 0; half /= 2) {
            for (int i = 0; i < half; ++i) lane[i] += lane[half + i];
        }
        return lane[0];
    }
};

template <typename T>
CGX_INLINE uint64_t load(const uint8_t* data) {
    T word;
    memcpy(&word, data, sizeof word);
    return word;
}

template <typename T>
CGX_INLINE void store(uint8_t* data, uint64_t word) {
    const T low = static_cast<T>(word);
    memcpy(data, &low, sizeof low);
}

// A memcpy of kBytes bytes into a uint64_t would read back wider than it wrote and stall on the store buffer.
template <int kBytes>
CGX_INLINE uint64_t load_bytes(const uint8_t* data) {
    if constexpr (kBytes == 8) return load<uint64_t>(data);
    uint64_t word = 0;
    if constexpr (kBytes & 4) word = load<uint32_t>(data);
    if constexpr (kBytes & 2) word |= load<uint16_t>(data + (kBytes & 4)) << 8 * (kBytes & 4);
    if constexpr (kBytes & 1) word |= load<uint8_t>(data + (kBytes & 6)) << 8 * (kBytes & 6);
    return word;
}

template <int kBytes>
CGX_INLINE void store_bytes(uint8_t* data, uint64_t word) {
    if constexpr (kBytes == 8) return store<uint64_t>(data, word);
    if constexpr (kBytes & 4) store<uint32_t>(data, word);
    if constexpr (kBytes & 2) store<uint16_t>(data + (kBytes & 4), word >> 8 * (kBytes & 4));
    if constexpr (kBytes & 1) store<uint8_t>(data + (kBytes & 6), word >> 8 * (kBytes & 6));
}

}  // namespace cgx

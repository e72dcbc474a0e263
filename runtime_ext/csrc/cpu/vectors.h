// Loops over vectors, the same for every instruction set. `V` names one: kWidth elements fit a vector, which
// is Floats, Ints or Uints; operators work on these element by element. Include the header of V before.
#pragma once

#include "chunks.h"

namespace cgx {

// Keeps `x` in a register: without the barrier the compiler makes it again for every chunk.
template <typename Vector>
CGX_INLINE Vector keep(Vector x) {
    asm("" : "+v"(x));
    return x;
}

template <typename V>
CGX_INLINE typename V::Floats load_fed(Fed fed, int64_t i) {
    const typename V::Floats x = V::load(fed.grad + i);
    return fed.residual == nullptr ? x : x + V::load(fed.residual + i);
}

// Loads `count` elements, fewer than fit. Unused lanes hold 0.
template <typename V>
CGX_INLINE typename V::Floats load_fed_first(Fed fed, int64_t i, int64_t count) {
    const int lanes = static_cast<int>(count);
    const typename V::Floats x = V::load_first(fed.grad + i, lanes);
    return fed.residual == nullptr ? x : x + V::load_first(fed.residual + i, lanes);
}

// Encodes the buckets of [first, last).
template <typename Loops, typename Encoding>
CGX_INLINE void encode_with_vectors(const Encoding& encoding, int64_t first, int64_t last) {
    walk<Loops>(encoding, first, last);
    if (encoding.streams_next()) _mm_sfence();  // other threads read `next`
}

// Combines all lanes with `f`, halving their number each time. The result is in lane 0.
template <typename V, int kHalf = V::kWidth / 2, typename Vector, typename F>
CGX_INLINE Vector combine_lanes(Vector x, F f) {
    const Vector y = f(x, __builtin_shuffle(x, V::iota() ^ kHalf));
    if constexpr (kHalf > 1) return combine_lanes<V, kHalf / 2>(y, f);
    return y;
}

// Calls f(bits, chain), Ints and int, for all elements, of which the last may come several times. `chain` is
// 0 or 1 in turns, so that what f computes of one chain need not wait for the other.
template <typename V, typename F>
CGX_INLINE void for_each_vector(Fed fed, int64_t count, F f) {
    using Ints = typename V::Ints;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (int v = 0; v < kLanes; v += V::kWidth) f((Ints)load_fed<V>(fed, i + v), v / V::kWidth % 2);
    }
    for (; i + V::kWidth <= count; i += V::kWidth) f((Ints)load_fed<V>(fed, i), 0);
    if (i == count) return;
    const Ints last = V::fill(static_cast<int32_t>(float_bits(fed[count - 1])));
    const int num_left = static_cast<int>(count - i);
    f(V::iota() < num_left ? (Ints)load_fed_first<V>(fed, i, num_left) : last, 0);
}

// LaneSum of chunks.h, with vectors.
template <typename V>
struct LaneSums {
    static constexpr int kVectors = kLanes / V::kWidth;

    typename V::Floats lane[kVectors];

    CGX_INLINE LaneSums() {
        for (auto& sum : lane) sum = V::fill(-0.0f);
    }

    CGX_INLINE float total() const {
        using Floats = typename V::Floats;
        const auto add = [&](Floats a, Floats b) { return a + b; };
        Floats sum = lane[0] + lane[kVectors / 2];
        if constexpr (kVectors == 4) sum = sum + (lane[1] + lane[3]);
        return combine_lanes<V>(sum, add)[0];
    }
};

// Calls f(x), x (kLanes / kWidth,) vectors, for every kLanes elements. The last ones are filled up with +0.
template <typename V, typename F>
CGX_INLINE void for_each_row(Fed fed, int64_t count, F f) {
    typename V::Floats x[kLanes / V::kWidth];
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (int v = 0; v < kLanes / V::kWidth; ++v) x[v] = load_fed<V>(fed, i + V::kWidth * v);
        f(x);
    }
    if (i == count) return;
    float rest[kChunk];
    load_rest(fed.from(i), count - i, 0.0f, rest);
    for (int v = 0; v < kLanes / V::kWidth; ++v) x[v] = V::load(rest + V::kWidth * v);
    f(x);
}

}  // namespace cgx

// The loops of the one-bit codecs over vectors, the same for every instruction set.
#pragma once

#include "sign_loops.h"
#include "vectors.h"

namespace cgx {

// `V` has, besides what vectors.h needs,
//   kPrefetches                   whether to fetch a batch ahead
//   negative_bits(x)              the sign bits of kLanes elements, x (kLanes / kWidth,) vectors
//   choose_by_bits(bits, v, a, b) for vector `v` of a chunk: a where its bit is 0, b where it is 1
template <typename V>
struct SignVectors {
    using Floats = typename V::Floats;
    static constexpr int kWidth = V::kWidth;
    static constexpr bool kPrefetches = V::kPrefetches;

    template <int kKind>
    struct Sums {
        LaneSums<V> low, high;

        // GCC would compile an implicit constructor for the target of the command line.
        CGX_INLINE Sums() {}

        // Adds the first num_rows rows of kLanes elements; returns a bit for each of kChunk elements.
        CGX_INLINE uint64_t add_chunk(Fed fed, int num_rows) {
            const uint64_t first = add_row(fed, true);
            const uint64_t second = add_row(fed.from(kLanes), num_rows > 1);
            return first | second << kLanes;
        }

        CGX_INLINE uint32_t add_row(Fed fed, bool counts) {
            Floats x[kLanes / kWidth];
            for (int v = 0; v < kLanes / kWidth; ++v) x[v] = load_fed<V>(fed, kWidth * v);
            if (counts) {
                for (int v = 0; v < kLanes / kWidth; ++v) add_vector(x[v], v);
            }
            return ~V::negative_bits(x);
        }

        CGX_INLINE void add_vector(Floats x, int v) {
            if constexpr (kKind == kEfSignSgd) {
                high.lane[v] += (Floats)((typename V::Ints)x & 0x7FFFFFFF);
            } else {
                low.lane[v] += V::choose(x, x, Floats{});
                high.lane[v] += V::choose(x, Floats{}, x);
            }
        }

        CGX_INLINE void add_zeros() {
            for (Floats& sum : low.lane) sum += Floats{};
            for (Floats& sum : high.lane) sum += Floats{};
        }

        CGX_INLINE float total_low() const { return low.total(); }
        CGX_INLINE float total_high() const { return high.total(); }
    };

    // Sets next.data (count,) to the error-fed gradient minus what is sent.
    static CGX_INLINE void write_next(Fed fed, int64_t count, Means means, Next next) {
        if (next.streams) return write_next<true>(fed, count, means, next.data);
        write_next<false>(fed, count, means, next.data);
    }

    template <bool kStreams>
    static CGX_INLINE void write_next(Fed fed, int64_t count, Means means, float* next) {
        const Floats low = V::fill(means.low), high = V::fill(means.high);
        int64_t i = 0;
        for (; i + kWidth <= count; i += kWidth) {
            const Floats x = load_fed<V>(fed, i);
            const Floats rest = x - V::choose(x, low, high);
            kStreams ? V::stream(next + i, rest) : V::store(next + i, rest);
        }
        if (i == count) return;
        const int num_left = static_cast<int>(count - i);
        const Floats x = load_fed_first<V>(fed, i, num_left);
        V::store_first(next + i, x - V::choose(x, low, high), num_left);
    }

    // Decodes a bit per element to out (kChunk,), or adds it.
    template <bool kAdd>
    static CGX_INLINE void decode_chunk(uint64_t bits, float* out, Means means) {
        const Floats low = V::fill(means.low), high = V::fill(means.high);
        for (int v = 0; v < kChunk / kWidth; ++v) {
            Floats x = V::choose_by_bits(bits, v, low, high);
            if (kAdd) x = V::load(out + kWidth * v) + x;
            V::store(out + kWidth * v, x);
        }
    }
};

}  // namespace cgx

// The loops of the one-bit codecs for AVX2.
#include "isa.h"

#if CGX_HAS_AVX2

#include "avx2.h"
#include "sign_loops.h"

namespace cgx {
namespace {

CGX_INLINE uint32_t negative_bits(const __m256* x) {
    __m256i bits[4];
    for (int v = 0; v < 4; ++v) bits[v] = _mm256_castps_si256(x[v]);
    // Saturation keeps the sign.
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(bits[0], bits[1]), _mm256_packs_epi32(bits[2], bits[3]));
    return static_cast<uint32_t>(_mm256_movemask_epi8(in_order(bytes)));
}

struct Avx2 {
    template <int kKind>
    struct Sums {
        LaneSum8 low, high;

        // GCC would compile an implicit constructor for the target of the command line.
        CGX_INLINE Sums() {}

        // Adds the first num_rows rows of kLanes elements; returns a bit for each of kChunk elements.
        CGX_INLINE uint64_t add_chunk(Fed fed, int num_rows) {
            const uint64_t first = add_row(fed, true);
            const uint64_t second = add_row(fed.from(kLanes), num_rows > 1);
            return first | second << kLanes;
        }

        CGX_INLINE uint32_t add_row(Fed fed, bool counts) {
            __m256 x[4];
            for (int v = 0; v < 4; ++v) x[v] = load_fed_8(fed, 8 * v);
            if (counts) {
                for (int v = 0; v < 4; ++v) add_vector(x[v], v);
            }
            return ~negative_bits(x);
        }

        CGX_INLINE void add_vector(__m256 x, int v) {
            if constexpr (kKind == kEfSignSgd) {
                const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
                high.lane[v] = _mm256_add_ps(high.lane[v], magnitude);
            } else {
                const __m256 zero = _mm256_setzero_ps();
                low.lane[v] = _mm256_add_ps(low.lane[v], _mm256_blendv_ps(zero, x, x));
                high.lane[v] = _mm256_add_ps(high.lane[v], _mm256_blendv_ps(x, zero, x));
            }
        }

        CGX_INLINE void add_zeros() {
            for (__m256& sum : low.lane) sum = _mm256_add_ps(sum, _mm256_setzero_ps());
            for (__m256& sum : high.lane) sum = _mm256_add_ps(sum, _mm256_setzero_ps());
        }

        CGX_INLINE float total_low() const { return low.total(); }
        CGX_INLINE float total_high() const { return high.total(); }
    };

    static CGX_INLINE void write_next(Fed fed, int64_t count, Means means, float* next) {
        const __m256 low = _mm256_set1_ps(means.low), high = _mm256_set1_ps(means.high);
        int64_t i = 0;
        for (; i + 8 <= count; i += 8) {
            const __m256 x = load_fed_8(fed, i);
            _mm256_storeu_ps(next + i, _mm256_sub_ps(x, _mm256_blendv_ps(high, low, x)));
        }
        for (; i < count; ++i) {
            const float x = fed[i];
            next[i] = x - choose_mean(is_positive(x), means);
        }
    }

    template <bool kAdd>
    static CGX_INLINE void decode_chunk(uint64_t bits, float* out, Means means) {
        const __m256 low = _mm256_set1_ps(means.low), high = _mm256_set1_ps(means.high);
        for (int v = 0; v < kChunk / 8; ++v) {
            const __m256i word = _mm256_set1_epi32(static_cast<int>(bits >> 8 * v));
            const __m256i bit_on_top =
                _mm256_sllv_epi32(word, _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
            __m256 x = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(bit_on_top));
            if (kAdd) x = _mm256_add_ps(_mm256_loadu_ps(out + 8 * v), x);
            _mm256_storeu_ps(out + 8 * v, x);
        }
    }
};

}  // namespace

void walk_avx2(const SignEncoding& encoding, int64_t first, int64_t last) {
    walk<Avx2>(encoding, first, last);
}

void walk_avx2(const SignDecoding& decoding, int64_t first, int64_t last) {
    walk<Avx2>(decoding, first, last);
}

}  // namespace cgx

#endif

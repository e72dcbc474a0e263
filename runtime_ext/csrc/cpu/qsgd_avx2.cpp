// The loops of qsgd for AVX2 and FMA. They fuse a multiplication and an addition only where the product is
// exact, so that the result is rounded as without fusing.
#include "isa.h"

#if CGX_HAS_AVX2

#include "avx2.h"
#include "qsgd_loops.h"

namespace cgx {
namespace {

CGX_INLINE __m256i xor_shifted(__m256i x, int count) {
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, count));
}

CGX_INLINE __m256 dequantize_8(__m256i level, Grid grid) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(level), _mm256_set1_ps(grid.scale), _mm256_set1_ps(grid.lo));
}

// Joins two neighbouring levels in each 16-bit lane.
template <int kBits>
CGX_INLINE __m256i join_pairs(__m256i levels) {
    return _mm256_maddubs_epi16(_mm256_set1_epi16(1 | 1 << (8 + kBits)), levels);
}

// An argument of _mm256_shuffle_epi8: for every byte the number of the byte in the same half that moves
// there, or -1 for zero.
using ByteOrder = std::array<int8_t, 32>;

// Moves the low kBits bytes of both 64-bit lanes of a half next to each other.
template <int kBits>
constexpr ByteOrder make_pack_order() {
    ByteOrder order{};
    for (int i = 0; i < 32; ++i) {
        const int byte = i % 16;
        order[i] = static_cast<int8_t>(byte < kBits ? byte : byte < 2 * kBits ? 8 + byte - kBits : -1);
    }
    return order;
}

// Moves to each of eight 32-bit lanes the two bytes that hold its level. The levels start at byte `begin`.
template <int kBits>
constexpr ByteOrder make_unpack_order(int begin) {
    ByteOrder order{};
    for (int i = 0; i < 8; ++i) {
        const int byte = begin + i * kBits / 8;
        order[4 * i] = static_cast<int8_t>(byte);
        order[4 * i + 1] = static_cast<int8_t>(byte + 1 < 8 ? byte + 1 : -1);
        order[4 * i + 2] = order[4 * i + 3] = -1;
    }
    return order;
}

template <int kBits>
constexpr ByteOrder kPackOrder = make_pack_order<kBits>();

template <int kBits>
constexpr ByteOrder kUnpackOrder = make_unpack_order<kBits>(0);

// For the end of a chunk, where its last eight bytes are read.
template <int kBits>
constexpr ByteOrder kUnpackLastOrder = make_unpack_order<kBits>(8 - kBits);

// Packs 16 levels per half, one per byte, to 2 * kBits bytes at the low end of each half.
template <int kBits>
CGX_INLINE __m256i pack_halves(__m256i levels) {
    const __m256i four =
        _mm256_madd_epi16(join_pairs<kBits>(levels), _mm256_set1_epi32(1 | 1 << (16 + 2 * kBits)));
    constexpr int64_t kUnused = 32 - 4 * kBits;
    const __m256i eight = _mm256_srli_epi64(_mm256_sllv_epi32(four, _mm256_set1_epi64x(kUnused)), kUnused);
    return _mm256_shuffle_epi8(eight, load_32(kPackOrder<kBits>.data()));
}

// Packs kChunk levels, one per byte, to out (8 * kBits,).
template <int kBits>
CGX_INLINE void pack_chunk(__m256i first, __m256i second, uint8_t* out) {
    if constexpr (kBits == 1) {
        const auto low = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(first, 7)));
        const auto high = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(second, 7)));
        store<uint64_t>(out, low | static_cast<uint64_t>(high) << 32);
    } else if constexpr (kBits == 4) {
        const __m256i bytes = _mm256_packus_epi16(join_pairs<4>(first), join_pairs<4>(second));
        store_32(out, _mm256_permute4x64_epi64(bytes, 0b11'01'10'00));
    } else if constexpr (kBits == 8) {
        store_32(out, first);
        store_32(out + 32, second);
    } else {
        const __m256i a = pack_halves<kBits>(first), b = pack_halves<kBits>(second);
        // The first three stores write zeros after their bytes too, which the next store overwrites.
        constexpr int kWidth = kBits <= 3 ? 8 : 16;
        store_low<kWidth>(out, _mm256_castsi256_si128(a));
        store_low<kWidth>(out + 2 * kBits, _mm256_extracti128_si256(a, 1));
        store_low<kWidth>(out + 4 * kBits, _mm256_castsi256_si128(b));
        store_low<2 * kBits>(out + 6 * kBits, _mm256_extracti128_si256(b, 1));
    }
}

// Returns the eight levels of a chunk from element 8 * v on, with bits of other levels above them.
template <int kBits>
CGX_INLINE __m256i unpack_8(const uint8_t* packed, int v) {
    const int begin = v * kBits;
    if constexpr (kBits == 8) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed + begin)));
    } else if constexpr (kBits <= 4) {
        // Do not read past the end of the chunk.
        const int from = std::min(begin, 8 * kBits - 4);
        const __m256i word = _mm256_set1_epi32(static_cast<int>(load<uint32_t>(packed + from)));
        const __m256i shift =
            _mm256_setr_epi32(0, kBits, 2 * kBits, 3 * kBits, 4 * kBits, 5 * kBits, 6 * kBits, 7 * kBits);
        return _mm256_srlv_epi32(word, _mm256_add_epi32(shift, _mm256_set1_epi32(8 * (begin - from))));
    } else {
        const int from = std::min(begin, 8 * kBits - 8);
        const ByteOrder& order = from == begin ? kUnpackOrder<kBits> : kUnpackLastOrder<kBits>;
        const __m256i word = _mm256_set1_epi64x(static_cast<int64_t>(load<uint64_t>(packed + from)));
        const __m256i shift = _mm256_setr_epi32(0, kBits % 8, 2 * kBits % 8, 3 * kBits % 8, 4 * kBits % 8,
                                                5 * kBits % 8, 6 * kBits % 8, 7 * kBits % 8);
        return _mm256_srlv_epi32(_mm256_shuffle_epi8(word, load_32(order.data())), shift);
    }
}

// Broadcasts `x` once: without the barrier the compiler does it again for every chunk.
CGX_INLINE __m256i broadcast(uint32_t x) {
    __m256i y = _mm256_set1_epi32(static_cast<int>(x));
    asm("" : "+x"(y));
    return y;
}

class Avx2 {
  public:
    CGX_INLINE explicit Avx2(const QsgdEncoding& encoding)
        : stochastic_(encoding.stochastic),
          outer_(broadcast(encoding.key.outer)),
          first_factor_(broadcast(kFirstFactor)),
          inner_(broadcast(encoding.key.inner)),
          second_factor_(broadcast(kSecondFactor)),
          unit_(_mm256_castsi256_ps(broadcast(float_bits(0x1p-16f)))) {
        const int32_t top = top_level(encoding.bits, encoding.grid != kMaxMin);
        top_ = broadcast(static_cast<uint32_t>(top));
        top_bytes_ = broadcast(static_cast<uint32_t>(top) * 0x01010101u);
        zero_level_ = _mm256_castsi256_ps(broadcast(float_bits(static_cast<float>(top / 2))));
    }

    static CGX_INLINE void find_range(Fed fed, int64_t count, float& min, float& max) {
        // Compare the bits as integers. The largest signed integer is the largest number, unless all are
        // negative. The largest unsigned integer is the smallest number, unless none is negative. NaNs lie
        // beyond the infinities.
        __m256i high = _mm256_set1_epi32(INT32_MIN), far = _mm256_setzero_si256();
        for_each_8(fed, count, [&](__m256i bits) {
            high = _mm256_max_epi32(high, bits);
            far = _mm256_max_epu32(far, bits);
        });
        const int32_t high_1 = reduce(high, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
        const int32_t far_1 = reduce(far, [](__m128i a, __m128i b) { return _mm_max_epu32(a, b); });
        max = bits_float(static_cast<uint32_t>(high_1));
        min = bits_float(static_cast<uint32_t>(far_1));
        if (high_1 >= 0 && far_1 < 0) return;
        // With one sign only, the number nearest to zero is the other end of the range.
        __m256i near = _mm256_set1_epi32(-1);
        for_each_8(fed, count, [&](__m256i bits) { near = _mm256_min_epu32(near, bits); });
        const int32_t near_1 = reduce(near, [](__m128i a, __m128i b) { return _mm_min_epu32(a, b); });
        (high_1 < 0 ? max : min) = bits_float(static_cast<uint32_t>(near_1));
    }

    static CGX_INLINE uint32_t find_largest(Fed fed, int64_t count) {
        const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
        __m256i largest = _mm256_setzero_si256();
        for_each_8(fed, count,
                   [&](__m256i bits) { largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, mask)); });
        return static_cast<uint32_t>(
            reduce(largest, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); }));
    }

    static CGX_INLINE float sum_squares(Fed fed, int64_t count, float down) {
        LaneSum8 sum;
        const __m256 down_8 = _mm256_set1_ps(down);
        for_each_row(fed, count, [&](const __m256* x) {
            for (int v = 0; v < 4; ++v) {
                const __m256 scaled = _mm256_mul_ps(x[v], down_8);
                sum.lane[v] = _mm256_add_ps(sum.lane[v], _mm256_mul_ps(scaled, scaled));
            }
        });
        return sum.total();
    }

    template <int kBits, bool kAroundZero>
    CGX_INLINE void encode_chunk(Fed fed, float* next, uint8_t* out, Scale scale, int64_t i) const {
        const __m256i counter = _mm256_set1_epi32(static_cast<int>(i / 2));
        const __m256i first = quantize_32<kAroundZero>(fed, next, scale, counter, 0);
        const __m256i second =
            quantize_32<kAroundZero>(fed.from(32), next == nullptr ? nullptr : next + 32, scale, counter, 16);
        pack_chunk<kBits>(first, second, out);
    }

    template <int kBits, bool kAdd>
    static CGX_INLINE void decode_chunk(const uint8_t* packed, float* out, Grid grid) {
        const __m256i mask = _mm256_set1_epi32((1 << kBits) - 1);
        // The numbers of all levels, for a look-up that ignores the bits above the lowest three.
        const __m256 table =
            dequantize_8(_mm256_and_si256(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), mask), grid);
        for (int v = 0; v < kChunk / 8; ++v) {
            const __m256i level = unpack_8<kBits>(packed, v);
            __m256 x = kBits <= 3 ? _mm256_permutevar8x32_ps(table, level)
                                  : dequantize_8(_mm256_and_si256(level, mask), grid);
            if (kAdd) x = _mm256_add_ps(_mm256_loadu_ps(out + 8 * v), x);
            _mm256_storeu_ps(out + 8 * v, x);
        }
    }

  private:
    // Draws the 16 random halves for elements [2 * counter, 2 * counter + 16), as 32-bit numbers in two
    // vectors.
    CGX_INLINE void random_halves(__m256i counter, int offset, __m256i& first, __m256i& second) const {
        // In this order the halves of the two lanes unpack to eight neighbours.
        const __m256i order = _mm256_setr_epi32(offset, offset + 1, offset + 4, offset + 5, offset + 2,
                                                offset + 3, offset + 6, offset + 7);
        __m256i x = _mm256_xor_si256(_mm256_add_epi32(counter, order), outer_);
        x = _mm256_add_epi32(_mm256_mullo_epi32(xor_shifted(x, 16), first_factor_), inner_);
        x = xor_shifted(_mm256_mullo_epi32(xor_shifted(x, 15), second_factor_), 16);
        first = _mm256_unpacklo_epi16(x, _mm256_setzero_si256());
        second = _mm256_unpackhi_epi16(x, _mm256_setzero_si256());
    }

    // Returns the level of x before the upper clamp. half: a random half, 0 to 65535
    template <bool kAroundZero>
    CGX_INLINE __m256i quantize_8(__m256 x, Scale scale, __m256i half) const {
        const __m256 inverse = _mm256_set1_ps(scale.inverse);
        const __m256 t = kAroundZero
                             ? _mm256_add_ps(_mm256_mul_ps(x, inverse), zero_level_)
                             : _mm256_mul_ps(_mm256_sub_ps(x, _mm256_set1_ps(scale.grid.lo)), inverse);
        return _mm256_cvttps_epi32(_mm256_fmadd_ps(_mm256_cvtepi32_ps(half), unit_, t));
    }

    // Returns the levels of 32 elements, one per byte, in order. offset: counter of the first element minus
    // that of the chunk
    template <bool kAroundZero>
    CGX_INLINE __m256i quantize_32(Fed fed, float* next, Scale scale, __m256i counter, int offset) const {
        __m256 x[4];
        for (int v = 0; v < 4; ++v) x[v] = load_fed_8(fed, 8 * v);
        __m256i level[4], half[4];
        if (stochastic_) {
            random_halves(counter, offset, half[0], half[1]);
            random_halves(counter, offset + 8, half[2], half[3]);
        } else {
            for (__m256i& each : half) each = _mm256_set1_epi32(1 << 15);
        }
        for (int v = 0; v < 4; ++v) level[v] = quantize_8<kAroundZero>(x[v], scale, half[v]);
        if (next != nullptr) {
            for (int v = 0; v < 4; ++v) {
                const __m256 decoded = dequantize_8(_mm256_min_epi32(level[v], top_), scale.grid);
                _mm256_storeu_ps(next + 8 * v, _mm256_sub_ps(x[v], decoded));
            }
        }
        const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(level[0], level[1]),
                                                  _mm256_packs_epi32(level[2], level[3]));
        return in_order(_mm256_min_epu8(bytes, top_bytes_));
    }

    bool stochastic_;
    __m256i outer_, first_factor_, inner_, second_factor_;
    __m256 unit_;
    __m256i top_, top_bytes_;
    __m256 zero_level_;
};

}  // namespace

void walk_avx2(const QsgdEncoding& encoding, int64_t first, int64_t last) {
    walk<Avx2>(encoding, first, last);
}

void walk_avx2(const QsgdDecoding& decoding, int64_t first, int64_t last) {
    walk<Avx2>(decoding, first, last);
}

}  // namespace cgx

#endif

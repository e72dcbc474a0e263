// Packs and unpacks the levels of qsgd with AVX2.
#include "isa.h"

#if CGX_HAS_X86_LOOPS

#include "avx2.h"
#include "qsgd_vectors.h"

namespace cgx {
namespace {

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

struct Avx2 : Avx2Vectors {
    using Bytes = __m256i;
    static constexpr int kTableBits = 3;

    static CGX_INLINE Floats look_up(Floats table, Ints i) {
        return _mm256_permutevar8x32_ps(table, (__m256i)i);
    }

    template <int kBits>
    static CGX_INLINE void pack(const Bytes* level, uint8_t* out) {
        pack_chunk<kBits>(level[0], level[1], out);
    }

    template <int kBits>
    static CGX_INLINE Ints unpack(const uint8_t* packed, int v) {
        return (Ints)unpack_8<kBits>(packed, v);
    }

    static CGX_INLINE Bytes to_bytes(const Ints* level, Uints top) {
        const __m256i words[2] = {_mm256_packs_epi32((__m256i)level[0], (__m256i)level[1]),
                                  _mm256_packs_epi32((__m256i)level[2], (__m256i)level[3])};
        return in_order(_mm256_min_epu8(_mm256_packus_epi16(words[0], words[1]), (__m256i)top));
    }
};

}  // namespace

void walk_avx2(const QsgdEncoding& encoding, int64_t first, int64_t last) {
    encode_with_vectors<QsgdVectors<Avx2>>(encoding, first, last);
}

void walk_avx2(const QsgdDecoding& decoding, int64_t first, int64_t last) {
    walk<QsgdVectors<Avx2>>(decoding, first, last);
}

}  // namespace cgx

#endif

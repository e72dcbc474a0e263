// Packs and unpacks the levels of qsgd with AVX-512.
#include "isa.h"

#if CGX_HAS_X86_LOOPS

#include "avx512.h"
#include "qsgd_vectors.h"

namespace cgx {
namespace {

// An argument of _mm512_permutexvar_epi16: for every 16-bit word the number of the word that moves there.
using WordOrder = std::array<uint16_t, 32>;
// An argument of _mm512_shuffle_epi8: for every byte the number of the byte in the same quarter that moves
// there, or -1 for zero.
using ByteOrder = std::array<int8_t, 64>;

template <typename T>
CGX_INLINE __m512i load_64(const T* data) {
    return _mm512_loadu_si512(data);
}

// Moves the low word of each 32-bit number, four levels of 4 bits, to its place. The numbers are in the order
// of to_bytes.
constexpr WordOrder make_nibble_order() {
    WordOrder order{};
    for (int i = 0; i < 16; ++i) order[i] = static_cast<uint16_t>(2 * (4 * (i % 4) + i / 4));
    return order;
}

// Moves the low kBits words of all quarters next to each other.
template <int kBits>
constexpr WordOrder make_pack_order() {
    WordOrder order{};
    for (int i = 0; i < 4 * kBits; ++i) order[i] = static_cast<uint16_t>(i / kBits * 8 + i % kBits);
    return order;
}

// Moves the low kBits bytes of both 64-bit numbers of a quarter next to each other.
template <int kBits>
constexpr ByteOrder make_join_order() {
    ByteOrder order{};
    for (int i = 0; i < 64; ++i) {
        const int byte = i % 16;
        order[i] = static_cast<int8_t>(byte < kBits ? byte : byte < 2 * kBits ? 8 + byte - kBits : -1);
    }
    return order;
}

// First of the 16 bytes that are read for vector `v` of a chunk: not past the end of the chunk.
template <int kBits>
CGX_INLINE constexpr int first_byte(int v) {
    return std::min(2 * kBits * v, 8 * kBits - 16);
}

// By vector: moves to each of 16 numbers of 32 bits the two bytes that hold its level.
template <int kBits>
constexpr std::array<ByteOrder, 4> make_unpack_orders() {
    std::array<ByteOrder, 4> orders{};
    for (int v = 0; v < 4; ++v) {
        for (int i = 0; i < 16; ++i) {
            const int byte = (16 * v + i) * kBits / 8 - first_byte<kBits>(v);
            orders[v][4 * i] = static_cast<int8_t>(byte);
            orders[v][4 * i + 1] = static_cast<int8_t>(byte + 1 < 16 ? byte + 1 : -1);
            orders[v][4 * i + 2] = orders[v][4 * i + 3] = -1;
        }
    }
    return orders;
}

constexpr WordOrder kNibbleOrder = make_nibble_order();

template <int kBits>
constexpr WordOrder kPackOrder = make_pack_order<kBits>();

template <int kBits>
constexpr ByteOrder kJoinOrder = make_join_order<kBits>();

template <int kBits>
constexpr std::array<ByteOrder, 4> kUnpackOrders = make_unpack_orders<kBits>();

struct Avx512 : Avx512Vectors {
    using Bytes = __m512i;  // four of each vector in every quarter
    static constexpr int kTableBits = 4;

    static CGX_INLINE Floats look_up(Floats table, Ints i) {
        return _mm512_permutexvar_ps((__m512i)i, table);
    }

    static CGX_INLINE Bytes to_bytes(const Ints* level, Uints top) {
        const __m512i words[2] = {_mm512_packs_epi32((__m512i)level[0], (__m512i)level[1]),
                                  _mm512_packs_epi32((__m512i)level[2], (__m512i)level[3])};
        return _mm512_min_epu8(_mm512_packus_epi16(words[0], words[1]), (__m512i)top);
    }

    template <int kBits>
    static CGX_INLINE void pack(const Bytes* level, uint8_t* out) {
        if constexpr (kBits == 1) {
            const __m512i levels = in_order(level[0]);
            cgx::store<uint64_t>(out, _mm512_test_epi8_mask(levels, levels));
        } else if constexpr (kBits == 4) {
            const __m512i words =
                _mm512_permutexvar_epi16(load_64(kNibbleOrder.data()), join_fours<4>(level[0]));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(words));
        } else if constexpr (kBits == 8) {
            _mm512_storeu_si512(out, in_order(level[0]));
        } else {
            const __m512i fours = join_fours<kBits>(in_order(level[0]));
            constexpr int64_t kUnused = 32 - 4 * kBits;
            const __m512i eights =
                _mm512_srli_epi64(_mm512_sllv_epi32(fours, _mm512_set1_epi64(kUnused)), kUnused);
            const __m512i quarters = _mm512_shuffle_epi8(eights, load_64(kJoinOrder<kBits>.data()));
            const __m512i words = _mm512_permutexvar_epi16(load_64(kPackOrder<kBits>.data()), quarters);
            _mm512_mask_storeu_epi64(out, (1 << kBits) - 1, words);
        }
    }

    template <int kBits>
    static CGX_INLINE Ints unpack(const uint8_t* packed, int v) {
        if constexpr (kBits == 8) {
            return (Ints)_mm512_cvtepu8_epi32(load_16(packed + 16 * v));
        } else if constexpr (kBits == 1) {
            const auto ones = static_cast<__mmask16>(cgx::load<uint16_t>(packed + 2 * v));
            return (Ints)_mm512_maskz_set1_epi32(ones, 1);
        } else {
            const __m512i bytes = _mm512_broadcast_i32x4(load_16(packed + first_byte<kBits>(v)));
            const __m512i pairs = _mm512_shuffle_epi8(bytes, load_64(kUnpackOrders<kBits>[v].data()));
            return (Ints)pairs >> (iota() * kBits & 7);
        }
    }

  private:
    static CGX_INLINE __m128i load_16(const uint8_t* data) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
    }

    static CGX_INLINE __m512i in_order(__m512i bytes) {
        return _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
    }

    // Joins four neighbouring levels in each 32-bit number.
    template <int kBits>
    static CGX_INLINE __m512i join_fours(__m512i levels) {
        const __m512i pairs = _mm512_maddubs_epi16(_mm512_set1_epi16(1 | 1 << (8 + kBits)), levels);
        return _mm512_madd_epi16(pairs, _mm512_set1_epi32(1 | 1 << (16 + 2 * kBits)));
    }
};

}  // namespace

void walk_avx512(const QsgdEncoding& encoding, int64_t first, int64_t last) {
    encode_with_vectors<QsgdVectors<Avx512>>(encoding, first, last);
}

void walk_avx512(const QsgdDecoding& decoding, int64_t first, int64_t last) {
    walk<QsgdVectors<Avx512>>(decoding, first, last);
}

}  // namespace cgx

#endif

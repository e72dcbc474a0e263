// Gathers and spreads the bits of the one-bit codecs with AVX2.
#include "isa.h"

#if CGX_HAS_X86_LOOPS

#include "avx2.h"
#include "sign_vectors.h"

namespace cgx {
namespace {

struct Avx2 : Avx2Vectors {
    static constexpr bool kPrefetches = true;

    static CGX_INLINE uint32_t negative_bits(const Floats* x) {
        const __m256i words[2] = {_mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]),
                                  _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3])};
        // Saturation keeps the sign.
        return static_cast<uint32_t>(_mm256_movemask_epi8(in_order(_mm256_packs_epi16(words[0], words[1]))));
    }

    static CGX_INLINE Floats choose_by_bits(uint64_t bits, int v, Floats zero, Floats one) {
        const Ints bit_on_top = fill(static_cast<int32_t>(bits >> 8 * v)) << (31 - iota());
        return choose((Floats)bit_on_top, one, zero);
    }
};

}  // namespace

void walk_avx2(const SignEncoding& encoding, int64_t first, int64_t last) {
    encode_with_vectors<SignVectors<Avx2>>(encoding, first, last);
}

void walk_avx2(const SignDecoding& decoding, int64_t first, int64_t last) {
    walk<SignVectors<Avx2>>(decoding, first, last);
}

}  // namespace cgx

#endif

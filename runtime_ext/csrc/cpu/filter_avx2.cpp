// The first pass of a selection for AVX2.
#include "isa.h"

#if CGX_HAS_X86_LOOPS

#include "avx2.h"
#include "filter.h"

namespace cgx {
namespace {

constexpr int kVector = 8;  // elements of a register

struct Avx2 {
    template <bool kAdds, Store kStore>
    static CGX_INLINE uint64_t block(Input input, int64_t begin, int32_t limit) {
        const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
        const __m256i limits = _mm256_set1_epi32(limit);
        uint64_t hits = 0;
        for (int j = 0; j < kBlock; j += kVector) {
            const int64_t i = begin + j;
            __m256 x = _mm256_loadu_ps(input.grad + i);
            if constexpr (kAdds) x = _mm256_add_ps(x, _mm256_loadu_ps(input.residual + i));
            if constexpr (kStore == Store::kUsual) _mm256_storeu_ps(input.next + i, x);
            if constexpr (kStore == Store::kStreamed) _mm256_stream_ps(input.next + i, x);
            const __m256i magnitude = _mm256_castps_si256(_mm256_and_ps(x, no_sign));
            const __m256i above = _mm256_cmpgt_epi32(magnitude, limits);
            hits |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(above))) << j;
        }
        return hits;
    }
};

}  // namespace

int64_t run_filter_avx2(const Filter& filter) {
    const int64_t count = filter_detail::walk<Avx2>(filter);
    _mm_sfence();  // other threads read `next`
    return count;
}

}  // namespace cgx
#endif

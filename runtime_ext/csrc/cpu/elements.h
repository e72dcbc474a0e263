// The elements that a selection looks at: all of the input, or the few that a first pass kept.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "filter.h"
#include "kernels.h"
#include "sparse.h"
#include "threads.h"

namespace cgx {

// A range of elements in the order of their indices.
struct ElementRange {
    const float* value;
    const int32_t* index;  // null if element i of the range is element first + i of the input
    int64_t first;
    int64_t numel;
};

// One part per thread, and the memory of parts that are not in the input.
struct Elements {
    std::vector<ElementRange> parts;
    std::vector<std::unique_ptr<float[]>> values;
    std::vector<std::unique_ptr<int32_t[]>> indices;
};

// The elements of a range, with their residuals and places in `next`.
Input slice(Input input, Range range);

// The functions below add the residual first, and write `next` if there is one.

Elements all_elements(Input input, int num_threads);

// Elements that reach `low`, or all elements if more than `capacity` do in one part.
Elements elements_above(Input input, uint32_t low, int64_t capacity, int num_threads);

// At least the `rank` largest elements, mostly few more.
Elements largest_elements(Input input, int64_t rank, int num_threads);

// The largest bits, without the sign, that do not reach `threshold`. A threshold above NaN is above every
// NaN, whatever its bits.
inline int32_t below(uint32_t threshold) {
    return threshold > kNanMagnitude ? INT32_MAX : static_cast<int32_t>(threshold) - 1;
}

// Bit j says whether element j of the block is above `limit`. The two halves of a block fill vectors of
// 32-bit numbers.
CGX_INLINE uint64_t mask_above(const float* block, int32_t limit) {
    uint32_t half[2] = {0, 0};
    for (int h = 0; h < 2; ++h) {
        for (int j = 0; j < kBlock / 2; ++j) {
            const uint32_t bits = float_bits(block[kBlock / 2 * h + j]) & 0x7FFFFFFFu;
            half[h] |= static_cast<int32_t>(bits) > limit ? 1u << j : 0u;
        }
    }
    return half[0] | static_cast<uint64_t>(half[1]) << 32;
}

}  // namespace cgx

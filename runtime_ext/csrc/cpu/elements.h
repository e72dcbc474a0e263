// The elements that a selection looks at: all of the input, or the few that one pass over it left over.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "sparse.h"

namespace cgx {

constexpr int kBlock = 64;  // elements looked at together: a bit each in a word

// Some elements in the order of their indices.
struct ElementRange {
    const float* value;
    const int32_t* index;  // null if element i of the part is element first + i of the input
    int64_t first;
    int64_t numel;
};

// The parts, one a thread, and the memory of those that are not in the input.
struct Elements {
    std::vector<ElementRange> parts;
    std::vector<std::unique_ptr<float[]>> values;
    std::vector<std::unique_ptr<int32_t[]>> indices;
};

// Each of these adds the residual first and writes `next` if there is one.

Elements all_elements(Input input, int num_threads);

// Those that reach `low`, or all if more than `capacity` do in one part.
Elements elements_above(Input input, uint32_t low, int64_t capacity, int num_threads);

// At least the `rank` largest, mostly few more.
Elements largest_elements(Input input, int64_t rank, int num_threads);

// The largest bits without their sign that do not reach `threshold`. NaNs are all alike: what is above one is
// above all, whatever their bits.
inline int32_t below(uint32_t threshold) {
    return threshold > kNanMagnitude ? INT32_MAX : static_cast<int32_t>(threshold) - 1;
}

// Bit j says whether element j of the block is above `limit`. Both halves fill vectors of 32-bit numbers.
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

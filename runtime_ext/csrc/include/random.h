// Counter-based random numbers: 32 random bits for every two elements.
#pragma once

#include "portable.h"

namespace cgx {

constexpr uint32_t kFirstFactor = 0x7FEB352Du;
constexpr uint32_t kSecondFactor = 0x846CA68Bu;

CGX_INLINE uint32_t lowbias32(uint32_t x, uint32_t key = 0) {
    x ^= x >> 16;
    x *= kFirstFactor;
    x += key;
    x ^= x >> 15;
    x *= kSecondFactor;
    return x ^ (x >> 16);
}

struct RandomKey {
    uint32_t outer;
    uint32_t inner;  // added between the multiplications, so that keys differ by more than their order
};

CGX_INLINE RandomKey make_random_key(uint32_t key) { return {key, lowbias32(key)}; }

// Element 2 * counter uses the low half, element 2 * counter + 1 the high half.
CGX_INLINE uint32_t random_bits(RandomKey key, uint32_t counter) {
    return lowbias32(counter ^ key.outer, key.inner);
}

}  // namespace cgx

// The first pass of a selection: adds the residual, writes `next`, and collects the elements above a limit.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels.h"
#include "portable.h"

namespace cgx {

constexpr int kBlock = 64;  // elements looked at together, one bit of a word each

// How the error-fed gradient gets to `next`, if there is one.
enum class Store { kNone, kUsual, kStreamed };

// value and index have room for `capacity` and a block.
struct Filter {
    Input input;
    Store store;
    int64_t first;  // index of the first element
    int32_t limit;  // for the bits without the sign
    int64_t capacity;
    float* value;
    int32_t* index;
};

// Returns how many elements are above the limit, or -1 if they are more than `capacity`.
int64_t run_filter(const Filter& filter);
int64_t run_filter_avx2(const Filter& filter);

namespace filter_detail {

constexpr int kUsualHits = 4;  // in a block; so many are written without a check
constexpr int kLine = 16;      // elements of a cache line
// Elements fetched early, since a processor's own prefetch stops at the end of a page.
constexpr int kAhead = 512;

template <bool kAdds>
CGX_INLINE float fed(Input input, int64_t i) {
    if constexpr (kAdds) return input.grad[i] + input.residual[i];
    return input.grad[i];
}

// Isa::block<kAdds, kStore>(input, i, limit) writes `next` from element i on, and returns a bit for each of
// kBlock elements that is above the limit.
template <typename Isa, bool kAdds, Store kStore>
CGX_INLINE int64_t walk(const Filter& filter) {
    const Input input = filter.input;
    int64_t count = 0, i = 0;
    bool overflows = false;
    for (; i + kBlock <= input.numel; i += kBlock) {
        for (int j = 0; j < kBlock; j += kLine) {
            __builtin_prefetch(input.grad + i + j + kAhead);
            if constexpr (kAdds) __builtin_prefetch(input.residual + i + j + kAhead);
        }
        uint64_t hits = Isa::template block<kAdds, kStore>(input, i, filter.limit);
        const int num_hits = std::popcount(hits);
        for (int k = 0; k < kUsualHits || k < num_hits; ++k, hits &= hits - 1) {
            const int64_t j = i + (std::countr_zero(hits) & (kBlock - 1));
            // `next` may be the residual.
            filter.value[count + k] = kStore == Store::kUsual ? input.next[j] : fed<kAdds>(input, j);
            filter.index[count + k] = static_cast<int32_t>(filter.first + j);
        }
        count += num_hits;
        if (count > filter.capacity) {
            overflows = true;  // go on: `next` has to be written all the same
            count = 0;
        }
    }
    for (; i < input.numel; ++i) {
        const float x = fed<kAdds>(input, i);
        if constexpr (kStore != Store::kNone) input.next[i] = x;
        filter.value[count] = x;
        filter.index[count] = static_cast<int32_t>(filter.first + i);
        count += static_cast<int32_t>(float_bits(x) & 0x7FFFFFFFu) > filter.limit;
    }
    return overflows || count > filter.capacity ? -1 : count;
}

template <typename Isa, bool kAdds>
CGX_INLINE int64_t walk(const Filter& filter) {
    switch (filter.store) {
        case Store::kNone:
            return walk<Isa, kAdds, Store::kNone>(filter);
        case Store::kUsual:
            return walk<Isa, kAdds, Store::kUsual>(filter);
        default:
            return walk<Isa, kAdds, Store::kStreamed>(filter);
    }
}

template <typename Isa>
CGX_INLINE int64_t walk(const Filter& filter) {
    return filter.input.residual != nullptr ? walk<Isa, true>(filter) : walk<Isa, false>(filter);
}

}  // namespace filter_detail
}  // namespace cgx

#include "elements.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "threads.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace cgx {
namespace {

constexpr int kUsualHits = 4;  // in a block; so many are written without a check
constexpr int kLine = 16;      // elements of a cache line
// Elements fetched early, since a processor's own prefetch stops at the end of a page.
constexpr int kAhead = 512;
constexpr int64_t kStreamedNumel = 1 << 22;  // 48 MiB of gradient, residual and next

constexpr int64_t kMinNumel = 1 << 10;  // with fewer elements, looking at all is as fast as a sample
constexpr int64_t kSampleShare = 64, kMinSampleLines = 32, kMaxSampleLines = 1 << 12;

// How the error-fed gradient gets to `next`, if there is one.
enum class Store { kNone, kUsual, kStreamed };

Store how_to_store(Input input) {
    if (input.next == nullptr) return Store::kNone;
#if defined(__SSE2__)
    // A usual store reads the cache line first. Nothing needs the line before the next step, when it has long
    // left the cache.
    const bool is_aligned = reinterpret_cast<uintptr_t>(input.next) % 16 == 0;
    if (is_aligned && input.next != input.residual && input.numel >= kStreamedNumel) return Store::kStreamed;
#endif
    return Store::kUsual;
}

template <bool kAdds>
CGX_INLINE void stream_block([[maybe_unused]] Input input, [[maybe_unused]] int64_t begin) {
#if defined(__SSE2__)
    for (int64_t i = begin; i < begin + kBlock; i += 4) {
        __m128 x = _mm_loadu_ps(input.grad + i);
        if constexpr (kAdds) x = _mm_add_ps(x, _mm_loadu_ps(input.residual + i));
        _mm_stream_ps(input.next + i, x);
    }
#endif
}

template <bool kAdds>
CGX_INLINE float fed(Input input, int64_t i) {
    if constexpr (kAdds) return input.grad[i] + input.residual[i];
    return input.grad[i];
}

// Collects the elements above `limit` in value and index, which have room for `capacity` and a block. Returns
// how many they are, or -1 if they are more than `capacity`.
template <bool kAdds, Store kStore>
CGX_INLINE int64_t filter(Input input, int64_t first, int32_t limit, int64_t capacity, float* value,
                          int32_t* index) {
    int64_t count = 0;
    bool overflows = false;
    int64_t i = 0;
    for (; i + kBlock <= input.numel; i += kBlock) {
        for (int j = 0; j < kBlock; j += kLine) {
            __builtin_prefetch(input.grad + i + j + kAhead);
            if constexpr (kAdds) __builtin_prefetch(input.residual + i + j + kAhead);
        }
        if constexpr (kStore == Store::kStreamed) stream_block<kAdds>(input, i);
        const float* block = input.grad + i;
        float sum[kBlock];
        if constexpr (kAdds || kStore == Store::kUsual) {
            float* out = kStore == Store::kUsual ? input.next + i : sum;
#pragma GCC ivdep  // next may be residual
            for (int j = 0; j < kBlock; ++j) out[j] = fed<kAdds>(input, i + j);
            block = out;
        }
        uint64_t hits = mask_above(block, limit);
        const int num_hits = std::popcount(hits);
        for (int k = 0; k < kUsualHits || k < num_hits; ++k, hits &= hits - 1) {
            const int j = std::countr_zero(hits) & (kBlock - 1);
            value[count + k] = block[j];
            index[count + k] = static_cast<int32_t>(first + i + j);
        }
        count += num_hits;
        if (count > capacity) {
            overflows = true;  // go on: `next` has to be written all the same
            count = 0;
        }
    }
    for (; i < input.numel; ++i) {
        const float x = fed<kAdds>(input, i);
        if constexpr (kStore != Store::kNone) input.next[i] = x;
        value[count] = x;
        index[count] = static_cast<int32_t>(first + i);
        count += static_cast<int32_t>(float_bits(x) & 0x7FFFFFFFu) > limit;
    }
#if defined(__SSE2__)
    if constexpr (kStore == Store::kStreamed) _mm_sfence();  // other threads read `next`
#endif
    return overflows || count > capacity ? -1 : count;
}

template <bool kAdds>
CGX_INLINE int64_t filter(Input input, Store store, int64_t first, int32_t limit, int64_t capacity,
                          float* value, int32_t* index) {
    switch (store) {
        case Store::kNone:
            return filter<kAdds, Store::kNone>(input, first, limit, capacity, value, index);
        case Store::kUsual:
            return filter<kAdds, Store::kUsual>(input, first, limit, capacity, value, index);
        default:
            return filter<kAdds, Store::kStreamed>(input, first, limit, capacity, value, index);
    }
}

CGX_MULTIVERSION
int64_t filter_part(Input input, Store store, int64_t first, int32_t limit, int64_t capacity, float* value,
                    int32_t* index) {
    if (input.residual != nullptr) return filter<true>(input, store, first, limit, capacity, value, index);
    return filter<false>(input, store, first, limit, capacity, value, index);
}

CGX_MULTIVERSION
void add_residual(Input input, float* out) {
#pragma GCC ivdep  // out may be residual
    for (int64_t i = 0; i < input.numel; ++i) out[i] = input.grad[i] + input.residual[i];
}

// The input after a pass that wrote `next`.
Input fed_input(Input input) {
    if (input.next == nullptr) return input;
    return {input.next, nullptr, nullptr, input.numel};
}

struct Guess {
    uint32_t low;  // 0 if a guess would not help
    int64_t capacity;
};

// Guesses from a sample a magnitude that few more than `rank` elements reach. A wrong guess costs time only.
Guess guess_low(Input input, int64_t rank) {
    if (input.numel < kMinNumel) return {0, 0};
    const int64_t num_lines =
        std::clamp(input.numel / (kLine * kSampleShare), kMinSampleLines, kMaxSampleLines);
    const int64_t num_sampled = num_lines * kLine;
    // A margin of four standard deviations of a count, plus a constant for small counts.
    const auto with_margin = [](double count) {
        return static_cast<int64_t>(count + 4 * std::sqrt(count)) + 8;
    };
    const double share = static_cast<double>(rank) / static_cast<double>(input.numel);
    const int64_t wanted = with_margin(share * static_cast<double>(num_sampled));
    if (wanted > num_sampled / 4) return {0, 0};
    uint32_t bins[kNumBins] = {};
    const int64_t stride = input.numel / num_lines;
    for (int64_t line = 0; line < num_lines; ++line) {
        // Sample at random within the stretch: otherwise all rows of a matrix would give the same columns.
        const int64_t offset = random_below(static_cast<uint32_t>(line), stride - kLine + 1);
        const int64_t begin = line * stride + offset;
        for (int64_t i = begin; i < begin + kLine; ++i) {
            const float x = input.residual == nullptr ? input.grad[i] : input.grad[i] + input.residual[i];
            ++bins[magnitude(x) >> kHistogramShift];
        }
    }
    const Bin bin = descend({0, 0, num_sampled}, bins, 31 - kHistogramShift, wanted);
    const int64_t expected = bin.num_above + bin.num_equal;
    if (expected > num_sampled / 4) return {0, 0};
    const double scale = static_cast<double>(input.numel) / static_cast<double>(num_sampled);
    return {bin.prefix << kHistogramShift,
            static_cast<int64_t>(static_cast<double>(with_margin(static_cast<double>(expected))) * scale)};
}

}  // namespace

Input slice(Input input, Range range) {
    return {input.grad + range.begin, input.residual == nullptr ? nullptr : input.residual + range.begin,
            input.next == nullptr ? nullptr : input.next + range.begin, range.end - range.begin};
}

Elements all_elements(Input input, int num_threads) {
    const int num_parts = count_parts(num_threads, input.numel);
    Elements elements{std::vector<ElementRange>(num_parts), {}, {}};
    float* sum = input.next;
    if (input.residual != nullptr && sum == nullptr) {
        sum = elements.values.emplace_back(std::make_unique_for_overwrite<float[]>(input.numel)).get();
    }
    for_each_part(num_parts, [&](int p) {
        const Range range = part_range(p, num_parts, input.numel, kBlock);
        const Input part = slice(input, range);
        if (part.residual != nullptr) {
            add_residual(part, sum + range.begin);
        } else if (sum != nullptr) {
            std::copy_n(part.grad, part.numel, sum + range.begin);
        }
        const float* value = sum == nullptr ? input.grad : sum;
        elements.parts[p] = {value + range.begin, nullptr, range.begin, part.numel};
    });
    return elements;
}

Elements elements_above(Input input, uint32_t low, int64_t capacity, int num_threads) {
    const int num_parts = count_parts(num_threads, input.numel);
    Elements elements{std::vector<ElementRange>(num_parts), {}, {}};
    for (int p = 0; p < num_parts; ++p) {
        const int64_t size = std::min(capacity, input.numel) + kBlock;
        elements.values.push_back(std::make_unique_for_overwrite<float[]>(size));
        elements.indices.push_back(std::make_unique_for_overwrite<int32_t[]>(size));
    }
    for_each_part(num_parts, [&](int p) {
        const Range range = part_range(p, num_parts, input.numel, kBlock);
        float* value = elements.values[p].get();
        int32_t* index = elements.indices[p].get();
        const int64_t count = filter_part(slice(input, range), how_to_store(input), range.begin, below(low),
                                          capacity, value, index);
        elements.parts[p] = {value, index, 0, count};
    });
    const bool fits = std::all_of(elements.parts.begin(), elements.parts.end(),
                                  [](ElementRange part) { return part.numel >= 0; });
    return fits ? std::move(elements) : all_elements(fed_input(input), num_threads);
}

Elements largest_elements(Input input, int64_t rank, int num_threads) {
    const Guess guess = guess_low(input, rank);
    if (guess.low == 0) return all_elements(input, num_threads);
    Elements elements = elements_above(input, guess.low, guess.capacity, num_threads);
    int64_t numel = 0;
    for (const ElementRange& part : elements.parts) numel += part.numel;
    return numel >= rank ? std::move(elements) : all_elements(fed_input(input), num_threads);
}

}  // namespace cgx

#include "elements.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "isa.h"
#include "streaming.h"
#include "threads.h"

namespace cgx {
namespace {

constexpr int kLine = 16;  // elements of a cache line

constexpr int64_t kMinNumel = 1 << 10;  // with fewer elements, looking at all is as fast as a sample
constexpr int64_t kSampleShare = 64, kMinSampleLines = 32, kMaxSampleLines = 1 << 12;
constexpr int kSampleAhead = 16;  // lines fetched before their turn, since each is on a page of its own

Store how_to_store(Input input) {
    if (input.next == nullptr) return Store::kNone;
    if (instruction_set() >= InstructionSet::kAvx2 && can_stream(input, 32)) return Store::kStreamed;
    return Store::kUsual;
}

// In the registers of any processor.
struct Portable {
    template <bool kAdds, Store kStore>
    static CGX_INLINE uint64_t block(Input input, int64_t begin, int32_t limit) {
        float sum[kBlock];
        for (int j = 0; j < kBlock; ++j) sum[j] = filter_detail::fed<kAdds>(input, begin + j);
        if constexpr (kStore != Store::kNone) std::copy_n(sum, kBlock, input.next + begin);
        return mask_above(sum, limit);
    }
};

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
    // Sample at random within the stretch: otherwise all rows of a matrix would give the same columns.
    const auto begin_of = [&](int64_t line) {
        return line * stride + random_below(static_cast<uint32_t>(line), stride - kLine + 1);
    };
    for (int64_t line = 0; line < num_lines; ++line) {
        const int64_t early = begin_of(line + kSampleAhead);
        __builtin_prefetch(input.grad + early);
        if (input.residual != nullptr) __builtin_prefetch(input.residual + early);
        const int64_t begin = begin_of(line);
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

int64_t run_filter(const Filter& filter) {
#if CGX_HAS_X86_LOOPS
    if (instruction_set() >= InstructionSet::kAvx2) return run_filter_avx2(filter);
#endif
    return filter_detail::walk<Portable>(filter);
}

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
    const Store store = how_to_store(input);
    for_each_part(num_parts, [&](int p) {
        const Range range = part_range(p, num_parts, input.numel, kBlock);
        float* value = elements.values[p].get();
        int32_t* index = elements.indices[p].get();
        const int64_t count =
            run_filter({slice(input, range), store, range.begin, below(low), capacity, value, index});
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

// Exact top-k: find the K-th largest magnitude by radix histograms, then collect in one pass.
#include "topk.h"

#include <algorithm>
#include <array>

#include "kernels.h"

namespace cgx {
namespace {

// A magnitude has 31 bits: 12 (the exponent and 4 more) come first, the others only if the bin must be split.
constexpr std::array<int, 4> kShifts = {31, 19, 8, 0};
constexpr int kMaxBins = 1 << 12;
constexpr int kTables = 4;   // equal neighbours would wait for each other's increment in a single table
constexpr int kBlock = 32;   // elements looked at together; most blocks hold nothing of interest
constexpr int kSample = 32;  // one block in so many gives the first guess

struct Threshold {
    uint32_t prefix;    // high bits of the K-th largest magnitude, as far as known
    int64_t num_above;  // elements above every magnitude with this prefix
    int64_t num_equal;  // elements with this prefix
};

CGX_INLINE void count_all(const float* grad, int64_t numel, int shift, uint32_t* bins) {
    uint32_t table[kTables][kMaxBins] = {};
    int64_t i = 0;
    for (; i + kBlock <= numel; i += kBlock) {
        uint32_t bin[kBlock];
        for (int j = 0; j < kBlock; ++j) bin[j] = magnitude(grad[i + j]) >> shift;
        for (int j = 0; j < kBlock; ++j) ++table[j % kTables][bin[j]];
    }
    for (; i < numel; ++i) ++table[0][magnitude(grad[i]) >> shift];
    for (int bin = 0; bin < kMaxBins; ++bin) {
        bins[bin] = 0;
        for (int t = 0; t < kTables; ++t) bins[bin] += table[t][bin];
    }
}

// Calls visit(i), in order, for every element whose magnitude is in [low, high]. Fast where few
// are: the compiler vectorizes the comparison.
template <typename Visit>
CGX_INLINE void for_each_between(const float* grad, int64_t numel, uint32_t low, uint32_t high, Visit visit) {
    const uint32_t width = high - low;
    int64_t i = 0;
    for (; i + kBlock <= numel; i += kBlock) {
        uint32_t hits = 0;
        for (int j = 0; j < kBlock; ++j) hits |= magnitude(grad[i + j]) - low <= width ? 1u << j : 0u;
        for (; hits != 0; hits &= hits - 1) visit(i + __builtin_ctz(hits));
    }
    for (; i < numel; ++i) {
        if (magnitude(grad[i]) - low <= width) visit(i);
    }
}

// A magnitude that at least num_kept elements should reach, from a sample. A wrong guess costs time only.
CGX_INLINE uint32_t guess_low(const float* grad, int64_t numel, int shift, int64_t num_kept, uint32_t* bins) {
    std::fill_n(bins, kMaxBins, 0u);
    for (int64_t i = 0; i + kBlock <= numel; i += kBlock * kSample) {
        for (int j = 0; j < kBlock; ++j) ++bins[magnitude(grad[i + j]) >> shift];
    }
    // A quarter more than the sample's share and 32 on top: chance seldom makes that too few.
    const int64_t wanted = num_kept / kSample * 5 / 4 + 32;
    int64_t seen = 0;
    uint32_t bin = kMaxBins - 1;
    while (bin > 0 && (seen += bins[bin]) < wanted) --bin;
    return bin << shift;
}

// Counts by the bits from `shift` up, right in every bin from that of the num_kept-th largest up.
CGX_INLINE void count_top(const float* grad, int64_t numel, int shift, int64_t num_kept, uint32_t* bins) {
    if (num_kept < numel / 8) {
        const uint32_t low = guess_low(grad, numel, shift, num_kept, bins);
        std::fill_n(bins, kMaxBins, 0u);
        int64_t counted = 0;
        for_each_between(grad, numel, low, kNanMagnitude, [&](int64_t i) {
            ++bins[magnitude(grad[i]) >> shift];
            ++counted;
        });
        if (counted >= num_kept) return;
    }
    count_all(grad, numel, shift, bins);
}

// Counts by the bits below `shift` of the elements whose bits from `shift` up are `prefix`.
CGX_INLINE void count_prefix(const float* grad, int64_t numel, uint32_t prefix, int shift, int next_shift,
                             uint32_t* bins) {
    const uint32_t mask = (1u << (shift - next_shift)) - 1;
    std::fill_n(bins, mask + 1, 0u);
    const uint32_t low = prefix << shift;
    for_each_between(grad, numel, low, low + (1u << shift) - 1,
                     [=](int64_t i) { ++bins[magnitude(grad[i]) >> next_shift & mask]; });
}

// Walks down from the top bin to the one that holds the K-th largest.
CGX_INLINE Threshold descend(Threshold from, const uint32_t* bins, int num_bits, int64_t num_kept) {
    int64_t num_above = from.num_above;
    uint32_t bin = (1u << num_bits) - 1;
    while (num_above + bins[bin] < num_kept) num_above += bins[bin--];
    return {from.prefix << num_bits | bin, num_above, bins[bin]};
}

}  // namespace

CGX_MULTIVERSION
void topk_select(const float* grad, int64_t numel, int32_t* index, float* value, int64_t num_kept) {
    if (num_kept == 0) return;
    uint32_t bins[kMaxBins];
    count_top(grad, numel, kShifts[1], num_kept, bins);
    Threshold threshold = descend({0, 0, numel}, bins, kShifts[0] - kShifts[1], num_kept);
    int level = 1;
    // Once the whole bin is kept, its lower edge is the threshold.
    while (level + 1 < static_cast<int>(kShifts.size()) &&
           threshold.num_above + threshold.num_equal > num_kept) {
        count_prefix(grad, numel, threshold.prefix, kShifts[level], kShifts[level + 1], bins);
        threshold = descend(threshold, bins, kShifts[level] - kShifts[level + 1], num_kept);
        ++level;
    }
    const uint32_t lowest = threshold.prefix << kShifts[level];
    int64_t ties_left = num_kept - threshold.num_above;
    for_each_between(grad, numel, lowest, kNanMagnitude, [&](int64_t i) {
        // Elements of a bin that is kept whole are as many as ties_left.
        if (magnitude(grad[i]) >> kShifts[level] == threshold.prefix && ties_left-- <= 0) return;
        *index++ = static_cast<int32_t>(i);
        *value++ = grad[i];
    });
}

}  // namespace cgx

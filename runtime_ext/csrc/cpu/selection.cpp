#include "selection.h"

#include <algorithm>
#include <bit>

#include "threads.h"

namespace cgx {
namespace {

constexpr int kScatterAhead = 32;  // elements fetched before their turn
constexpr int kCountBlock = 16;    // elements whose bins are computed together
constexpr int kTables = 2;  // in a single table, neighbours in one bin would wait for each other's increment

int num_level_bits(int level) { return level_shift(level) - level_shift(level + 1); }

CGX_INLINE void count_first(ElementRange part, int64_t* counts) {
    constexpr int64_t kLimit = 1 << 30;  // elements whose counts fit 32 bits
    for (int64_t begin = 0; begin < part.numel; begin += kLimit) {
        const int64_t end = std::min(begin + kLimit, part.numel);
        uint32_t table[kTables][kNumBins] = {};
        int64_t i = begin;
        for (; i + kCountBlock <= end; i += kCountBlock) {
            uint32_t bin[kCountBlock];
            for (int j = 0; j < kCountBlock; ++j) bin[j] = magnitude(part.value[i + j]) >> kHistogramShift;
            for (int j = 0; j < kCountBlock; ++j) ++table[j % kTables][bin[j]];
        }
        for (; i < end; ++i) ++table[0][magnitude(part.value[i]) >> kHistogramShift];
        for (int bin = 0; bin < kNumBins; ++bin) {
            for (int t = 0; t < kTables; ++t) counts[bin] += table[t][bin];
        }
    }
}

CGX_INLINE void count_split(ElementRange part, int level, uint32_t prefix, int64_t* counts) {
    const int shift = level_shift(level), next_shift = level_shift(level + 1);
    const uint32_t mask = (1u << (shift - next_shift)) - 1;
    int64_t i = 0;
    for (; i + kBlock / 2 <= part.numel; i += kBlock / 2) {
        uint32_t hits = 0;
        for (int j = 0; j < kBlock / 2; ++j)
            hits |= magnitude(part.value[i + j]) >> shift == prefix ? 1u << j : 0u;
        for (; hits != 0; hits &= hits - 1) {
            ++counts[magnitude(part.value[i + std::countr_zero(hits)]) >> next_shift & mask];
        }
    }
    for (; i < part.numel; ++i) {
        const uint32_t bits = magnitude(part.value[i]);
        if (bits >> shift == prefix) ++counts[bits >> next_shift & mask];
    }
}

CGX_MULTIVERSION
void count_part(ElementRange part, int level, uint32_t prefix, int64_t* counts) {
    std::fill_n(counts, kNumBins, 0);
    if (level > 0) {
        count_split(part, level, prefix, counts);
    } else {
        count_first(part, counts);
    }
}

struct Reached {
    int64_t num_sure;
    int64_t num_maybe;  // without those that are sure
};

CGX_MULTIVERSION
Reached count_reached(ElementRange part, Thresholds thresholds) {
    int64_t num_sure = 0, num_any = 0;
    for (int64_t i = 0; i < part.numel; ++i) {
        const uint32_t bits = magnitude(part.value[i]);
        num_sure += bits >= thresholds.sure;
        num_any += bits >= thresholds.maybe;
    }
    return {num_sure, num_any - num_sure};
}

// Writes to index and value in [begin, end). `rank` is the rank of the first element of the part that may be
// sent.
CGX_MULTIVERSION
void write_part(ElementRange part, Thresholds thresholds, Run run, int64_t rank, int32_t* index, float* value,
                int64_t begin, int64_t end, float* next) {
    const int32_t below_sure = below(thresholds.sure), below_maybe = below(thresholds.maybe);
    float rest[kBlock] = {};  // the last block, filled up
    int64_t at = begin;
    for (int64_t i = 0; i < part.numel; i += kBlock) {
        const int64_t count = std::min<int64_t>(part.numel - i, kBlock);
        const float* block = part.value + i;
        if (count < kBlock) {
            std::copy_n(block, count, rest);
            block = rest;
        }
        const uint64_t real = ~uint64_t{0} >> (kBlock - count);
        uint64_t hits = mask_above(block, below_maybe) & real;
        if (run.room < run.num_maybe) {
            uint64_t maybe = hits & ~mask_above(block, below_sure);
            for (; maybe != 0; maybe &= maybe - 1) {
                if (!is_in_run(run, rank++)) hits ^= maybe & -maybe;
            }
        }
        for (; hits != 0 && at < end; hits &= hits - 1, ++at) {
            const int64_t j = i + std::countr_zero(hits);
            index[at] = part.index == nullptr ? static_cast<int32_t>(part.first + j) : part.index[j];
            value[at] = part.value[j];
        }
    }
    if (next == nullptr) return;
    for (at = begin; at < end; ++at) {
        if (at + kScatterAhead < end) __builtin_prefetch(next + index[at + kScatterAhead], 1);
        next[index[at]] = 0.0f;
    }
}

}  // namespace

void count_bins(const Elements& elements, int level, uint32_t prefix, int64_t* counts) {
    const int num_parts = static_cast<int>(elements.parts.size());
    std::vector<int64_t> others(static_cast<size_t>(num_parts - 1) * kNumBins);
    for_each_part(num_parts, [&](int p) {
        count_part(elements.parts[p], level, prefix, p == 0 ? counts : others.data() + (p - 1) * kNumBins);
    });
    for (size_t i = 0; i < others.size(); ++i) counts[i % kNumBins] += others[i];
}

Bin find_bin(const Elements& elements, Bin bin, int level, int64_t rank) {
    int64_t counts[kNumBins];
    count_bins(elements, level, bin.prefix, counts);
    return descend(bin, counts, num_level_bits(level), rank);
}

int64_t write_chosen(const Elements& elements, Thresholds thresholds, std::optional<uint32_t> key,
                     int32_t* index, float* value, int64_t num_kept, float* next) {
    const int num_parts = static_cast<int>(elements.parts.size());
    std::vector<Reached> reached(num_parts);
    for_each_part(num_parts, [&](int p) { reached[p] = count_reached(elements.parts[p], thresholds); });
    int64_t num_sure = 0, num_maybe = 0;
    for (const Reached& part : reached) {
        num_sure += part.num_sure;
        num_maybe += part.num_maybe;
    }
    const int64_t room = std::max<int64_t>(num_kept - num_sure, 0);
    const Run run{key ? random_below(*key, num_maybe) : 0, room, num_maybe};
    std::vector<int64_t> begins(num_parts + 1), ranks(num_parts + 1);
    for (int p = 0; p < num_parts; ++p) {
        ranks[p + 1] = ranks[p] + reached[p].num_maybe;
        const int64_t num_sent =
            reached[p].num_sure + count_in_run(run, ranks[p + 1]) - count_in_run(run, ranks[p]);
        begins[p + 1] = std::min(begins[p] + num_sent, num_kept);
    }
    for_each_part(num_parts, [&](int p) {
        write_part(elements.parts[p], thresholds, run, ranks[p], index, value, begins[p], begins[p + 1],
                   next);
    });
    const int64_t count = begins[num_parts];
    std::fill(index + count, index + num_kept, 0);
    std::fill(value + count, value + num_kept, 0.0f);
    return count;
}

}  // namespace cgx

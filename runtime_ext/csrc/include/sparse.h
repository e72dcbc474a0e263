// Formulas of the codecs that send some elements. runtime_ext/reference/ is the specification.
#pragma once

#include "portable.h"
#include "random.h"

namespace cgx {

constexpr uint32_t kInfMagnitude = 0x7F800000u;
constexpr uint32_t kNanMagnitude = 0x7F800001u;
constexpr int64_t kNever = int64_t{1} << 31;  // no magnitude reaches it

// A magnitude has 31 bits. Selection looks at 12 of them first, the exponent and 4 more, and at the next 11
// and the last 8 only if a bin has to be split.
constexpr int kNumLevels = 3;
constexpr int kNumBins = 1 << 12;
constexpr int kHistogramShift = 19;

// Number of bits below those that `level` levels have looked at.
CGX_INLINE int level_shift(int level) {
    return level == 0 ? 31 : level == 1 ? kHistogramShift : level == 2 ? 8 : 0;
}

// |x| as an integer of the same order; every NaN is equal and above Inf.
CGX_INLINE uint32_t magnitude(float x) {
    const uint32_t bits = float_bits(x) & 0x7FFFFFFFu;
    return bits < kNanMagnitude ? bits : kNanMagnitude;
}

// A random number in [0, limit), or 0 if that is empty.
CGX_INLINE int64_t random_below(uint32_t key, int64_t limit) {
    return static_cast<int64_t>(lowbias32(key) * static_cast<uint64_t>(limit) >> 32);
}

// A random index of [begin, end), the i-th of the runs from which random_indices takes one index each.
CGX_INLINE int64_t random_in_run(RandomKey key, int64_t i, int64_t begin, int64_t end) {
    const uint64_t hash = random_bits(key, static_cast<uint32_t>(i));
    return begin + static_cast<int64_t>(hash * static_cast<uint64_t>(end - begin) >> 32);
}

CGX_INLINE int64_t run_begin(int64_t i, int64_t numel, int64_t num_kept) { return i * numel / num_kept; }

// The bin of a rank: elements whose magnitude has the high bits `prefix`.
struct Bin {
    uint32_t prefix;
    int64_t num_above;  // elements above every magnitude with this prefix
    int64_t num_equal;  // elements with this prefix
};

// Walks down the bins of `num_bits` more bits to the one of the rank-th largest, or to the lowest if there
// are fewer elements.
template <typename Count>
CGX_INLINE Bin descend(Bin from, const Count* bins, int num_bits, int64_t rank) {
    int64_t num_above = from.num_above;
    uint32_t bin = (1u << num_bits) - 1;
    while (bin > 0 && num_above + static_cast<int64_t>(bins[bin]) < rank) num_above += bins[bin--];
    return {from.prefix << num_bits | bin, num_above, static_cast<int64_t>(bins[bin])};
}

// The elements that are sent of those that may be: `room` in a row from `start` on, around the end.
struct Run {
    int64_t start;
    int64_t room;
    int64_t num_maybe;
};

// rank is below num_maybe
CGX_INLINE bool is_in_run(Run run, int64_t rank) {
    const int64_t offset = rank - run.start;
    return (offset < 0 ? offset + run.num_maybe : offset) < run.room;
}

// Number of ranks below `end` that are in the run.
CGX_INLINE int64_t count_in_run(Run run, int64_t end) {
    const int64_t room = run.room < run.num_maybe ? run.room : run.num_maybe;
    const int64_t to_end = run.num_maybe - run.start;
    const int64_t first = room < to_end ? room : to_end;
    const int64_t wrapped = room - first;
    const int64_t reached = end < run.start ? 0 : end - run.start;
    return (end < wrapped ? end : wrapped) + (reached < first ? reached : first);
}

constexpr uint32_t kNumFiniteBins = kInfMagnitude >> kHistogramShift;

// Fits an exponential in stages and returns the threshold. counts (kNumBins,), ratios (num_stages,), kept_bin
// the bin of the num_kept-th largest, bins (num_bins,) ascending, possibly without empty ones, or null for
// all. The order of the additions is part of the specification.
CGX_INLINE int64_t fit_threshold(const int64_t* counts, const double* ratios, int64_t num_stages,
                                 int64_t num_kept, uint32_t kept_bin, const uint16_t* bins = nullptr,
                                 int num_bins = kNumBins) {
    double eta = 0.0;
    for (int64_t stage = 0; stage < num_stages; ++stage) {
        int64_t total = 0;
        double excess = 0.0;
        for (int i = 0; i < num_bins; ++i) {
            const uint32_t bin = bins == nullptr ? static_cast<uint32_t>(i) : bins[i];
            if (bin >= kNumFiniteBins) break;
            const double middle = bits_float((bin << kHistogramShift) + (1u << (kHistogramShift - 1)));
            if (!(middle > eta)) continue;
            total += counts[bin];
            excess = excess + static_cast<double>(counts[bin]) * (middle - eta);
        }
        if (total == 0) break;
        eta = eta + excess / static_cast<double>(total) * ratios[stage];
    }
    uint32_t threshold = float_bits(static_cast<float>(eta));
    int64_t num_above = 0;
    for (int i = num_bins - 1; i >= 0; --i) {
        const uint32_t bin = bins == nullptr ? static_cast<uint32_t>(i) : bins[i];
        if (bin <= threshold >> kHistogramShift) break;
        num_above += counts[bin];
    }
    if (2 * num_above < num_kept || num_above > 2 * num_kept) threshold = kept_bin << kHistogramShift;
    return threshold > 0 ? threshold : 1;  // zeros never pass
}

enum class IndexKind { kOffsets, kBitmap, kRaw };

struct IndexLayout {
    IndexKind kind;
    int low_bits;       // of an offset
    int64_t low_words;  // 32-bit words of offsets, before those of the blocks
    int64_t num_words;
};

CGX_INLINE int64_t words_of_bits(int64_t num_bits) { return (num_bits + 31) / 32; }

CGX_INLINE IndexLayout index_layout(int64_t numel, int64_t num_kept) {
    if (num_kept == 0) return {IndexKind::kRaw, 0, 0, 0};
    int low_bits = 0;
    while (numel / num_kept >> (low_bits + 1) != 0) ++low_bits;
    const int64_t low_words = words_of_bits(num_kept * low_bits);
    const int64_t offset_words = low_words + words_of_bits(num_kept + ((numel - 1) >> low_bits) + 1);
    const int64_t bitmap_words = words_of_bits(numel);
    if (offset_words <= bitmap_words && offset_words <= num_kept) {
        return {IndexKind::kOffsets, low_bits, low_words, offset_words};
    }
    if (bitmap_words <= num_kept) return {IndexKind::kBitmap, 0, 0, bitmap_words};
    return {IndexKind::kRaw, 0, 0, num_kept};
}

}  // namespace cgx

// Selection by a threshold that was bisected, sampled or fitted.
#include <algorithm>

#include "selection.h"

namespace cgx {

void magnitude_histogram(const float* grad, int64_t numel, int64_t* counts, int num_threads) {
    count_bins(all_elements({grad, nullptr, nullptr, numel}, num_threads), 0, 0, counts);
}

// Halving the range r times finds the r high bits of the magnitude that num_kept + 1 elements reach.
// Histograms of those bits find the same in at most three passes, where the reference makes r.
void bisect_thresholds(const float* grad, int64_t numel, int64_t num_kept, int num_rounds,
                       int64_t* thresholds, int num_threads) {
    const int64_t rank = num_kept + 1;
    const Elements elements =
        largest_elements({grad, nullptr, nullptr, numel}, std::min(rank, numel), num_threads);
    Bin bin{0, 0, numel};
    int level = 0;
    while (31 - level_shift(level) < num_rounds) bin = find_bin(elements, bin, level++, rank);
    const int64_t maybe = static_cast<int64_t>(bin.prefix) << level_shift(level) >> (31 - num_rounds)
                                                                                        << (31 - num_rounds);
    thresholds[0] = maybe + (int64_t{1} << (31 - num_rounds));
    thresholds[1] = maybe;
}

void rank_thresholds(const float* grad, int64_t numel, int64_t rank, int64_t* thresholds, int num_threads) {
    const Elements elements = largest_elements({grad, nullptr, nullptr, numel}, rank, num_threads);
    Bin bin{0, 0, numel};
    for (int level = 0; level < kNumLevels; ++level) bin = find_bin(elements, bin, level, rank);
    thresholds[0] = kNever;
    thresholds[1] = std::max<int64_t>(bin.prefix, 1);  // zeros never pass
}

void sidco_thresholds(const float* grad, int64_t numel, const std::vector<double>& ratios, int64_t num_kept,
                      int64_t* thresholds, int num_threads) {
    int64_t counts[kNumBins];
    magnitude_histogram(grad, numel, counts, num_threads);
    uint16_t filled[kNumBins];  // gradients fill few of the bins
    int num_filled = 0;
    for (int bin = 0; bin < kNumBins; ++bin) {
        filled[num_filled] = static_cast<uint16_t>(bin);
        num_filled += counts[bin] != 0;
    }
    const Bin bin = descend({0, 0, 0}, counts, level_shift(0) - kHistogramShift, num_kept);
    thresholds[0] = kNever;
    thresholds[1] = fit_threshold(counts, ratios.data(), static_cast<int64_t>(ratios.size()), num_kept,
                                  bin.prefix, filled, num_filled);
}

void collect(const float* grad, int64_t numel, const int64_t* thresholds, uint32_t key, int32_t* index,
             float* value, int64_t num_kept, int32_t* count, int num_threads) {
    const Input input{grad, nullptr, nullptr, numel};
    const uint32_t sure = static_cast<uint32_t>(std::clamp<int64_t>(thresholds[0], 0, kNever));
    const uint32_t maybe = static_cast<uint32_t>(std::clamp<int64_t>(thresholds[1], 0, sure));
    // Most thresholds let about num_kept elements pass. If more than twice as many do, the input is read
    // again.
    const int64_t capacity = 2 * num_kept + 256;
    const Elements elements = capacity < numel / 2 ? elements_above(input, maybe, capacity, num_threads)
                                                   : all_elements(input, num_threads);
    *count =
        static_cast<int32_t>(write_chosen(elements, {sure, maybe}, key, index, value, num_kept, nullptr));
}

}  // namespace cgx

// Kernels that find thresholds, besides the passes of select.cu: the guess from a sample, the histogram of
// all magnitudes, the exponential fit and the bracket. runtime_ext/reference/ is the specification.
#include "bins.h"

namespace cgx {
namespace {

constexpr int64_t kSample = 32;  // one element in so many gives the first guess

// Guesses a magnitude that `rank` elements reach. A wrong guess costs time only.
template <typename T>
__device__ void sample(Source<T> source, int64_t rank, SelectionState* search, uint32_t* bins) {
    __shared__ uint32_t block_bins[kNumBins];
    clear_bins(block_bins);
    count_rows(source, kWarpSize / kSample, block_bins);
    add_bins(block_bins, bins);
    if (!is_last_block(&search->ticket)) return;
    // A quarter more than the share of the sample, plus 32, is seldom too few.
    const Bin bin =
        descend_in_block({0, 0, 0}, bins, level_shift(0) - kHistogramShift, rank / kSample * 5 / 4 + 32);
    if (threadIdx.x == 0) search->low = bin.prefix << kHistogramShift;
}

template <typename T>
__device__ void histogram(Source<T> source, unsigned long long* counts) {
    __shared__ uint32_t block_bins[kNumBins];
    clear_bins(block_bins);
    count_rows(source, kWarpSize, block_bins);
    add_bins(block_bins, counts);
}

}  // namespace
}  // namespace cgx

using namespace cgx;

// Turns the bin found after `level` levels into the bracket that num_rounds halvings find. thresholds (2,).
// For one block.
CGX_KERNEL threshold_bracket(const uint64_t* search, int32_t level, int32_t num_rounds, int64_t* thresholds) {
    if (threadIdx.x != 0) return;
    const int rest = 31 - num_rounds;
    const Bin bin = reinterpret_cast<const SelectionState*>(search)->bin;
    const int64_t maybe = static_cast<int64_t>(bin.prefix) << level_shift(level) >> rest << rest;
    thresholds[0] = maybe + (int64_t{1} << rest);
    thresholds[1] = maybe;
}

// counts (kNumBins,), ratios (num_stages,), thresholds (2,), of which the second is written. For one block.
CGX_KERNEL threshold_fit(const int64_t* counts, const double* ratios, int32_t num_stages, int64_t num_kept,
                         int64_t* thresholds) {
    // A single thread adds, since the order of additions matters. It reads the counts from shared memory, and
    // only those that are not zero.
    __shared__ int64_t near_counts[kNumBins];
    __shared__ uint16_t bins[kNumBins];
    constexpr int kBins = kNumBins / kBlockSize;
    const int begin = static_cast<int>(threadIdx.x) * kBins, end = begin + kBins;
    uint64_t num_used = 0, total;
    for (int bin = begin; bin < end; ++bin) {
        near_counts[bin] = counts[bin];
        if (near_counts[bin] != 0) ++num_used;
    }
    uint64_t next = exclusive_scan(num_used, &total);
    for (int bin = begin; bin < end; ++bin) {
        if (near_counts[bin] != 0) bins[next++] = static_cast<uint16_t>(bin);
    }
    __syncthreads();
    const Bin kept = descend_in_block({0, 0, 0}, near_counts, level_shift(0) - kHistogramShift, num_kept);
    if (threadIdx.x != 0) return;
    thresholds[1] =
        fit_threshold(near_counts, ratios, num_stages, num_kept, kept.prefix, bins, static_cast<int>(total));
}

// grad (numel,) of each type, residual (numel,) or null; search (6,), bins (kNumBins,) and counts (kNumBins,)
// zero at first.
#define CGX_KERNELS(T, suffix)                                                                               \
    CGX_KERNEL threshold_sample_##suffix(const T* grad, const float* residual, uint32_t numel, int64_t rank, \
                                         uint64_t* search, uint32_t* bins) {                                 \
        sample(Source<T>{grad, residual, numel}, rank, reinterpret_cast<SelectionState*>(search), bins);     \
    }                                                                                                        \
    CGX_KERNEL threshold_histogram_##suffix(const T* grad, uint32_t numel, unsigned long long* counts) {     \
        histogram(Source<T>{grad, nullptr, numel}, counts);                                                  \
    }

CGX_KERNELS(float, float32)
CGX_KERNELS(Half, float16)
CGX_KERNELS(BFloat16, bfloat16)

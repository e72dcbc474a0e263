// What finds thresholds beside the passes of select.cu: the guess from a sample, the histogram of all
// magnitudes, the exponential fit and the bracket. runtime_ext/reference.py is the specification.
#include "bins.h"

namespace cgx {
namespace {

constexpr int64_t kSample = 32;  // one element in so many gives the first guess

// A magnitude that `rank` elements should reach. A wrong guess costs time only.
template <typename T>
__device__ void sample(Source<T> source, int64_t rank, Search* search, uint32_t* bins) {
    __shared__ uint32_t block_bins[kNumBins];
    clear_bins(block_bins);
    count_rows(source, kWarpSize / kSample, block_bins);
    add_bins(block_bins, bins);
    if (!is_last_block(&search->ticket)) return;
    // A quarter more than the sample's share and 32 on top: chance seldom makes that too few.
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

// The bin found after `level` levels to the bracket that num_rounds halvings find. thresholds (2,). One
// block.
CGX_KERNEL threshold_bracket(const uint64_t* search, int32_t level, int32_t num_rounds, int64_t* thresholds) {
    if (threadIdx.x != 0) return;
    const int rest = 31 - num_rounds;
    const Bin bin = reinterpret_cast<const Search*>(search)->bin;
    const int64_t maybe = static_cast<int64_t>(bin.prefix) << level_shift(level) >> rest << rest;
    thresholds[0] = maybe + (int64_t{1} << rest);
    thresholds[1] = maybe;
}

// counts (kNumBins,), ratios (num_stages,), thresholds (2,), of which the second is written. One block.
CGX_KERNEL threshold_fit(const int64_t* counts, const double* ratios, int32_t num_stages, int64_t num_kept,
                         int64_t* thresholds) {
    // One thread adds, since the order counts: it had better find the counts near, and only those that are
    // not zero.
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
        sample(Source<T>{grad, residual, numel}, rank, reinterpret_cast<Search*>(search), bins);             \
    }                                                                                                        \
    CGX_KERNEL threshold_histogram_##suffix(const T* grad, uint32_t numel, unsigned long long* counts) {     \
        histogram(Source<T>{grad, nullptr, numel}, counts);                                                  \
    }

CGX_KERNELS(float, float32)
CGX_KERNELS(Half, float16)
CGX_KERNELS(BFloat16, bfloat16)

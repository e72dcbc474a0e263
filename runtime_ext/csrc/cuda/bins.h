// Histograms of magnitudes, and the search in them for the magnitude of a rank.
#pragma once

#include "gradient.h"

namespace cgx {

constexpr uint32_t kTile = kWarpSize * kWarpSize;  // elements of a warp's 32 words

// State that the kernels of one selection share. Zero at first.
struct SelectionState {
    Bin bin;            // of the rank-th largest, as far as known
    uint64_t total;     // of the tallies
    uint32_t low;       // elements below it were left out by a guess
    uint32_t is_short;  // the guess left out too many
    uint32_t ticket;
    uint32_t unused;
};
static_assert(sizeof(SelectionState) == 6 * sizeof(uint64_t));

// Counts `bin` in every lane with `is_counted`. For a whole warp. Lanes with the bin of the first one are
// added at once: equal bins in most lanes, as of zeros, would wait for each other.
CGX_DEVICE void count_in_warp(uint32_t* bins, uint32_t bin, bool is_counted) {
    const uint32_t counted = __ballot_sync(kAllLanes, is_counted);
    if (counted == 0) return;
    const int leader = __ffs(static_cast<int>(counted)) - 1;
    const bool is_same = bin == __shfl_sync(kAllLanes, bin, leader) && is_counted;
    const uint32_t same = __ballot_sync(kAllLanes, is_same);
    if (lane_index() == leader) {
        atomicAdd(bins + bin, static_cast<uint32_t>(__popc(same)));
    } else if (is_counted && !is_same) {
        atomicAdd(bins + bin, 1u);
    }
}

CGX_DEVICE void clear_bins(uint32_t* bins) {
    for (int bin = static_cast<int>(threadIdx.x); bin < kNumBins; bin += kBlockSize) bins[bin] = 0;
    __syncthreads();
}

template <typename Count>
CGX_DEVICE void add_bins(const uint32_t* bins, Count* sums) {
    __syncthreads();
    for (int bin = static_cast<int>(threadIdx.x); bin < kNumBins; bin += kBlockSize) {
        if (bins[bin] != 0) atomicAdd(sums + bin, static_cast<Count>(bins[bin]));
    }
}

// Finds the bin of `rank` among the 2^num_bits bins, 256 or more, below `from`. Valid in thread 0. For one
// block.
template <typename Count>
CGX_DEVICE Bin descend_in_block(Bin from, const Count* bins, int num_bits, int64_t rank) {
    __shared__ uint32_t sums[kNumBins / 16];           // of 16 bins
    __shared__ uint32_t sums_of_sums[kNumBins / 256];  // of 256 bins
    const int thread = static_cast<int>(threadIdx.x), num_bins = 1 << num_bits;
    if (thread < num_bins / 16) {
        uint32_t sum = 0;
        for (int j = 0; j < 16; ++j) sum += static_cast<uint32_t>(bins[16 * thread + j]);
        sums[thread] = sum;
    }
    __syncthreads();
    if (thread < num_bins / 256) {
        uint32_t sum = 0;
        for (int j = 0; j < 16; ++j) sum += sums[16 * thread + j];
        sums_of_sums[thread] = sum;
    }
    __syncthreads();
    if (thread != 0) return from;
    const uint32_t mask = static_cast<uint32_t>(num_bins - 1);
    from = descend(from, sums_of_sums, num_bits - 8, rank);
    from = descend(from, sums + 16 * (from.prefix & mask >> 8), 4, rank);
    return descend(from, bins + 16 * (from.prefix & mask >> 4), 4, rank);
}

// Counts `num_rows` rows of 32 elements in each tile. If that is not all rows, chance says which.
template <typename T>
CGX_DEVICE void count_rows(Source<T> source, int num_rows, uint32_t* bins) {
    const uint32_t num_tiles = (source.numel + kTile - 1) / kTile;
    const uint32_t warp = (blockIdx.x * kBlockSize + threadIdx.x) / kWarpSize;
    for (uint32_t tile = warp; tile < num_tiles; tile += gridDim.x * (kBlockSize / kWarpSize)) {
        const uint32_t row = num_rows == kWarpSize ? 0 : lowbias32(tile) % kWarpSize;
        const uint32_t begin = tile * kTile + row * kWarpSize + static_cast<uint32_t>(lane_index());
        for (int r = 0; r < num_rows; r += kBatch) {
            uint32_t at[kBatch];
            bool is_counted[kBatch];
            float x[kBatch];
            for (int j = 0; j < kBatch; ++j) {
                at[j] = begin + static_cast<uint32_t>((r + j) * kWarpSize);
                is_counted[j] = r + j < num_rows && at[j] < source.numel;
            }
            source.load(at, is_counted, x);
            for (int j = 0; j < kBatch; ++j) {
                count_in_warp(bins, magnitude(x[j]) >> kHistogramShift, is_counted[j]);
            }
        }
    }
}

}  // namespace cgx

// Operations of CUDA blocks of kBlockSize threads. Every thread of the block, or of the warp, has to call
// them.
#pragma once

#include "sparse.h"

namespace cgx {

constexpr int kBlockSize = 256;
// With 40 registers per thread, 6 blocks share a multiprocessor of 65,536 registers, and no kernel here
// spills variables to memory. Their histograms of 16 KiB fit its shared memory.
constexpr int kBlocksAMultiprocessor = 6;
constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

#define CGX_KERNEL extern "C" __global__ __launch_bounds__(cgx::kBlockSize, cgx::kBlocksAMultiprocessor) void

CGX_DEVICE int lane_index() { return static_cast<int>(threadIdx.x) % kWarpSize; }

// Returns the sum of `x` in the threads before this one. `total` becomes the sum in all threads.
CGX_DEVICE uint64_t exclusive_scan(uint64_t x, uint64_t* total) {
    __shared__ uint64_t warp_sums[kBlockSize / kWarpSize];
    const int lane = lane_index(), warp = static_cast<int>(threadIdx.x) / kWarpSize;
    uint64_t sum = x;
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const uint64_t before = __shfl_up_sync(kAllLanes, sum, distance);
        if (lane >= distance) sum += before;
    }
    if (lane == kWarpSize - 1) warp_sums[warp] = sum;
    __syncthreads();
    uint64_t first = 0;
    *total = 0;
    for (int w = 0; w < kBlockSize / kWarpSize; ++w) {
        if (w < warp) first += warp_sums[w];
        *total += warp_sums[w];
    }
    __syncthreads();  // the next scan writes warp_sums
    return first + sum - x;
}

// True in the block that comes last, which sees what the others wrote. `ticket` has to be zero at first, and
// is zero again afterwards.
CGX_DEVICE bool is_last_block(uint32_t* ticket) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
        if (is_last) *ticket = 0;
    }
    __syncthreads();
    __threadfence();
    return is_last;
}

// Sets each of tallies (num_tallies,) to the sum of those before it. Returns the sum of all. For one block.
CGX_DEVICE uint64_t scan_tallies(uint64_t* tallies, uint32_t num_tallies) {
    uint64_t sum = 0;
    for (uint32_t first = 0; first < num_tallies; first += kBlockSize) {
        const uint32_t i = first + threadIdx.x;
        uint64_t total;
        const uint64_t before = exclusive_scan(i < num_tallies ? tallies[i] : 0, &total);
        if (i < num_tallies) tallies[i] = sum + before;
        sum += total;
    }
    return sum;
}

}  // namespace cgx

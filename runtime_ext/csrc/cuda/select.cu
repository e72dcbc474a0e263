// Selection: exact top-k and threshold windows. runtime_ext/reference/ is the specification.
//
// Two words of 32 bits stand for 32 elements: `sure` has the elements that are sent, `maybe` those that may
// be. The first pass over the gradient fills both. Later passes look at the elements in `maybe` only, and
// each pass moves some to `sure` and drops others, down to the exact K-th largest or to given thresholds.
// Nothing is stored per element, so the workspace is numel / 4 bytes whatever the data, and the words of a
// block give its share of the output.
//
// Lengths are below 2^31. Element numbers have 32 bits, unsigned so that they may run past the end.
#include "bins.h"

namespace cgx {
namespace {

// With at most so many elements in each word of a warp, every thread visits its own word. With more, the warp
// takes one word at a time.
constexpr int kFew = 4;

// (num_words,) each; a block owns `words_a_block` of them, a multiple of kBlockSize.
struct Words {
    uint32_t* sure;
    uint32_t* maybe;
    uint32_t num_words;
    uint32_t words_a_block;
};

// Magnitudes from `sure` on are sent. Those from `maybe` on, which is not above `sure`, may be sent.
struct Window {
    uint32_t sure;
    uint32_t maybe;
};

// Counts the magnitudes in the window that are below `end`, by some of their bits.
struct Counting {
    uint32_t* bins;  // null: none
    uint32_t end;
    int shift;
    uint32_t mask;
};

// The elements of a thread's word, up to kFew.
template <typename T>
struct Few {
    uint32_t bit[kFew];  // 0: none
    uint32_t at[kFew];
    float x[kFew];

    __device__ Few(Source<T> source, uint32_t first, uint32_t word) {
        const uint32_t begin = first + static_cast<uint32_t>(lane_index() * kWarpSize);
        bool is_wanted[kFew];
        for (int j = 0; j < kFew; ++j) {
            bit[j] = word & (0u - word);
            word ^= bit[j];
            is_wanted[j] = bit[j] != 0;
            at[j] = begin + static_cast<uint32_t>(__popc(bit[j] - 1));
        }
        source.load(at, is_wanted, x);
    }
};

__device__ uint64_t pack_tally(uint32_t sure, uint32_t maybe) {
    return static_cast<uint64_t>(__popc(sure)) << 32 | static_cast<uint32_t>(__popc(maybe));
}

__device__ uint32_t sure_of(uint64_t tally) { return static_cast<uint32_t>(tally >> 32); }
__device__ uint32_t maybe_of(uint64_t tally) { return static_cast<uint32_t>(tally); }

__device__ bool has_many(uint32_t word) { return __ballot_sync(kAllLanes, __popc(word) > kFew) != 0; }

// Looks at the elements in `eligible`, this lane's word of the tile at element `first`; adds to *sure, sets
// *maybe.
template <bool kIsFull, typename T>
__device__ void split_rows(Source<T> source, float* next, uint32_t first, uint32_t eligible, Window window,
                           Counting counting, uint32_t* sure, uint32_t* maybe) {
    const int lane = lane_index();
    *maybe = 0;
    for (int row = 0; row < kWarpSize; row += kBatch) {
        uint32_t at[kBatch];
        bool is_eligible[kBatch];
        float x[kBatch];
        for (int j = 0; j < kBatch; ++j) {
            at[j] = first + static_cast<uint32_t>((row + j) * kWarpSize + lane);
            is_eligible[j] = kIsFull || (__shfl_sync(kAllLanes, eligible, row + j) >> lane & 1) != 0;
        }
        source.load(at, is_eligible, x);
        if (next != nullptr) {
            for (int j = 0; j < kBatch; ++j) {
                if (is_eligible[j]) next[at[j]] = x[j];
            }
        }
        for (int j = 0; j < kBatch; ++j) {
            const uint32_t size = magnitude(x[j]);
            const uint32_t reached = __ballot_sync(kAllLanes, is_eligible[j] && size >= window.maybe);
            if (reached == 0) continue;
            const uint32_t sure_word = __ballot_sync(kAllLanes, is_eligible[j] && size >= window.sure);
            const uint32_t maybe_word = reached & ~sure_word;
            if (lane == row + j) {
                *sure |= sure_word;
                *maybe = maybe_word;
            }
            if (counting.bins == nullptr) continue;
            const bool is_counted = (maybe_word >> lane & 1) != 0 && size < counting.end;
            count_in_warp(counting.bins, size >> counting.shift & counting.mask, is_counted);
        }
    }
}

// Does the same for words with few elements, each thread on its own.
template <typename T>
__device__ void split_few(Source<T> source, uint32_t first, uint32_t eligible, Window window,
                          Counting counting, uint32_t* sure, uint32_t* maybe) {
    const Few<T> few(source, first, eligible);
    *maybe = eligible;
    for (int j = 0; j < kFew; ++j) {
        if (few.bit[j] == 0) break;
        const uint32_t size = magnitude(few.x[j]);
        if (size >= window.sure) *sure |= few.bit[j];
        if (size >= window.sure || size < window.maybe) {
            *maybe &= ~few.bit[j];
        } else if (counting.bins != nullptr) {
            atomicAdd(counting.bins + (size >> counting.shift & counting.mask), 1u);
        }
    }
}

__device__ uint32_t clamp_threshold(int64_t threshold) {
    return static_cast<uint32_t>(threshold < 0 ? 0 : threshold > kNever ? kNever : threshold);
}

__device__ Window make_window(const SelectionState& search, const int64_t* thresholds, int level,
                              bool is_retry) {
    if (thresholds != nullptr) {
        const uint32_t sure = clamp_threshold(thresholds[0]), maybe = clamp_threshold(thresholds[1]);
        return {sure, maybe < sure ? maybe : sure};
    }
    if (level == 0) return {static_cast<uint32_t>(kNever), is_retry ? 0 : search.low};
    const int shift = level_shift(level);
    return {(search.bin.prefix + 1) << shift, search.bin.prefix << shift};
}

// The word of the elements that this pass looks at: all, or those that the pass before left.
__device__ uint32_t eligible_word(Words words, uint32_t word, uint32_t numel, int level) {
    if (word >= words.num_words) return 0;
    if (level > 0) return words.maybe[word];
    const uint32_t rest = numel - word * kWarpSize;
    return rest >= kWarpSize ? kAllLanes : (1u << rest) - 1;
}

// Makes one pass. Level 0 looks at every element and writes it to `next`; levels 1 to 3 look at those with
// the bits found so far. At the end the last block finds the next bits, or the offsets of the blocks if there
// are no more bits to find.
template <typename T>
__device__ void split(Source<T> source, float* next, const int64_t* thresholds, int64_t rank, int level,
                      bool is_retry, SelectionState* search, uint32_t* bins, Words words, uint64_t* tallies) {
    __shared__ uint32_t block_bins[kNumBins];
    if (is_retry && search->is_short == 0) return;
    const bool is_final = thresholds != nullptr || level == kNumLevels;
    const int shift = level_shift(is_final ? kNumLevels : level + 1);
    const int num_bits = is_final ? 0 : level_shift(level) - shift;
    const Window window = make_window(*search, thresholds, level, is_retry);
    // The first try has counted the elements that reach its guess.
    const uint32_t end = is_retry ? search->low : static_cast<uint32_t>(kNever);
    const Counting counting = {is_final ? nullptr : block_bins, end, shift, (1u << num_bits) - 1};
    if (!is_final) clear_bins(block_bins);

    uint64_t tally = 0;
    const uint32_t begin = blockIdx.x * words.words_a_block;
    for (uint32_t offset = 0; offset < words.words_a_block; offset += kBlockSize) {
        const uint32_t word = begin + offset + threadIdx.x;
        const uint32_t first = (word - static_cast<uint32_t>(lane_index())) * kWarpSize;
        const uint32_t eligible = eligible_word(words, word, source.numel, level);
        uint32_t sure = level > 0 && word < words.num_words ? words.sure[word] : 0, maybe = 0;
        if (__ballot_sync(kAllLanes, eligible != 0) != 0) {
            if (__ballot_sync(kAllLanes, eligible != kAllLanes) == 0) {
                split_rows<true>(source, next, first, eligible, window, counting, &sure, &maybe);
            } else if (level == 0 || has_many(eligible)) {
                split_rows<false>(source, next, first, eligible, window, counting, &sure, &maybe);
            } else {
                split_few(source, first, eligible, window, counting, &sure, &maybe);
            }
            if (word < words.num_words) {
                words.sure[word] = sure;
                words.maybe[word] = maybe;
            }
        }
        tally += pack_tally(sure, maybe);
    }
    if (is_final) {
        uint64_t block_tally;
        exclusive_scan(tally, &block_tally);
        if (threadIdx.x == 0) tallies[blockIdx.x] = block_tally;
    } else {
        add_bins(block_bins, bins);
    }

    if (!is_last_block(&search->ticket)) return;
    if (is_final) {
        const uint64_t total = scan_tallies(tallies, gridDim.x);
        if (threadIdx.x == 0) search->total = total;
        return;
    }
    const Bin bin = descend_in_block(level == 0 ? Bin{0, 0, 0} : search->bin, bins, num_bits, rank);
    if (threadIdx.x != 0) return;
    search->bin = bin;
    // No bin below the guess has a count, so a walk that ends there has found too few.
    search->is_short = !is_retry && level == 0 && bin.prefix < search->low >> kHistogramShift;
}

// Returns the elements of `maybe` that are in the run. `rank` is the rank of the first element.
__device__ uint32_t choose(uint32_t maybe, Run run, int64_t rank) {
    const int64_t num_chosen = count_in_run(run, rank + __popc(maybe)) - count_in_run(run, rank);
    if (num_chosen == __popc(maybe)) return maybe;
    if (num_chosen == 0) return 0;
    uint32_t chosen = 0;
    for (; maybe != 0; maybe &= maybe - 1) {
        if (is_in_run(run, rank++)) chosen |= maybe & (0u - maybe);
    }
    return chosen;
}

// index and value (num_kept,)
struct Output {
    int32_t* index;
    float* value;
    float* next;  // zeroed where an element is sent; may be null
    uint32_t num_kept;

    __device__ void put(uint32_t position, uint32_t i, float x) const {
        // More than num_kept elements above the thresholds are the caller's error, but never write past the
        // end.
        if (position >= num_kept) return;
        index[position] = static_cast<int32_t>(i);
        value[position] = x;
        if (next != nullptr) next[i] = 0.0f;
    }
};

// Writes the elements in `kept`, this lane's word of the tile at element `first`; the first one goes to
// `position`.
template <typename T>
__device__ void write_rows(Source<T> source, uint32_t first, uint32_t kept, uint32_t position,
                           Output output) {
    const int lane = lane_index();
    for (int row = 0; row < kWarpSize; row += kBatch) {
        uint32_t at[kBatch];
        bool is_kept[kBatch];
        float x[kBatch];
        for (int j = 0; j < kBatch; ++j) {
            at[j] = first + static_cast<uint32_t>((row + j) * kWarpSize + lane);
            is_kept[j] = (__shfl_sync(kAllLanes, kept, row + j) >> lane & 1) != 0;
        }
        source.load(at, is_kept, x);
        for (int j = 0; j < kBatch; ++j) {
            const uint32_t row_kept = __shfl_sync(kAllLanes, kept, row + j);
            const uint32_t row_position = __shfl_sync(kAllLanes, position, row + j);
            const uint32_t rank = static_cast<uint32_t>(__popc(row_kept & ((1u << lane) - 1)));
            if (is_kept[j]) output.put(row_position + rank, at[j], x[j]);
        }
    }
}

template <typename T>
__device__ void write_few(Source<T> source, uint32_t first, uint32_t kept, uint32_t position, Output output) {
    const Few<T> few(source, first, kept);
    for (int j = 0; j < kFew; ++j) {
        if (few.bit[j] != 0) output.put(position++, few.at[j], few.x[j]);
    }
}

// Writes the elements in `sure` and a run of those in `maybe` in ascending order, then zeros.
template <typename T>
__device__ void write(Source<T> source, Output output, uint32_t key, const SelectionState& search,
                      Words words, const uint64_t* tallies, int32_t* count) {
    const int64_t num_sure = sure_of(search.total), num_maybe = maybe_of(search.total);
    const int64_t room = output.num_kept > num_sure ? output.num_kept - num_sure : 0;
    const Run run = {random_below(key, num_maybe), room, num_maybe};
    uint64_t before = tallies[blockIdx.x];
    const uint32_t begin = blockIdx.x * words.words_a_block;
    for (uint32_t offset = 0; offset < words.words_a_block; offset += kBlockSize) {
        const uint32_t word = begin + offset + threadIdx.x;
        const uint32_t first = (word - static_cast<uint32_t>(lane_index())) * kWarpSize;
        const uint32_t sure = word < words.num_words ? words.sure[word] : 0;
        const uint32_t maybe = word < words.num_words ? words.maybe[word] : 0;
        uint64_t tally;
        const uint64_t rank = before + exclusive_scan(pack_tally(sure, maybe), &tally);
        before += tally;
        const uint32_t kept = sure | choose(maybe, run, maybe_of(rank));
        const uint32_t position = sure_of(rank) + static_cast<uint32_t>(count_in_run(run, maybe_of(rank)));
        if (has_many(kept)) {
            write_rows(source, first, kept, position, output);
        } else {
            write_few(source, first, kept, position, output);
        }
    }
    const int64_t sent = num_sure + count_in_run(run, num_maybe);
    const uint32_t num_sent = sent < output.num_kept ? static_cast<uint32_t>(sent) : output.num_kept;
    const uint32_t thread = blockIdx.x * kBlockSize + threadIdx.x;
    for (uint32_t i = num_sent + thread; i < output.num_kept; i += gridDim.x * kBlockSize) {
        output.index[i] = 0;
        output.value[i] = 0.0f;
    }
    if (count != nullptr && thread == 0) *count = static_cast<int32_t>(num_sent);
}

}  // namespace
}  // namespace cgx

using namespace cgx;

// grad (numel,) of each type, residual and next (numel,) or null, thresholds (2,) or null, search (6,) and
// bins (kNumBins,) zero at first, sure and maybe (num_words,), tallies (num_blocks,), index and value
// (num_kept,), count (1,) or null
#define CGX_KERNELS(T, suffix)                                                                              \
    CGX_KERNEL select_split_##suffix(                                                                       \
        const T* grad, const float* residual, float* next, uint32_t numel, const int64_t* thresholds,       \
        int64_t rank, int32_t level, int32_t is_retry, uint64_t* search, uint32_t* bins, uint32_t* sure,    \
        uint32_t* maybe, uint64_t* tallies, uint32_t num_words, uint32_t words_a_block) {                   \
        split(Source<T>{grad, residual, numel}, next, thresholds, rank, level, is_retry != 0,               \
              reinterpret_cast<SelectionState*>(search), bins, {sure, maybe, num_words, words_a_block},     \
              tallies);                                                                                     \
    }                                                                                                       \
    CGX_KERNEL select_write_##suffix(const T* grad, const float* residual, float* next, uint32_t numel,     \
                                     uint32_t key, const uint64_t* search, uint32_t* sure, uint32_t* maybe, \
                                     const uint64_t* tallies, uint32_t num_words, uint32_t words_a_block,   \
                                     int32_t* index, float* value, uint32_t num_kept, int32_t* count) {     \
        write(Source<T>{grad, residual, numel}, {index, value, next, num_kept}, key,                        \
              *reinterpret_cast<const SelectionState*>(search), {sure, maybe, num_words, words_a_block},    \
              tallies, count);                                                                              \
    }

CGX_KERNELS(float, float32)
CGX_KERNELS(Half, float16)
CGX_KERNELS(BFloat16, bfloat16)

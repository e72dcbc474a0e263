// Packing of indices, random indices, and adding of received elements. runtime_ext/reference/ is the
// specification, and its `index_layout` the format. Words are aligned; callers copy a message that is not.
#include "block.h"

namespace cgx {
namespace {

// Sets the bit at `position` for every lane with `is_set`. The positions ascend, so neighbours mostly share a
// word, and one of them writes it.
__device__ void set_bits(uint32_t* words, uint32_t position, bool is_set) {
    constexpr uint32_t kNoWord = 0xFFFFFFFFu;
    const int lane = lane_index();
    const uint32_t word = is_set ? position / 32 : kNoWord;
    uint32_t bits = is_set ? 1u << position % 32 : 0;
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const uint32_t other_word = __shfl_down_sync(kAllLanes, word, distance);
        const uint32_t other_bits = __shfl_down_sync(kAllLanes, bits, distance);
        if (lane + distance < kWarpSize && other_word == word) bits |= other_bits;
    }
    const uint32_t word_before = __shfl_up_sync(kAllLanes, word, 1);
    if (is_set && (lane == 0 || word_before != word)) atomicOr(words + word, bits);
}

// The number of indices, whatever the message says.
__device__ uint32_t clamp_count(int32_t count, uint32_t num_kept) {
    const uint32_t positive = count < 0 ? 0 : static_cast<uint32_t>(count);
    return positive < num_kept ? positive : num_kept;
}

__device__ uint32_t thread_in_grid() { return blockIdx.x * kBlockSize + threadIdx.x; }
__device__ uint32_t grid_size() { return gridDim.x * kBlockSize; }

// The low bits of all indices that reach into this word.
__device__ uint32_t pack_low_word(const int32_t* index, uint32_t count, uint32_t word, int low_bits) {
    const uint64_t first_bit = uint64_t{word} * 32;
    uint32_t packed = 0;
    for (uint64_t i = first_bit / low_bits; i < count && i * low_bits < first_bit + 32; ++i) {
        const uint32_t low = static_cast<uint32_t>(index[i]) & ((1u << low_bits) - 1);
        const int64_t at = static_cast<int64_t>(i * low_bits) - static_cast<int64_t>(first_bit);
        packed |= at < 0 ? low >> -at : low << at;
    }
    return packed;
}

__device__ uint32_t unpack_low(const uint32_t* words, uint32_t i, int low_bits) {
    if (low_bits == 0) return 0;
    const uint64_t first_bit = uint64_t{i} * low_bits;
    const uint32_t* word = words + first_bit / 32;
    const int shift = static_cast<int>(first_bit % 32);
    uint64_t bits = word[0];
    if (shift + low_bits > 32) bits |= static_cast<uint64_t>(word[1]) << 32;
    return static_cast<uint32_t>(bits >> shift) & ((1u << low_bits) - 1);
}

}  // namespace
}  // namespace cgx

using namespace cgx;

// index (num_kept,)
CGX_KERNEL indices_random(int64_t numel, uint32_t key, int32_t* index, uint32_t num_kept) {
    const RandomKey random_key = make_random_key(key);
    for (uint32_t i = thread_in_grid(); i < num_kept; i += grid_size()) {
        const int64_t begin = run_begin(i, numel, num_kept), end = run_begin(i + int64_t{1}, numel, num_kept);
        index[i] = static_cast<int32_t>(random_in_run(random_key, i, begin, end));
    }
}

// Copies the first `count` indices, then zeros. from and to (num_kept,), count (1,)
CGX_KERNEL indices_copy(const int32_t* from, const int32_t* count, uint32_t num_kept, int32_t* to) {
    const uint32_t num_indices = clamp_count(*count, num_kept);
    for (uint32_t i = thread_in_grid(); i < num_kept; i += grid_size()) to[i] = i < num_indices ? from[i] : 0;
}

// index (num_kept,), count (1,), low (low_words,) or null, ones (num_words,) zero at first. Sets bit index >>
// low_bits in a bitmap, where `is_unary` is 0; in a code of blocks the number of the index is added to that
// bit. An index that is not below numel sets no bit.
CGX_KERNEL indices_pack(const int32_t* index, const int32_t* count, uint32_t num_kept, uint32_t numel,
                        int32_t low_bits, int32_t is_unary, uint32_t* low, uint32_t low_words,
                        uint32_t* ones) {
    const uint32_t num_indices = clamp_count(*count, num_kept);
    for (uint32_t word = thread_in_grid(); word < low_words; word += grid_size()) {
        low[word] = pack_low_word(index, num_indices, word, low_bits);
    }
    // Whole warps, also at the end: their lanes work together.
    for (uint32_t i = thread_in_grid(); i - static_cast<uint32_t>(lane_index()) < num_indices;
         i += grid_size()) {
        const uint32_t at = i < num_indices ? static_cast<uint32_t>(index[i]) : numel;
        const bool is_set = at < numel;
        const uint32_t high = at >> low_bits;
        set_bits(ones, is_unary != 0 ? high + i : high, is_set);
    }
}

// Counts the ones before the words of each block (tallies), and all of them (total). words (num_words,),
// tallies (num_blocks,), total (1,), ticket (1,) zero at first. A block owns words_a_block words, a multiple
// of 256.
CGX_KERNEL indices_count(const uint32_t* words, uint32_t num_words, uint32_t words_a_block, uint64_t* tallies,
                         uint64_t* total, uint32_t* ticket) {
    uint64_t num_ones = 0;
    const uint32_t begin = blockIdx.x * words_a_block;
    for (uint32_t word = begin + threadIdx.x; word < begin + words_a_block && word < num_words;
         word += kBlockSize) {
        num_ones += static_cast<uint64_t>(__popc(words[word]));
    }
    uint64_t tally;
    exclusive_scan(num_ones, &tally);
    if (threadIdx.x == 0) tallies[blockIdx.x] = tally;
    if (!is_last_block(ticket)) return;
    const uint64_t sum = scan_tallies(tallies, gridDim.x);
    if (threadIdx.x == 0) *total = sum;
}

// Undoes indices_pack, after indices_count. index (num_kept,), with zeros after the last index. A broken
// message gives indices of any value.
CGX_KERNEL indices_unpack(const uint32_t* words, uint32_t num_words, uint32_t words_a_block,
                          const uint64_t* tallies, const uint64_t* total, const uint32_t* low,
                          int32_t low_bits, int32_t is_unary, const int32_t* count, int32_t* index,
                          uint32_t num_kept) {
    uint32_t num_indices = clamp_count(*count, num_kept);
    if (*total < num_indices) num_indices = static_cast<uint32_t>(*total);
    const uint32_t lane = static_cast<uint32_t>(lane_index());
    uint32_t before = static_cast<uint32_t>(tallies[blockIdx.x]);
    const uint32_t begin = blockIdx.x * words_a_block;
    for (uint32_t offset = 0; offset < words_a_block; offset += kBlockSize) {
        const uint32_t word = begin + offset + threadIdx.x;
        const uint32_t ones = word < num_words ? words[word] : 0;
        uint64_t tally;
        const uint32_t first_rank =
            before + static_cast<uint32_t>(exclusive_scan(static_cast<uint64_t>(__popc(ones)), &tally));
        before += static_cast<uint32_t>(tally);
        // The warp takes one word at a time, so that its lanes write next to each other.
        for (int row = 0; row < kWarpSize; ++row) {
            const uint32_t row_ones = __shfl_sync(kAllLanes, ones, row);
            const uint32_t row_rank = __shfl_sync(kAllLanes, first_rank, row);
            const uint32_t rank = row_rank + static_cast<uint32_t>(__popc(row_ones & ((1u << lane) - 1)));
            if (!(row_ones >> lane & 1) || rank >= num_indices) continue;
            const uint32_t position = (word - lane + static_cast<uint32_t>(row)) * 32 + lane;
            const uint32_t high = is_unary != 0 ? position - rank : position;
            index[rank] = static_cast<int32_t>(high << low_bits | unpack_low(low, rank, low_bits));
        }
    }
    for (uint32_t i = num_indices + thread_in_grid(); i < num_kept; i += grid_size()) index[i] = 0;
}

// Adds the first `count` values to `out`. index and value (num_kept,), count (1,), out (numel,). Indices are
// distinct; those outside `out` are skipped.
CGX_KERNEL indices_scatter_add(const int32_t* index, const float* value, const int32_t* count,
                               uint32_t num_kept, float* out, uint32_t numel) {
    const uint32_t num_indices = clamp_count(*count, num_kept);
    for (uint32_t i = thread_in_grid(); i < num_indices; i += grid_size()) {
        const uint32_t at = static_cast<uint32_t>(index[i]);
        if (at < numel) out[at] += value[i];
    }
}

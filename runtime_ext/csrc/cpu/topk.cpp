// Exact top-k: find the bin of the K-th largest magnitude by radix histograms, then collect.
#include <cstring>

#include "selection.h"

namespace cgx {

void topk_select(Input input, int32_t* index, float* value, int64_t num_kept, int num_threads) {
    const Elements elements = largest_elements(input, num_kept, num_threads);
    Bin bin{0, 0, input.numel};
    int level = 0;
    // A bin that is kept whole needs no splitting.
    while (level < kNumLevels && bin.num_above + bin.num_equal > num_kept) {
        bin = find_bin(elements, bin, level++, num_kept);
    }
    const int shift = level_shift(level);
    const Thresholds thresholds{(bin.prefix + 1) << shift, bin.prefix << shift};
    write_chosen(elements, thresholds, std::nullopt, index, value, num_kept, input.next);
}

void topk_encode(Input input, uint8_t* payload, int32_t* index, float* value, int64_t num_kept,
                 int num_threads) {
    topk_select(input, index, value, num_kept, num_threads);
    const auto count = static_cast<int32_t>(num_kept);
    memcpy(payload, &count, sizeof count);
    payload += sizeof count;
    pack_indices(index, &count, num_kept, input.numel, payload);
    memcpy(payload + 4 * index_layout(input.numel, num_kept).num_words, value, 4 * num_kept);
}

}  // namespace cgx

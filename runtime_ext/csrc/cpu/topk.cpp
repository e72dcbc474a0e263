// Exact top-k: find the bin of the K-th largest magnitude by radix histograms, then collect.
#include "selection.h"

namespace cgx {
namespace {

void select_layer(Input input, int32_t* index, float* value, int64_t num_kept, int num_threads) {
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

}  // namespace

void topk_select(Input input, LayerEnds ends, int32_t* index, float* value, int64_t num_kept,
                 int num_threads) {
    if (ends.num_layers == 0) return select_layer(input, index, value, num_kept, num_threads);
    int64_t begin = 0, first = 0;
    for (int64_t layer = 0; layer < ends.num_layers; ++layer) {
        const int64_t end = ends.elements[layer], last = ends.kept[layer];
        select_layer(slice(input, {begin, end}), index + first, value + first, last - first, num_threads);
        for (int64_t i = first; i < last; ++i) index[i] += static_cast<int32_t>(begin);
        begin = end;
        first = last;
    }
}

void topk_encode(Input input, LayerEnds ends, uint8_t* payload, int32_t* index, float* value,
                 int64_t num_kept, int num_threads) {
    topk_select(input, ends, index, value, num_kept, num_threads);
    const auto count = static_cast<int32_t>(num_kept);
    pack_message(index, value, &count, num_kept, input.numel, payload);
}

}  // namespace cgx

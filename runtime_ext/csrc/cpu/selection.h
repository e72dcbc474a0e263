// Shared by exact and threshold selection: finds the bin of a rank, writes the elements that reach two
// thresholds.
#pragma once

#include <cstdint>
#include <optional>

#include "elements.h"

namespace cgx {

// Sets counts (kNumBins,) to the numbers of elements by the bits of the level after `level`. Only elements
// whose bits before that are `prefix` count.
void count_bins(const Elements& elements, int level, uint32_t prefix, int64_t* counts);

// Refines `bin`, which is known to `level` levels, by one more level: to the bin of the rank-th largest
// element.
Bin find_bin(const Elements& elements, Bin bin, int level, int64_t rank);

struct Thresholds {
    uint32_t sure;
    uint32_t maybe;
};

// Writes to index and value (num_kept,) all elements that reach `sure`, and a run of those that only reach
// `maybe` as long as there is room. The run starts where `key` says, or with the first. Zeros follow. If
// there is a `next` (numel,), it becomes zero at every index. Returns the number of elements written.
int64_t write_chosen(const Elements& elements, Thresholds thresholds, std::optional<uint32_t> key,
                     int32_t* index, float* value, int64_t num_kept, float* next);

}  // namespace cgx

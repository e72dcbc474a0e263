// What exact and threshold selection share: find the bin of a rank, write what reaches two thresholds.
#pragma once

#include <cstdint>
#include <optional>

#include "elements.h"

namespace cgx {

// counts (kNumBins,), overwritten: elements by the bits of the level after `level`, if those before are
// `prefix`.
void count_bins(const Elements& elements, int level, uint32_t prefix, int64_t* counts);

// Refines `bin`, known to `level` levels, by one more: to where the rank-th largest is.
Bin find_bin(const Elements& elements, Bin bin, int level, int64_t rank);

struct Thresholds {
    uint32_t sure;
    uint32_t maybe;
};

// Writes to index and value, (num_kept,), all elements that reach `sure` and a run of those that reach
// `maybe` as long as there is room; it starts where `key` says, or with the first. Zeros follow, and if there
// is a `next`, (numel,), it becomes zero at every index. Returns how many there are.
int64_t write_chosen(const Elements& elements, Thresholds thresholds, std::optional<uint32_t> key,
                     int32_t* index, float* value, int64_t num_kept, float* next);

}  // namespace cgx

// The joint search over groups and options; cgx_ray/planner/search.py states the model and the proofs.
#pragma once

#include <cstdint>
#include <vector>

namespace cgx::planner {

// Seconds of a group of x elements: compute_a + compute_b x where backward runs, then network_a + network_b
// x.
struct Option {
    double compute_a, compute_b, network_a, network_b;
};

// A group: the layers after those of the group before it, up to but not including `end`.
struct PlannedGroup {
    int end, option;
};

struct Answer {
    double finish_s, bound_s;  // of the groups; no plan finishes earlier than bound_s
    std::vector<PlannedGroup> groups;
    int64_t num_labels;
};

// backward_s, numel: of each layer, in backward order. Ends once bound_s >= (1 - max_gap) finish_s, or after
// four passes that have kept max_labels partial plans each.
Answer search(const std::vector<double>& backward_s, const std::vector<double>& numel,
              const std::vector<Option>& options, double max_gap, int64_t max_labels);

}  // namespace cgx::planner

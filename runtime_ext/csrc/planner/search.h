// The joint search over groups and options; cgx_ray/planner/search.py states the model and the proofs.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace cgx::planner {

// Seconds of a group of x elements, each a + b * x; cgx_ray/planner/pipeline.py says what they are.
// tolls: of the first k layers, for k from 0 to all of them
struct Option {
    double compute_a, compute_b, network_a, network_b, lead_a, lead_b, tail_a, tail_b, alone_a, alone_b;
    std::vector<double> tolls;
};

// The layers after those of the group before, up to `end`, which is not included.
struct PlannedGroup {
    int end, option;
};

struct Answer {
    double finish_s, bound_s;  // finish of the groups with their tolls; no plan has less than bound_s
    std::vector<PlannedGroup> groups;
    int64_t num_labels;
};

// Ends once bound_s >= (1 - max_gap) * finish_s, or after three passes, of which the last keeps max_labels
// partial plans and the others a hundredth of that.
//
// backward_s, numel: per layer, in backward order
// costs: of each option, a and b of compute, network, lead, tail and alone
// tolls: of each option, by layer; empty if there are none
// after_s: the step takes so long at least after the network is done with the last layer
Answer search(const std::vector<double>& backward_s, const std::vector<double>& numel,
              const std::vector<std::array<double, 10>>& costs, const std::vector<std::vector<double>>& tolls,
              double after_s, double max_gap, int64_t max_labels);

}  // namespace cgx::planner

// Simulation of one training step; cgx_ray/planner/timeline.py says what a stage, a span and a part are.
#pragma once

#include <array>
#include <utility>
#include <vector>

namespace cgx::planner {

// In the order of `Resource` and `StepPart` of timeline.py.
enum Resource { kCompute, kCodec, kIntra, kInter, kNumResources };
enum Part { kComputing, kCoding, kBandwidth, kLatency, kNumParts };

struct Stage {
    std::vector<std::pair<int, double>> busy_s;  // resource, and seconds of work on it
    double latency_s;
    bool overlaps;
};

// stage: index in its group, 0 for backward
struct Span {
    int group, stage;
    double start_s, end_s;
};

// spans: in the order in which they started; critical: indices of spans
struct Step {
    double finish_s;
    std::array<double, kNumParts> parts_s;
    std::vector<Span> spans;
    std::vector<int> critical;
};

// Simulates groups, each with its backward and then its stages. There is at least one.
Step simulate(const std::vector<double>& backward_s, const std::vector<std::vector<Stage>>& stages);

}  // namespace cgx::planner

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "search.h"
#include "simulation.h"

namespace nb = nanobind;

namespace {

using GivenStage = std::tuple<std::vector<std::pair<int, double>>, double, bool>;

auto simulate(const std::vector<double>& backward_s, std::vector<std::vector<GivenStage>> given) {
    std::vector<std::vector<cgx::planner::Stage>> stages(given.size());
    for (size_t group = 0; group < given.size(); ++group)
        for (auto& [busy_s, latency_s, overlaps] : given[group])
            stages[group].push_back({std::move(busy_s), latency_s, overlaps});
    cgx::planner::Step step = cgx::planner::simulate(backward_s, stages);
    std::vector<std::tuple<int, int, double, double>> spans;
    for (const auto& [group, stage, start_s, end_s] : step.spans)
        spans.emplace_back(group, stage, start_s, end_s);
    return std::tuple(step.finish_s, step.parts_s, spans, step.critical);
}

}  // namespace

NB_MODULE(_search, m) {
    m.def(
        "search",
        [](const std::vector<double>& backward_s, const std::vector<double>& numel,
           const std::vector<std::array<double, 10>>& costs, const std::vector<std::vector<double>>& tolls,
           double after_s, double max_gap, int64_t max_labels) {
            cgx::planner::Answer answer =
                cgx::planner::search(backward_s, numel, costs, tolls, after_s, max_gap, max_labels);
            std::vector<std::pair<int, int>> groups;
            for (const cgx::planner::PlannedGroup& group : answer.groups)
                groups.emplace_back(group.end, group.option);
            return std::tuple(answer.finish_s, answer.bound_s, groups, answer.num_labels);
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def("simulate", &simulate, nb::call_guard<nb::gil_scoped_release>());
}

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "search.h"

namespace nb = nanobind;

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
}

#include "search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <queue>

namespace cgx::planner {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Largest rounding error of a sum of a few thousand doubles, relative to the finish.
constexpr double kRounding = 1e-12;
constexpr int kNumCells[] = {64, 256, 1024, 4096};

struct Problem {
    int num_layers;
    std::vector<double> backward, numel;  // of the first k layers
    const std::vector<Option>& options;

    double compute_s(int k, int end, const Option& option) const {
        return backward[end] - backward[k] + option.compute_a + option.compute_b * (numel[end] - numel[k]);
    }
    double network_s(int k, int end, const Option& option) const {
        return option.network_a + option.network_b * (numel[end] - numel[k]);
    }
    // The least w * compute + (1 - w) * network that layers k to end can take. A single group attains it,
    // since every further group costs another compute_a and network_a.
    double least_s(int k, int end, double w) const {
        double least = kInfinity;
        for (const Option& option : options)
            least = std::min(least, w * compute_s(k, end, option) + (1 - w) * network_s(k, end, option));
        return k == end ? 0 : least;
    }
};

std::vector<double> prefix_sums(const std::vector<double>& values) {
    std::vector<double> sums{0};
    for (double value : values) sums.push_back(sums.back() + value);
    return sums;
}

// A lower bound on V_k(s): the seconds from the moment at which compute is done with the first k layers,
// while the network has s seconds of work left, to the end of the step. It is tabulated at the multiples of a
// cell. V_k never falls and never rises faster than s, which gives a lower bound between the multiples too.
// That bound is exact except in cells where V_k has a kink.
class Bound {
  public:
    // finish_s: of a known plan; the bound does not tell apart what cannot be part of a better plan
    // coarser: a bound of the same problem with fewer cells, or null
    Bound(const Problem& problem, int num_cells, double finish_s, const Bound* coarser)
        : problem_(problem), num_cells_(num_cells), table_(problem.num_layers + 1) {
        int n = problem.num_layers;
        // With more work left than this, the compute time of one group with the least network time, the
        // network is never idle.
        double longest_s = 0;
        for (int k = 0; k <= n; ++k) {
            least_network_.push_back(problem.least_s(k, n, 0));
            for (const Option& option : problem.options)
                if (k < n && problem.network_s(k, n, option) == least_network_[k])
                    longest_s = std::max(longest_s, problem.compute_s(k, n, option));
        }
        cell_s_ = longest_s / num_cells + std::numeric_limits<double>::min();
        for (int k = n; k >= 0; --k) fill(k, finish_s, coarser);
    }

    double at(int k, double s) const {
        double x = s / cell_s_;
        if (x >= num_cells_) return s + least_network_[k];
        int i = static_cast<int>(x);
        return std::max(table_[k][i], table_[k][i + 1] - ((i + 1) * cell_s_ - s));
    }

  private:
    void fill(int k, double finish_s, const Bound* coarser) {
        int n = problem_.num_layers;
        std::vector<double>& row = table_[k];
        row.resize(num_cells_ + 1);
        // V_k is known at the last multiple, and is no larger before.
        double last_s = num_cells_ * cell_s_ + least_network_[k];
        for (int i = 0; i <= num_cells_; ++i) row[i] = k == n ? i * cell_s_ : last_s;
        if (k == n) return;
        // Let compute be done with k layers at time C, and the network at time D. Then w * C + (1 - w) * D is
        // at least least_s, since no group is sent before the backward of the first layer.
        for (double w = 0; w <= 1; w += 0.125) {
            double least_s = problem_.least_s(0, k, w) + (1 - w) * problem_.backward[std::min(k, 1)];
            for (int i = 0; i <= num_cells_; ++i)
                row[i] = std::min(row[i], finish_s - least_s + (1 - w) * i * cell_s_);
        }
        // Nothing is left to find where the coarser bound says as much.
        auto is_open = [&](int i) { return coarser == nullptr || coarser->at(k, i * cell_s_) < row[i]; };
        int first = 0, last = num_cells_;
        while (first <= last && !is_open(first)) ++first;
        while (first <= last && !is_open(last)) --last;
        if (first > last) return;
        for (int end = k + 1; end <= n; ++end)
            for (const Option& option : problem_.options) relax(row, k, end, option, first, last);
    }

    // Lowers row[first..last] to the time that `option` for layers k to end leads to.
    void relax(std::vector<double>& row, int k, int end, const Option& option, int first, int last) {
        double compute = problem_.compute_s(k, end, option), network = problem_.network_s(k, end, option);
        double idle = compute + at(end, network);  // the network is idle when the group comes
        if (idle >= row[last]) return;
        const double* next = table_[end].data();
        double* out = row.data();
        int i = std::lower_bound(row.begin() + first, row.begin() + last, idle) - row.begin();
        int idle_end = static_cast<int>(std::min<double>(last, compute / cell_s_));
        for (; i <= idle_end; ++i) out[i] = std::min(out[i], idle);
        double shift = (network - compute) / cell_s_;
        int whole = static_cast<int>(std::floor(std::min(shift, 1e9)));
        double back = (1 - (shift - whole)) * cell_s_;
        for (int inside = std::min(last, num_cells_ - 1 - whole); i <= inside; ++i)
            out[i] = std::min(out[i], compute + std::max(next[i + whole], next[i + whole + 1] - back));
        for (; i <= last; ++i) out[i] = std::min(out[i], i * cell_s_ + network + least_network_[end]);
    }

    const Problem& problem_;
    int num_cells_;
    double cell_s_;
    std::vector<double> least_network_;
    std::vector<std::vector<double>> table_;
};

// A partial plan: the first `end` layers in groups, and when compute and network are done with them.
struct Label {
    double compute_s, network_s;
    int end, option;
    int64_t parent;
};

struct Open {
    double bound_s;
    int end;
    int64_t label;
    bool operator<(const Open& other) const {
        return bound_s != other.bound_s ? bound_s > other.bound_s : end < other.end;
    }
};

class Search {
  public:
    Search(const Problem& problem, Answer& best) : problem_(problem), best_(best) {}

    // Runs A*: extends the label with the least bound by every group, and keeps labels that no other label
    // dominates. Raises the bound and lowers the finish of the best plan until they meet, or max_labels are
    // kept.
    void run(const Bound& bound, double max_gap, int64_t max_labels) {
        int n = problem_.num_layers;
        labels_.assign(1, {0, 0, 0, -1, -1});
        std::vector<std::map<double, double>> fronts(n + 1);  // network_s by compute_s
        std::priority_queue<Open> open;
        open.push({bound.at(0, 0), 0, 0});
        for (int64_t taken = 0; !open.empty(); ++taken) {
            Open top = open.top();
            best_.bound_s = std::max(best_.bound_s, std::min(top.bound_s, best_.finish_s));
            if ((taken & (taken - 1)) == 0) complete(top.label, bound);
            if (best_.bound_s >= best_.finish_s * (1 - max_gap) || std::ssize(labels_) > max_labels) return;
            open.pop();
            Label from = labels_[top.label];
            auto same = fronts[from.end].find(from.compute_s);
            if (from.end && (same == fronts[from.end].end() || same->second < from.network_s)) continue;
            for (int o = 0; o < std::ssize(problem_.options); ++o)
                for (int end = from.end + 1; end <= n; ++end) {
                    Label to = extend(from, end, o);
                    if (to.compute_s >= best_.finish_s) break;
                    double f =
                        std::max(top.bound_s, to.compute_s + bound.at(end, to.network_s - to.compute_s));
                    if (f >= best_.finish_s * (1 - kRounding) || !add(fronts[end], to)) continue;
                    to.parent = top.label;
                    labels_.push_back(to);
                    ++best_.num_labels;
                    if (end == n) {
                        best_.finish_s = to.network_s;
                        best_.groups = trace(std::ssize(labels_) - 1);
                    } else {
                        open.push({f, end, std::ssize(labels_) - 1});
                    }
                }
        }
        best_.bound_s = best_.finish_s;
    }

  private:
    Label extend(const Label& from, int end, int o) const {
        const Option& option = problem_.options[o];
        double compute = from.compute_s + problem_.compute_s(from.end, end, option);
        double network = std::max(from.network_s, compute) + problem_.network_s(from.end, end, option);
        return {compute, network, end, o, -1};
    }

    static bool add(std::map<double, double>& front, const Label& label) {
        auto after = front.upper_bound(label.compute_s);
        if (after != front.begin() && std::prev(after)->second <= label.network_s) return false;
        auto worse = front.lower_bound(label.compute_s);
        while (worse != front.end() && worse->second >= label.network_s) worse = front.erase(worse);
        front[label.compute_s] = label.network_s;
        return true;
    }

    // Follows the bound from a label to the end. Of equal next groups it takes the longest, so that there are
    // fewer groups.
    void complete(int64_t start, const Bound& bound) {
        std::vector<PlannedGroup> tail;
        Label now = labels_[start];
        while (now.end < problem_.num_layers) {
            Label next{};
            double least = kInfinity;
            for (int end = now.end + 1; end <= problem_.num_layers; ++end)
                for (int o = 0; o < std::ssize(problem_.options); ++o) {
                    Label to = extend(now, end, o);
                    double f = to.compute_s + bound.at(end, to.network_s - to.compute_s);
                    if (f < least * (1 + kRounding)) least = std::min(f, least), next = to;
                }
            now = next;
            tail.push_back({now.end, now.option});
        }
        if (now.network_s >= best_.finish_s) return;
        best_.finish_s = now.network_s;
        best_.groups = trace(start);
        best_.groups.insert(best_.groups.end(), tail.begin(), tail.end());
    }

    std::vector<PlannedGroup> trace(int64_t at) const {
        std::vector<PlannedGroup> groups;
        for (; at > 0; at = labels_[at].parent) groups.push_back({labels_[at].end, labels_[at].option});
        std::reverse(groups.begin(), groups.end());
        return groups;
    }

    const Problem& problem_;
    Answer& best_;
    std::vector<Label> labels_;
};

}  // namespace

Answer search(const std::vector<double>& backward_s, const std::vector<double>& numel,
              const std::vector<Option>& options, double max_gap, int64_t max_labels) {
    int n = static_cast<int>(backward_s.size());
    Problem problem{n, prefix_sums(backward_s), prefix_sums(numel), options};
    Answer best{kInfinity, 0, {}, 0};
    for (int o = 0; o < std::ssize(options); ++o) {
        double finish = problem.compute_s(0, n, options[o]) + problem.network_s(0, n, options[o]);
        if (finish < best.finish_s) best.finish_s = finish, best.groups = {{n, o}};
    }
    Search search(problem, best);
    max_gap = std::max(max_gap, kRounding);
    std::unique_ptr<Bound> bound;
    for (int num_cells : kNumCells) {
        bound = std::make_unique<Bound>(problem, num_cells, best.finish_s, bound.get());
        // Most labels are kept for the last pass, since its bound is the best.
        search.run(*bound, max_gap, num_cells == kNumCells[3] ? max_labels : max_labels / 4);
        if (best.bound_s >= best.finish_s * (1 - max_gap)) break;
    }
    return best;
}

}  // namespace cgx::planner

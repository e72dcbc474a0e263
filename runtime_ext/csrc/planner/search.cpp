#include "search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <queue>

#include "multiversion.h"

namespace cgx::planner {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Largest rounding error of a sum of a few thousand doubles, relative to the finish.
constexpr double kRounding = 1e-12;
// Cells of the bound in each pass.
constexpr int kLastNumCells = 4096, kNumCells[] = {64, 512, kLastNumCells};
// Share of the labels that passes before the last may keep, as a divisor. A finer bound costs less than more
// labels under a coarse one.
constexpr int kEarlyShare = 100;
// `Problem::least` knows the least w * compute + (1 - w) * network for each w that is a multiple of 1 /
// kNumWeights.
constexpr int kNumWeights = 8;

struct Problem {
    int num_layers;
    std::vector<double> backward, numel;  // of the first k layers
    std::vector<Option> options;
    double after_s;
    // Of the layers from k on, if the network never waits: the least seconds that it takes to the end of the
    // step, and the compute time of a plan that attains them.
    std::vector<double> least_rest, least_rest_compute;
    // The largest tolls that layers from k on can have.
    std::vector<double> most_toll;
    // By weight, the least w * compute + (1 - w) * network that the first k layers can take.
    std::vector<std::vector<double>> least;

    // A toll holds up device and network alike. So it is part of compute and of network, and the network has
    // it behind compute, after the lead.
    double toll_s(int k, int end, const Option& option) const { return option.tolls[end] - option.tolls[k]; }
    double compute_s(int k, int end, const Option& option) const {
        return backward[end] - backward[k] + option.compute_a + option.compute_b * (numel[end] - numel[k]) +
               toll_s(k, end, option);
    }
    double network_s(int k, int end, const Option& option) const {
        return option.network_a + option.network_b * (numel[end] - numel[k]) + toll_s(k, end, option);
    }
    double lead_s(int k, int end, const Option& option) const {
        return option.lead_a + option.lead_b * (numel[end] - numel[k]) - toll_s(k, end, option);
    }
    double tail_s(int k, int end, const Option& option) const {
        return option.tail_a + option.tail_b * (numel[end] - numel[k]);
    }
    double alone_s(int k, int end, const Option& option) const {
        return option.alone_a + option.alone_b * (numel[end] - numel[k]);
    }
    void find_most_toll() {
        most_toll.assign(num_layers + 1, 0);
        for (int k = num_layers - 1; k >= 0; --k) {
            double most = 0;
            for (const Option& option : options) most = std::max(most, toll_s(k, k + 1, option));
            most_toll[k] = most_toll[k + 1] + most;
        }
    }
    // Tolls differ by layer, so the least may need several groups.
    void find_least() {
        for (int i = 0; i <= kNumWeights; ++i) {
            double w = static_cast<double>(i) / kNumWeights;
            // under: by option, the least with the last layer so far in a group under it, which may go on.
            std::vector<double> row{0}, under(options.size(), kInfinity);
            for (int k = 0; k < num_layers; ++k) {
                double ended = kInfinity;
                for (size_t o = 0; o < options.size(); ++o) {
                    const Option& option = options[o];
                    double begin = w * option.compute_a + (1 - w) * option.network_a;
                    double layer = w * compute_s(k, k + 1, option) + (1 - w) * network_s(k, k + 1, option);
                    under[o] = std::min(under[o], row[k] + begin) + layer - begin;
                    ended = std::min(ended, under[o]);
                }
                row.push_back(ended);
            }
            least.push_back(std::move(row));
        }
    }
    void find_least_rest() {
        least_rest.assign(num_layers + 1, kInfinity);
        least_rest_compute.assign(num_layers + 1, 0);
        least_rest[num_layers] = after_s;
        for (int k = num_layers - 1; k >= 0; --k)
            for (int end = k + 1; end <= num_layers; ++end)
                for (const Option& option : options) {
                    double rest =
                        network_s(k, end, option) + std::max(tail_s(k, end, option), least_rest[end]);
                    if (rest >= least_rest[k]) continue;
                    least_rest[k] = rest;
                    least_rest_compute[k] =
                        compute_s(k, end, option) + std::max(lead_s(k, end, option), least_rest_compute[end]);
                }
    }
};

std::vector<double> prefix_sums(const std::vector<double>& values) {
    std::vector<double> sums{0};
    for (double value : values) sums.push_back(sums.back() + value);
    return sums;
}

struct Shifted {
    double compute, back, cell_s, network, tail;
};

// Lowers out[first..last] to the time of a group after which V_end(i) seconds are left, where `next` has
// V_end at the cells. The search spends most of its time here. `out` and `next` are rows of different layers.
CGX_MULTIVERSION
void lower_to_rest(double* __restrict out, const double* __restrict next, int first, int last, Shifted by) {
    for (int i = first; i <= last; ++i) {
        double after = next[i + 1] - by.back, rest = by.compute + (next[i] < after ? after : next[i]);
        double own = i * by.cell_s + by.network + by.tail;
        double found = rest < own ? own : rest;
        out[i] = found < out[i] ? found : out[i];
    }
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
        // With more work left than this, the network is never idle in the plan of `least_rest`.
        double longest_s =
            *std::max_element(problem.least_rest_compute.begin(), problem.least_rest_compute.end());
        cell_s_ = longest_s / num_cells + std::numeric_limits<double>::min();
        for (int k = problem.num_layers; k >= 0; --k) fill(k, finish_s, coarser);
    }

    double at(int k, double s) const {
        double x = s / cell_s_;
        if (x >= num_cells_) return s + problem_.least_rest[k];
        int i = static_cast<int>(x);
        return std::max(table_[k][i], table_[k][i + 1] - ((i + 1) * cell_s_ - s));
    }

  private:
    void fill(int k, double finish_s, const Bound* coarser) {
        int n = problem_.num_layers;
        std::vector<double>& row = table_[k];
        row.resize(num_cells_ + 1);
        // V_k is known at the last multiple, and is no larger before.
        double last_s = num_cells_ * cell_s_ + problem_.least_rest[k];
        for (int i = 0; i <= num_cells_; ++i) row[i] = k == n ? i * cell_s_ + problem_.after_s : last_s;
        if (k == n) return;
        // Let compute be done with k layers at time C, and the network at time D. Then w * C + (1 - w) * D is
        // at least least_s, since no group is sent before the backward of the first layer.
        for (int weight = 0; weight <= kNumWeights; ++weight) {
            double w = static_cast<double>(weight) / kNumWeights;
            double least_s = problem_.least[weight][k] + (1 - w) * problem_.backward[std::min(k, 1)];
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
        double lead = problem_.lead_s(k, end, option), tail = problem_.tail_s(k, end, option);
        // The network is idle when the group comes, or when its lead is over.
        double idle = compute + std::max(problem_.alone_s(k, end, option), at(end, lead + network));
        if (idle >= row[last]) return;
        const double* next = table_[end].data();
        double* out = row.data();
        int i = std::lower_bound(row.begin() + first, row.begin() + last, idle) - row.begin();
        int idle_end = static_cast<int>(std::min<double>(last, (compute + lead) / cell_s_));
        for (; i <= idle_end; ++i) out[i] = std::min(out[i], std::max(idle, i * cell_s_ + network + tail));
        double shift = (network - compute) / cell_s_;
        int whole = static_cast<int>(std::floor(std::min(shift, 1e9)));
        double back = (1 - (shift - whole)) * cell_s_;
        int inside = std::min(last, num_cells_ - 1 - whole);
        if (i <= inside) {
            lower_to_rest(out, next + whole, i, inside, {compute, back, cell_s_, network, tail});
            i = inside + 1;
        }
        double least = network + std::max(tail, problem_.least_rest[end]);
        for (; i <= last; ++i) out[i] = std::min(out[i], i * cell_s_ + least);
    }

    const Problem& problem_;
    int num_cells_;
    double cell_s_;
    std::vector<std::vector<double>> table_;
};

// A partial plan: the first `end` layers in groups, when compute and network are done with them, and when the
// last group is done. may_end: that may be what ends the step.
struct Label {
    double compute_s, network_s, done_s;
    int end, option;
    int64_t parent;
    bool may_end;
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
        labels_.assign(1, {0, 0, 0, 0, -1, -1, false});
        std::vector<Front> fronts(n + 1);
        std::priority_queue<Open> open;
        open.push({bound.at(0, 0), 0, 0});
        for (int64_t taken = 0; !open.empty(); ++taken) {
            Open top = open.top();
            best_.bound_s = std::max(best_.bound_s, std::min(top.bound_s, best_.finish_s));
            if ((taken & (taken - 1)) == 0) complete(top.label, bound);
            if (best_.bound_s >= best_.finish_s * (1 - max_gap) || std::ssize(labels_) > max_labels) return;
            open.pop();
            Label from = labels_[top.label];
            if (from.end && is_needless(fronts[from.end], from)) continue;
            for (int o = 0; o < std::ssize(problem_.options); ++o)
                for (int end = from.end + 1; end <= n; ++end) {
                    Label to = extend(from, end, o);
                    if (to.compute_s >= best_.finish_s) break;
                    double rest = to.compute_s + bound.at(end, to.network_s - to.compute_s);
                    double f = std::max({top.bound_s, rest, to.done_s});
                    // The tolls of later groups delay the end of this one, too.
                    to.may_end = to.done_s > rest - problem_.most_toll[end];
                    if (f >= best_.finish_s * (1 - kRounding) || !add(fronts[end], to)) continue;
                    to.parent = top.label;
                    labels_.push_back(to);
                    ++best_.num_labels;
                    if (end == n) {
                        best_.finish_s = finish_s(to);
                        best_.groups = trace(std::ssize(labels_) - 1);
                    } else {
                        open.push({f, end, std::ssize(labels_) - 1});
                    }
                }
        }
        best_.bound_s = best_.finish_s;
    }

  private:
    // Labels of the same layers, of which none has both a smaller compute_s and a smaller network_s than
    // another, and none may end the step by itself: network_s by compute_s.
    using Front = std::map<double, double>;

    Label extend(const Label& from, int end, int o) const {
        const Option& option = problem_.options[o];
        double compute = from.compute_s + problem_.compute_s(from.end, end, option);
        double lead = problem_.lead_s(from.end, end, option), tail = problem_.tail_s(from.end, end, option);
        double own = problem_.network_s(from.end, end, option);
        double network = std::max(from.network_s, compute + lead) + own;
        double alone = problem_.alone_s(from.end, end, option);
        double toll = problem_.toll_s(from.end, end, option);
        double done = std::max({from.done_s + toll, from.network_s + own + tail, compute + alone});
        return {compute, network, done, end, o, -1, false};
    }

    // Returns the finish of a plan of all layers.
    double finish_s(const Label& label) const {
        return std::max(label.done_s, label.network_s + problem_.after_s);
    }

    // Whether another label does no worse; a label on the front is not needless because of itself.
    static bool is_needless(const Front& front, const Label& label) {
        auto after = front.upper_bound(label.compute_s);
        if (after == front.begin()) return false;
        auto [compute, network] = *std::prev(after);
        bool is_itself = !label.may_end && compute == label.compute_s && network == label.network_s;
        return network <= label.network_s && !is_itself;
    }

    static bool add(Front& front, const Label& label) {
        auto after = front.upper_bound(label.compute_s);
        if (after != front.begin() && std::prev(after)->second <= label.network_s) return false;
        // Its own end may be later than that of a label that is worse otherwise.
        if (label.may_end) return true;
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
                    double rest = to.compute_s + bound.at(end, to.network_s - to.compute_s);
                    double f = std::max(rest, to.done_s);
                    if (f < least * (1 + kRounding)) least = std::min(f, least), next = to;
                }
            now = next;
            tail.push_back({now.end, now.option});
        }
        if (finish_s(now) >= best_.finish_s) return;
        best_.finish_s = finish_s(now);
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
              const std::vector<std::array<double, 10>>& costs, const std::vector<std::vector<double>>& tolls,
              double after_s, double max_gap, int64_t max_labels) {
    int n = static_cast<int>(backward_s.size());
    std::vector<Option> options;
    for (size_t o = 0; o < costs.size(); ++o) {
        const auto& c = costs[o];
        std::vector<double> sums = prefix_sums(tolls.empty() ? std::vector<double>(n) : tolls[o]);
        options.push_back({c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], std::move(sums)});
    }
    Problem problem{n, prefix_sums(backward_s), prefix_sums(numel), options, after_s, {}, {}, {}, {}};
    problem.find_least_rest();
    problem.find_most_toll();
    problem.find_least();
    Answer best{kInfinity, 0, {}, 0};
    for (int o = 0; o < std::ssize(options); ++o) {
        double network = problem.lead_s(0, n, options[o]) + problem.network_s(0, n, options[o]);
        double finish = problem.compute_s(0, n, options[o]) +
                        std::max(network + after_s, problem.alone_s(0, n, options[o]));
        if (finish < best.finish_s) best.finish_s = finish, best.groups = {{n, o}};
    }
    Search search(problem, best);
    max_gap = std::max(max_gap, kRounding);
    std::unique_ptr<Bound> bound;
    for (int num_cells : kNumCells) {
        bound = std::make_unique<Bound>(problem, num_cells, best.finish_s, bound.get());
        // Most labels are kept for the last pass, since its bound is the best.
        search.run(*bound, max_gap, num_cells == kLastNumCells ? max_labels : max_labels / kEarlyShare);
        if (best.bound_s >= best.finish_s * (1 - max_gap)) break;
    }
    return best;
}

}  // namespace cgx::planner

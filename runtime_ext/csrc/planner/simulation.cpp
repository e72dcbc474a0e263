#include "simulation.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <tuple>

namespace cgx::planner {
namespace {

// A stage starts, gives a resource back, or ends.
// after: the moment that it waited for, `spent_s` earlier; -1 at the start of the step
// part: kind of work in between
// span: the stage, by its place in the order of starts; -1 at the start of the step
struct Moment {
    double time_s;
    int after;
    Part part;
    double spent_s;
    int span;
};

template <typename T>
using MinQueue = std::priority_queue<T, std::vector<T>, std::greater<T>>;
// Group, stage, and the moment from which it may start.
using Ready = std::tuple<int, int, int>;

double longest_s(const Stage& stage) {
    double most = 0;
    for (auto [resource, seconds] : stage.busy_s) most = std::max(most, seconds);
    return most;
}

class Simulation {
  public:
    Simulation(const std::vector<double>& backward_s, const std::vector<std::vector<Stage>>& stages)
        : stages_(stages), ends_(backward_s.size()) {
        for (double seconds : backward_s) backward_.push_back({{{kCompute, seconds}}, 0, false});
    }

    Step run() {
        moments_.push_back({0, -1, kComputing, 0, -1});
        allow(0, 0, 0);
        for (;;) {
            auto [start_s, first] = next_start();
            if (!arriving_.empty() && (first == nullptr || arriving_.top().first <= start_s)) {
                Ready ready = arriving_.top().second;
                now_s_ = arriving_.top().first;
                arriving_.pop();
                waiting_[resources_of(stage(std::get<0>(ready), std::get<1>(ready)))].push(ready);
            } else if (first != nullptr) {
                now_s_ = start_s;
                auto [group, index, moment] = first->top();
                first->pop();
                start(group, index, moment);
            } else {
                return step();
            }
        }
    }

  private:
    const Stage& stage(int group, int index) const {
        return index == 0 ? backward_[group] : stages_[group][index - 1];
    }

    static int resources_of(const Stage& stage) {
        int set = 0;
        for (auto [resource, seconds] : stage.busy_s) set |= 1 << resource;
        return set;
    }

    // Returns when the next waiting stage can start, and the queue whose first stage that is, the oldest
    // group's; null if none waits.
    std::pair<double, MinQueue<Ready>*> next_start() {
        double next_s = std::numeric_limits<double>::infinity();
        MinQueue<Ready>* first = nullptr;
        for (int set = 0; set < std::ssize(waiting_); ++set) {
            MinQueue<Ready>& queue = waiting_[set];
            if (queue.empty()) continue;
            double start_s = now_s_;
            for (int resource = 0; resource < kNumResources; ++resource)
                if (set >> resource & 1) start_s = std::max(start_s, moments_[free_[resource]].time_s);
            if (first == nullptr || start_s < next_s || (start_s == next_s && queue.top() < first->top()))
                next_s = start_s, first = &queue;
        }
        return {next_s, first};
    }

    void allow(int group, int index, int moment) {
        arriving_.push({moments_[moment].time_s, {group, index, moment}});
    }

    int add(double time_s, int after, Part part, double spent_s, int span) {
        moments_.push_back({time_s, after, part, spent_s, span});
        return static_cast<int>(moments_.size()) - 1;
    }

    static Part part_of(int index, int resource) {
        if (index == 0) return kComputing;
        return resource == kIntra || resource == kInter ? kBandwidth : kCoding;
    }

    void start(int group, int index, int allowed) {
        const Stage& own = stage(group, index);
        int here = static_cast<int>(spans_.size()), start = allowed;
        for (auto [resource, seconds] : own.busy_s)
            if (moments_[free_[resource]].time_s > moments_[start].time_s) start = free_[resource];
        double start_s = moments_[start].time_s;
        int done = start;
        for (auto [resource, seconds] : own.busy_s) {
            free_[resource] = add(start_s + seconds, start, part_of(index, resource), seconds, here);
            if (moments_[free_[resource]].time_s > moments_[done].time_s) done = free_[resource];
        }
        if (own.overlaps && moments_[ends_[group]].time_s >= moments_[done].time_s) done = ends_[group];
        double end_s = moments_[done].time_s + own.latency_s;
        int end = add(end_s, done, kLatency, own.latency_s, here);
        spans_.push_back({group, index, start_s, end_s});
        ends_[group] = end;
        if (index == 0 && group + 1 < std::ssize(backward_)) allow(group + 1, 0, end);
        if (index == std::ssize(stages_[group])) return;
        const Stage& later = stage(group, index + 1);
        // Pieces that are not there yet hold up no other group.
        double from_s = std::max(start_s, end_s - longest_s(later));
        allow(group, index + 1, later.overlaps ? before(end, from_s) : end);
    }

    // Returns the moment at `time_s` on the way to `end`.
    int before(int end, double time_s) {
        int at = end;
        while (moments_[at].after >= 0 && moments_[moments_[at].after].time_s >= time_s)
            at = moments_[at].after;
        Moment found = moments_[at];
        if (found.after < 0 || found.time_s <= time_s) return at;
        return add(time_s, found.after, found.part, time_s - moments_[found.after].time_s, found.span);
    }

    Step step() const {
        int last = ends_[0];
        for (int end : ends_)
            if (moments_[end].time_s > moments_[last].time_s) last = end;
        Step result{moments_[last].time_s, {}, spans_, {}};
        for (int at = last; moments_[at].span >= 0; at = moments_[at].after) {
            const Moment& moment = moments_[at];
            result.parts_s[moment.part] += moment.spent_s;
            if (result.critical.empty() || result.critical.back() != moment.span)
                result.critical.push_back(moment.span);
        }
        std::reverse(result.critical.begin(), result.critical.end());
        return result;
    }

    const std::vector<std::vector<Stage>>& stages_;
    std::vector<Stage> backward_;
    std::vector<Moment> moments_;
    std::vector<Span> spans_;
    // By resource, the moment at which it has done its work so far.
    std::array<int, kNumResources> free_{};
    // Stages that the stage before has yet to let start.
    MinQueue<std::pair<double, Ready>> arriving_;
    // By the set of resources that they need, the stages that may start.
    std::array<MinQueue<Ready>, 1 << kNumResources> waiting_;
    // By group, the end of its last stage so far.
    std::vector<int> ends_;
    double now_s_ = 0;  // of the last event
};

}  // namespace

Step simulate(const std::vector<double>& backward_s, const std::vector<std::vector<Stage>>& stages) {
    return Simulation(backward_s, stages).run();
}

}  // namespace cgx::planner

#include "ring_loop.h"

#include "clock.h"

namespace cgx {
namespace {

// The bell wakes the thread. A time-out would only hide a bell that nobody rings.
constexpr double kForeverS = 1e6;

}  // namespace

void RingLoop::run() {
    Counter& bell = segment_.rank(own_place_).bell;
    while (true) {
        const uint32_t seen = bell.value.load();
        if (is_stopped_) return;
        if (!move()) bell.sleep(seen, kForeverS);
    }
}

void RingLoop::stop() {
    is_stopped_ = true;
    segment_.rank(own_place_).bell.add_one();
}

void RingLoop::move_until(const std::function<bool()>& has_come, double timeout_s) {
    const double deadline = now_s() + timeout_s;
    RankState& own = segment_.rank(own_place_);
    ++own.num_waiters;
    uint32_t seen;
    bool is_more;
    while (true) {
        seen = own.waiter_bell.value.load();
        is_more = move();
        const double left_s = deadline - now_s();
        if (has_come() || left_s <= 0) break;
        if (!is_more) own.waiter_bell.sleep(seen, left_s);
    }
    --own.num_waiters;
    // Leave data that has arrived since then to the next thread that moves messages.
    if (is_more || own.waiter_bell.value.load() != seen) wake();
}

// Moves some of every message. False if nothing more can be moved now.
bool RingLoop::move() {
    bool is_more = false;
    for (Stream* stream : streams_) is_more |= stream->move();
    return is_more;
}

}  // namespace cgx

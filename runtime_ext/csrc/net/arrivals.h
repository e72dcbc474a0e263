// How fast bytes arrive while messages are under way: the rate of the link, whoever came late and however
// long it took to encode.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cgx {

// `num_bytes` arrived within `seconds`, from `peer`, or from all ranks together where that is -1.
struct Burst {
    int peer;
    int64_t num_bytes;
    double seconds;
};

// Cuts what one peer sends, or all of them, into bursts of about kBurstS. Times are when the kernel got the
// bytes, so a reader that has to wait for a processor does not matter.
class ArrivalMeter {
  public:
    explicit ArrivalMeter(int peer) : peer_(peer) {}

    // `num_bytes` have arrived by `at`. `opened`: 1 if a message begins with them, -1 if one ends, 0 if
    // neither or both.
    void add(double at, int64_t num_bytes, int opened) {
        const bool is_idle = num_open_ == 0 && at - last_ > kMaxPauseS;
        const bool is_set_back = at < first_ - kMaxLateS;
        num_open_ += opened;
        if (is_idle || is_set_back) {
            pending_ = {peer_, num_bytes_, last_ - first_};
            start(at);
            num_to_skip_ = kSkippedBytes;
            return;
        }
        // Read late: it belongs to a burst that is over.
        if (at < first_) return;
        last_ = std::max(last_, at);
        num_bytes_ += num_bytes;
        if (num_to_skip_ > 0 && (num_to_skip_ -= num_bytes) <= 0) start(last_);
    }

    // Everything that has arrived by now is counted: hands over what is complete.
    void settle(std::vector<Burst>& out) {
        if (pending_.seconds >= kMinBurstS) out.push_back(pending_);
        pending_ = {};
        const double seconds = last_ - first_;
        if (num_to_skip_ > 0 || seconds < kMinBurstS || (seconds < kBurstS && num_bytes_ < kBurstBytes))
            return;
        out.push_back({peer_, num_bytes_, seconds});
        start(last_);
    }

  private:
    // Long enough that the packets of a slow link (64 KiB at a time with offloading, 5 ms at 100 Mbit/s) are
    // many.
    static constexpr double kBurstS = 0.05;
    static constexpr int64_t kBurstBytes = 2 << 20;
    static constexpr double kMinBurstS = 0.005;
    // Between two messages; within one the sender has more to send.
    static constexpr double kMaxPauseS = 0.001;
    // Nothing is read that late: the clock, which is the wall clock, was set back.
    static constexpr double kMaxLateS = 1;
    // After a pause the first bytes find empty queues and full token buckets: they come faster than the link.
    static constexpr int64_t kSkippedBytes = 1 << 17;

    void start(double at) {
        first_ = last_ = at;
        num_bytes_ = 0;
    }

    int peer_;
    int num_open_ = 0;
    double first_ = 0, last_ = 0;
    int64_t num_bytes_ = 0, num_to_skip_ = kSkippedBytes;
    Burst pending_{};
};

}  // namespace cgx

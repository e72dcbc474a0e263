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
// bytes, so a reader that has to wait for a processor does not matter. Where bytes of all peers are counted,
// pauses within messages are left out as well: then none of the senders had more to send, as it was encoding
// or its TCP window was smaller than the path.
class ArrivalMeter {
  public:
    explicit ArrivalMeter(int peer) : peer_(peer) {}

    // `num_bytes` of a message have been read that arrived by `at`.
    void add(double at, int64_t num_bytes, bool begins, bool ends) {
        group_at_ = group_bytes_ == 0 ? at : std::max(group_at_, at);
        group_bytes_ += num_bytes;
        num_open_ += begins - ends;
        has_edge_ |= begins || ends;
    }

    // Everything that has arrived by now has been read: hands over what is complete. What was read in between
    // counts as one: a reader that was late finds one peer's bytes and then the next one's, all of the same
    // time.
    void settle(std::vector<Burst>& out) {
        take_group();
        const bool is_counting = num_to_skip_ <= 0;
        const double seconds = done_.seconds + (is_counting ? last_ - first_ : 0);
        const int64_t num_bytes = done_.num_bytes + (is_counting ? num_bytes_ : 0);
        if (seconds >= kMinBurstS && (seconds >= kBurstS || num_bytes >= kBurstBytes)) {
            out.push_back({peer_, num_bytes, seconds});
            if (is_counting) start(last_);
        } else if (done_.seconds >= kMinBurstS) {
            out.push_back(done_);
        } else {
            return;
        }
        done_ = {peer_, 0, 0};
    }

  private:
    // Long enough that the packets of a slow link (64 KiB at a time with offloading, 5 ms at 100 Mbit/s) are
    // many.
    static constexpr double kBurstS = 0.05;
    static constexpr int64_t kBurstBytes = 2 << 20;
    static constexpr double kMinBurstS = 0.01;
    // Between two messages. Within one it must also be this many times what its bytes usually take.
    static constexpr double kMaxPauseS = 0.001;
    static constexpr double kPauseFactor = 4;
    // Read in one go, and between whose messages there may have been a pause: more was read late.
    static constexpr int64_t kMaxUnclearBytes = 1 << 18;
    // How fast what is usual follows, a running median. What is smaller than this, frames of messages, says
    // little.
    static constexpr double kPaceStep = 1.1;
    static constexpr int64_t kMinPacedBytes = 1 << 12;
    // Nothing is read that late: the clock, which is the wall clock, was set back.
    static constexpr double kMaxLateS = 1;
    // After a pause the first bytes find empty queues and full token buckets, which commonly hold 1 ms: they
    // come faster than the link. As many are skipped as it carries in twice that, within bounds.
    static constexpr double kSkippedS = 0.002;
    static constexpr int64_t kMinSkippedBytes = 1 << 15, kMaxSkippedBytes = 1 << 17;

    // Count what has come by `group_at_` since `last_`.
    void take_group() {
        if (group_bytes_ == 0) return;
        const double gap_s = std::max(group_at_ - last_, 0.0);
        const double pace = gap_s / static_cast<double>(group_bytes_);
        const bool is_slow = peer_ < 0 && pace_ > 0 && pace > kPauseFactor * pace_;
        // Of much that was read late nobody knows whether a sender paused between two messages of it.
        const bool is_late = has_edge_ && group_bytes_ > kMaxUnclearBytes;
        const bool is_pause = gap_s > kMaxPauseS && (!was_open_ || is_slow || is_late);
        if (was_open_ && group_bytes_ >= kMinPacedBytes)
            pace_ = pace_ == 0 ? pace : pace_ * (pace > pace_ ? kPaceStep : 1 / kPaceStep);
        if (is_pause || group_at_ < last_ - kMaxLateS) {
            begin_train(group_at_);
        } else {
            last_ += gap_s;
            num_bytes_ += group_bytes_;
            if (num_to_skip_ > 0 && (num_to_skip_ -= group_bytes_) <= 0) start(last_);
        }
        group_bytes_ = 0;
        was_open_ = num_open_ > 0;
        has_edge_ = false;
    }

    void begin_train(double at) {
        if (num_to_skip_ <= 0) done_ = {peer_, done_.num_bytes + num_bytes_, done_.seconds + last_ - first_};
        start(at);
        num_to_skip_ = kMaxSkippedBytes;
        if (pace_ * kMaxSkippedBytes > kSkippedS)
            num_to_skip_ = std::max(kMinSkippedBytes, static_cast<int64_t>(kSkippedS / pace_));
    }

    void start(double at) {
        first_ = last_ = at;
        num_bytes_ = 0;
    }

    int peer_;
    int num_open_ = 0;
    // Read since the last `settle`, whether a message began or ended with it, and whether one was under way
    // before.
    double group_at_ = 0;
    int64_t group_bytes_ = 0;
    bool has_edge_ = false, was_open_ = false;
    double pace_ = 0;  // seconds a byte, usually
    // Since the last pause, and what is left to skip.
    double first_ = 0, last_ = 0;
    int64_t num_bytes_ = 0, num_to_skip_ = kMaxSkippedBytes;
    Burst done_{peer_, 0, 0};  // of trains before
};

}  // namespace cgx

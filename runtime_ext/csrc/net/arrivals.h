// Measures how fast bytes arrive while messages are under way. That is the rate of the link, even if a rank
// came late or took long to encode.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace cgx {

// `num_bytes` arrived within `seconds` from `peer`; -1 stands for all ranks together.
struct Burst {
    int peer;
    int64_t num_bytes;
    double seconds;
};

// Cuts the bytes that one peer sends, or all peers together, into bursts of about kBurstS. Times are those at
// which the kernel got the bytes, so a reader that waits for a processor changes nothing. Pauses between
// messages are left out. If bytes of all peers are counted, pauses within messages are too: no sender had
// more to send then, because it was encoding or its TCP window was smaller than the path.
class ArrivalMeter {
  public:
    explicit ArrivalMeter(int peer) : peer_(peer) {}

    // Adds `num_bytes` of a message, which arrived by `at`. `begins` and `ends`: whether they include its
    // first and its last byte.
    void add(double at, int64_t num_bytes, bool begins, bool ends) {
        group_at_ = group_bytes_ == 0 ? at : std::max(group_at_, at);
        group_bytes_ += num_bytes;
        num_open_ += begins - ends;
        has_edge_ |= begins || ends;
    }

    // Hands over the bursts that are complete. Call it when everything that has arrived is read. The bytes
    // read between two calls count as one group: a late reader finds the bytes of one peer and then those of
    // the next, all of the same time.
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
    // Long enough for many packets of a slow link (64 KiB at a time with offloading, 5 ms at 100 Mbit/s).
    static constexpr double kBurstS = 0.05;
    static constexpr int64_t kBurstBytes = 2 << 20;
    // Time stamps are late by up to some milliseconds on a busy machine, which must be a small part of a
    // burst.
    static constexpr double kMinBurstS = 0.02;
    // A longer gap between two messages is a pause: on an idle link short messages follow each other that
    // fast.
    static constexpr double kMaxGapS = 0.0001;
    // Within messages a pause is longer than this, and kPauseFactor times as long as its bytes usually take.
    static constexpr double kMaxPauseS = 0.001;
    static constexpr double kPauseFactor = 2;
    // More bytes than this in one group were read late, so there may have been a pause between their
    // messages.
    static constexpr int64_t kMaxUnclearBytes = 1 << 18;
    // The usual pace is a running median that moves by kPaceStep. Groups below kMinPacedBytes, such as frames
    // of messages, say little about it.
    static constexpr double kPaceStep = 1.1;
    static constexpr int64_t kMinPacedBytes = 1 << 12;
    // A group that is so much older than the last one means that the wall clock was set back: no byte is read
    // so late.
    static constexpr double kMaxLateS = 1;
    // After a pause the first bytes find empty queues and full token buckets, which commonly hold 1 ms of
    // traffic. They arrive faster than the link's rate, so skip as many bytes as the link carries in twice
    // that time, within bounds.
    static constexpr double kSkippedS = 0.002;
    static constexpr int64_t kMinSkippedBytes = 1 << 15, kMaxSkippedBytes = 1 << 17;
    // Bytes after a pause that come much faster than usual had queued, or the pause was a late time stamp.
    // Skip them too, up to what a fast link carries in 1 ms: if more come that fast, the link has become
    // faster.
    static constexpr int64_t kMaxQueuedBytes = 1 << 20;

    // Counts the bytes that arrived by `group_at_`, after `last_`.
    void take_group() {
        if (group_bytes_ == 0) return;
        const double gap_s = std::max(group_at_ - last_, 0.0);
        const double pace = gap_s / static_cast<double>(group_bytes_);
        const bool is_slow = peer_ < 0 && pace_ > 0 && pace > kPauseFactor * pace_;
        // If many bytes were read late, a sender may have paused between two of their messages.
        const bool is_late = has_edge_ && group_bytes_ > kMaxUnclearBytes;
        const bool is_pause =
            (!was_open_ && gap_s > kMaxGapS) || (gap_s > kMaxPauseS && (is_slow || is_late));
        if (was_open_ && group_bytes_ >= kMinPacedBytes)
            pace_ = pace_ == 0 ? pace : pace_ * (pace > pace_ ? kPaceStep : 1 / kPaceStep);
        if (is_pause || group_at_ < last_ - kMaxLateS) {
            begin_train(group_at_);
        } else {
            last_ += gap_s;
            num_bytes_ += group_bytes_;
            if (num_to_skip_ > 0) skip(pace < pace_ / kPauseFactor);
        }
        group_bytes_ = 0;
        was_open_ = num_open_ > 0;
        has_edge_ = false;
    }

    void begin_train(double at) {
        if (num_to_skip_ <= 0) done_ = {peer_, done_.num_bytes + num_bytes_, done_.seconds + last_ - first_};
        start(at);
        num_queued_ = 0;
        num_to_skip_ = kMaxSkippedBytes;
        if (pace_ * kMaxSkippedBytes > kSkippedS)
            num_to_skip_ = std::max(kMinSkippedBytes, static_cast<int64_t>(kSkippedS / pace_));
    }

    // Leaves out the group that was just taken. `had_queued`: it came too fast to have come over the link.
    void skip(bool had_queued) {
        num_queued_ += had_queued ? group_bytes_ : 0;
        num_to_skip_ -= group_bytes_;
        if (had_queued && num_queued_ <= kMaxQueuedBytes) num_to_skip_ = std::max<int64_t>(num_to_skip_, 1);
        if (num_to_skip_ <= 0) start(last_);
    }

    void start(double at) {
        first_ = last_ = at;
        num_bytes_ = 0;
    }

    int peer_;
    int num_open_ = 0;
    // Bytes read since the last `settle`, whether a message began or ended in them, and whether one was under
    // way before.
    double group_at_ = 0;
    int64_t group_bytes_ = 0;
    bool has_edge_ = false, was_open_ = false;
    double pace_ = 0;  // usual seconds per byte
    // Times and bytes since the last pause, and bytes that are left to skip.
    double first_ = 0, last_ = 0;
    int64_t num_bytes_ = 0, num_to_skip_ = kMaxSkippedBytes, num_queued_ = 0;
    Burst done_{peer_, 0, 0};  // of earlier trains
};

}  // namespace cgx

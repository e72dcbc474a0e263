// Moves the messages that go through rings of shared memory: a thread does it, and so does every thread that
// waits for a message.
#pragma once

#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "shm_segment.h"
#include "streams.h"

namespace cgx {

class RingLoop {
  public:
    // The place of this rank in the segment, and the streams that have rings.
    RingLoop(Segment& segment, int own_place, std::vector<Stream*> streams)
        : segment_(segment), own_place_(own_place), streams_(std::move(streams)) {}

    // Moves messages until `stop`.
    void run();
    void stop();

    // Moves messages until `has_come` returns true, at most `timeout_s` and at least once. A thread that
    // waits does so itself, because then no other thread has to wake it. What makes `has_come` true without
    // moving a message must ring the rank's waiter_bell after that.
    void move_until(const std::function<bool()>& has_come, double timeout_s);

    // Has the thread go on with what was posted.
    void wake() { segment_.ring_bell(own_place_); }

  private:
    bool move();

    Segment& segment_;
    const int own_place_;
    const std::vector<Stream*> streams_;
    std::atomic<bool> is_stopped_ = false;
};

}  // namespace cgx

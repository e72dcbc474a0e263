// Moves the messages that go through rings of shared memory: a thread does it, and so does every thread that
// waits for a message.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "shm_segment.h"
#include "streams.h"
#include "tickets.h"

namespace cgx {

class RingLoop {
  public:
    // The place of this rank in the segment, and the streams that have rings.
    RingLoop(Segment& segment, int own_place, std::vector<Stream*> streams, Tickets& tickets)
        : segment_(segment), own_place_(own_place), streams_(std::move(streams)), tickets_(tickets) {}

    // Moves messages until `stop`.
    void run();
    void stop();

    // Moves messages until the ticket is over, at most `timeout_s`. A thread that waits does so itself,
    // because then no other thread has to wake it.
    void move_until_over(const Ticket& ticket, double timeout_s);

    // Has the thread go on with what was posted.
    void wake() { segment_.ring_bell(own_place_); }

  private:
    bool move();

    Segment& segment_;
    const int own_place_;
    const std::vector<Stream*> streams_;
    Tickets& tickets_;
    std::atomic<bool> is_stopped_ = false;
};

}  // namespace cgx

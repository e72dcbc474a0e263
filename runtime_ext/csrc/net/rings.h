// The two rings of shared memory between this rank and a peer of its host, used like a socket that does not
// block.
#pragma once

#include <sys/uio.h>

#include <cerrno>

#include "shm_segment.h"

namespace cgx {

class RingPair {
  public:
    // The places of this rank and of the peer in the segment, which must outlive the pair.
    RingPair(Segment& segment, int own_place, int place)
        : segment_(&segment), own_place_(own_place), place_(place) {}

    // errno after a rank has written positions that cannot be.
    static constexpr int kBrokenError = EBADMSG;

    // Sends as sendmsg does, and sets errno.
    ssize_t send(const iovec* pieces, int num_pieces) const {
        if (segment_->is_gone(place_)) {
            errno = EPIPE;
            return -1;
        }
        return counted(segment_->put(own_place_, place_, pieces, num_pieces), -1);
    }

    // Receives as recv does, and sets errno.
    ssize_t receive(void* data, size_t num_bytes) const {
        // Look at this before the ring: bytes that a rank sent before it left are still good.
        const bool is_gone = segment_->is_gone(place_);
        return counted(segment_->take(place_, own_place_, data, num_bytes), is_gone ? 0 : -1);
    }

    // The peer's connection has ended.
    void set_gone() const { segment_->set_gone(place_); }

  private:
    // `moved`, or `if_none` if that is 0.
    static ssize_t counted(size_t moved, ssize_t if_none) {
        errno = moved == Segment::kBroken ? kBrokenError : EAGAIN;
        if (moved == Segment::kBroken) return -1;
        return moved > 0 ? static_cast<ssize_t>(moved) : if_none;
    }

    Segment* segment_;
    int own_place_, place_;
};

}  // namespace cgx

// Where the parts go that one connection brings: to the receive that is due on their channel, or into memory
// of their own until that receive is posted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tickets.h"

namespace cgx {

// Comes before each part: says where it belongs, so that both ends notice when they do not mean the same one.
struct Frame {
    uint32_t channel;
    uint32_t number;  // parts of the channel on this connection before, modulo 2^32
    uint64_t num_bytes;
};

// What a posted receive expects of one connection.
struct Receive {
    uint32_t channel;
    uint8_t* data;  // (num_bytes,)
    size_t num_bytes;
    std::shared_ptr<Ticket> ticket;
};

// A whole part whose receive is not posted yet.
struct EarlyPart {
    uint32_t channel;
    size_t num_bytes;
    std::unique_ptr<uint8_t[]> data;
    double at;  // when its last byte arrived, 0 if not through a socket
};

// The n-th receive on a channel takes the n-th part of that channel. Not thread-safe.
class Inbox {
  public:
    explicit Inbox(int peer) : peer_(peer) {}

    // A receive is due, or a part has begun to come. That part is read to its end even if nobody waits for
    // it: its memory is there, and a pause within it would look like a slow link.
    bool is_open() const { return !due_.empty() || num_moved_ > 0; }

    // Hands over the part that this receive takes if that has come already. Throws std::runtime_error if the
    // part has another size.
    std::optional<EarlyPart> take_early(const Receive& receive);

    // Adds a receive whose part has not come, or not all of it. Throws as `take_early` does.
    void expect(Receive receive);

    // Memory for the next bytes: address and room, which is never 0.
    std::pair<uint8_t*, size_t> room();

    struct Progress {
        bool begins, ends;               // the bytes include the first, or the last, of a part
        std::shared_ptr<Ticket> ticket;  // of the receive that has all of its part now
    };

    // Counts bytes that were put into `room`. `at`: when they arrived, 0 if not through a socket. Throws
    // std::runtime_error if they announce another part than the one that is due.
    Progress advance(size_t num_bytes, double at);

    // Forgets the receives that are not done, and returns their tickets. Keeps parts that are whole.
    std::vector<std::shared_ptr<Ticket>> give_up();

  private:
    void begin_part();
    [[noreturn]] void refuse(size_t num_bytes_due) const;

    const int peer_;
    std::deque<Receive> due_;                           // in the order of posting
    std::deque<EarlyPart> early_;                       // in the order of arrival
    std::unordered_map<uint32_t, uint32_t> num_begun_;  // parts by channel
    // The part that is coming: its frame, where its data go, and the bytes of both that are here. An early
    // one has memory of its own and no ticket.
    Frame frame_{};
    Receive coming_{};
    std::unique_ptr<uint8_t[]> memory_;
    size_t num_moved_ = 0;
};

}  // namespace cgx

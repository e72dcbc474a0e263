// One connection to a peer: the parts of messages that are posted on it, and how they are framed and moved.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "link_meter.h"
#include "rings.h"
#include "sockets.h"
#include "tickets.h"

namespace cgx {

enum class Direction { kSend, kReceive };

// Comes before each part, so that both ends notice when they do not mean the same one.
struct Frame {
    uint64_t number;  // parts on this connection before
    uint64_t num_bytes;
};

// A message or a piece of it, as one connection moves it.
struct MessagePart {
    uint8_t* data;  // (num_bytes,)
    size_t num_bytes;
    std::shared_ptr<Ticket> ticket;
    Frame frame;
    size_t num_moved = 0;  // bytes of frame and data
};

class Stream {
  public:
    // Parts go through `rings` if there are any; the socket is then a sign of life only.
    Stream(FileDescriptor socket, int peer, std::optional<RingPair> rings, Tickets& tickets, LinkMeter& meter)
        : socket_(std::move(socket)), peer_(peer), rings_(rings), tickets_(tickets), meter_(meter) {}

    int fd() const { return socket_.get(); }
    bool has_rings() const { return rings_.has_value(); }

    // Bytes posted so far. For the thread that posts.
    int64_t& posted_bytes(Direction direction) { return queue(direction).posted_bytes; }

    // Adds a part and begins to move it. True if the thread that moves parts has to go on with it.
    bool post(Direction direction, uint8_t* data, size_t num_bytes, const std::shared_ptr<Ticket>& ticket);

    // Moves some of what is posted in both directions. True if more can be moved now.
    bool move();

    // The connection has ended, which a peer that uses rings does not show otherwise.
    void notice_hang_up() const {
        if (rings_) rings_->set_gone();
    }

    // Hangs up. All that is posted fails, now and later.
    void close(const std::string& why);

    // In a forked child: closes its copy of the socket. Takes no lock.
    void close_copy() { socket_.close(); }

  private:
    struct Queue {
        std::deque<MessagePart> parts;
        uint64_t num_posted = 0;
        int64_t posted_bytes = 0;
    };

    Queue& queue(Direction direction) { return direction == Direction::kSend ? sends_ : receives_; }
    bool send_some();
    bool receive_some();
    ssize_t send(iovec* pieces, int num_pieces);
    ssize_t receive(void* data, size_t num_bytes, double& at);
    std::optional<ssize_t> receive_part(MessagePart& part, size_t budget, double& at);
    void count_received(MessagePart& part, ssize_t num_bytes, double at);
    void break_off(const std::string& why);

    FileDescriptor socket_;
    const int peer_;
    const std::optional<RingPair> rings_;
    Tickets& tickets_;
    LinkMeter& meter_;
    std::mutex mutex_;  // guards what is below, except posted_bytes
    Queue sends_, receives_;
    // Bytes to receive that came before anyone asked for them: nobody saw when.
    int64_t num_stale_ = 0;
    std::string broken_;  // why the stream is broken, if it is
};

}  // namespace cgx

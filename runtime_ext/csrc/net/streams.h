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
#include <unordered_map>

#include "inbox.h"
#include "link_meter.h"
#include "rings.h"
#include "sockets.h"
#include "tickets.h"

namespace cgx {

// A message or a piece of it, as one connection sends it.
struct Send {
    uint8_t* data;  // (num_bytes,)
    size_t num_bytes;
    std::shared_ptr<Ticket> ticket;
    Frame frame;
    size_t num_moved = 0;  // bytes of frame and data
};

// Reads only while a receive is due or a send is not done; until then bytes stay in the kernel or in the
// ring. Sends count because two ranks may otherwise wait for each other's full buffers.
class Stream {
  public:
    // Parts go through `rings` if there are any; the socket is then a sign of life only.
    Stream(FileDescriptor socket, int peer, std::optional<RingPair> rings, Tickets& tickets, LinkMeter& meter)
        : socket_(std::move(socket)),
          peer_(peer),
          rings_(rings),
          tickets_(tickets),
          meter_(meter),
          inbox_(peer) {}

    int fd() const { return socket_.get(); }
    bool has_rings() const { return rings_.has_value(); }

    // Add a part and begin to move it. True if the thread that moves parts has to go on with it.
    bool post_send(uint32_t channel, uint8_t* data, size_t num_bytes, const std::shared_ptr<Ticket>& ticket);
    bool post_receive(const Receive& receive);

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
    bool is_reading() const { return inbox_.is_open() || !sends_.empty(); }
    bool begin_reading();
    bool send_some();
    bool receive_some();
    ssize_t send(iovec* pieces, int num_pieces);
    ssize_t receive(void* data, size_t num_bytes, double& at);
    void count_received(size_t num_bytes, double at);
    std::string why_ended(int error) const;
    void break_off(const std::string& why);

    FileDescriptor socket_;
    const int peer_;
    const std::optional<RingPair> rings_;
    Tickets& tickets_;
    LinkMeter& meter_;
    std::mutex mutex_;  // guards what is below
    std::deque<Send> sends_;
    std::unordered_map<uint32_t, uint32_t> num_sends_;  // posted so far, by channel
    Inbox inbox_;
    // Bytes to receive that came before anyone asked for them: nobody saw when.
    int64_t num_stale_ = 0;
    std::string broken_;  // why the stream is broken, if it is
};

}  // namespace cgx

// Connections between all ranks of a run: TCP, or rings of shared memory between ranks of one host. A message
// is sent as soon as it is posted, without asking the receiver first.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "courier.h"
#include "handshake.h"
#include "link_meter.h"
#include "ring_loop.h"
#include "shm_segment.h"
#include "socket_loop.h"
#include "stream_choice.h"
#include "streams.h"
#include "tickets.h"

namespace cgx {

// On each channel, messages between a pair of ranks arrive in the order in which they were posted, so the
// n-th receive from a peer takes its n-th send. Messages on different channels are independent. The memory of
// a posted message must stay as it is until `wait` returns or throws.
//
// Threads may call every method at the same time, with three limits: one thread posts on a channel, one waits
// for a ticket, and `connect` and `close_copies` are called alone.
class Mesh {
  public:
    // Listens on `address`, a numeric IP address, at a port of `ports`, as `listen_at`. Throws
    // std::runtime_error if it cannot.
    //
    // token        (kTokenBytes,): half of it is what a peer shows, the other half what it gets in return
    // num_streams  connections to each peer whose round trip takes `far_s` or more; one goes to the others
    Mesh(int rank, int world_size, int num_streams, const std::string& address, const std::string& token,
         double far_s, std::pair<int, int> ports);
    ~Mesh();
    Mesh(const Mesh&) = delete;
    Mesh& operator=(const Mesh&) = delete;

    int port() const { return port_; }

    // Connects to every other rank, given its (address, port). Throws std::runtime_error that names the ranks
    // that did not come within `timeout_s`. Hangs up on everyone who does not show the token.
    //
    // segment  shared memory of this host, or null
    // sharers  ranks that have mapped `segment`, ascending, this rank among them; messages between them go
    //          through it, and one connection per pair is left as a sign of life
    void connect(const std::vector<std::pair<std::string, int>>& addresses, double timeout_s,
                 std::shared_ptr<Segment> segment, const std::vector<int>& sharers);

    // Starts to send and receive, and returns at once with a ticket for `wait`.
    //
    // is_sealed  a thread beside this one writes the checksums of the messages before it sends them, and
    //            checks those received before the ticket is done; see courier.h
    int64_t post(const std::vector<Message>& sends, const std::vector<Message>& receives, uint32_t channel,
                 bool is_sealed);

    // Starts an element-wise minimum over ranks, in place in `values`, (num_bytes,) of int64 or uint8, and
    // returns a ticket for `wait`. The threads that move messages pass it on from round to round.
    //
    // rounds  the other ranks that each round sends to and receives from; one round or more
    int64_t post_minimum(uint8_t* values, size_t num_bytes, bool is_int64,
                         std::vector<std::vector<int>> rounds, uint32_t channel);

    // Returns when everything posted under `ticket` is done: by peer the seconds from `post` to the arrival
    // of its last message, 0 without one. Throws std::runtime_error that names the ranks that did not answer
    // within `timeout_s`, hung up, or sent a message of another size; the mesh is closed then.
    //
    // waited_s  the part of `timeout_s` that has passed
    std::vector<double> wait(int64_t ticket, double timeout_s, double waited_s);

    // Returns when one of the tickets is done or has failed: the first such, for `wait`. Returns none if
    // `wake` or `close` was called since the last return of none, or after `timeout_s`.
    std::optional<int64_t> wait_any(const std::vector<int64_t>& tickets, double timeout_s);

    // The ticket is done or has failed.
    bool is_over(int64_t ticket) { return tickets_.is_over(ticket); }

    // The ticket has failed, so that `wait` will throw.
    bool has_failed(int64_t ticket) { return tickets_.has_failed(ticket); }

    // Ends the `wait_any` of another thread, or the next one.
    void wake();

    // Bursts since the last call, the newest LinkMeter::kMaxBursts.
    std::vector<Burst> take_bursts() { return meter_.take(); }

    // Hangs up, and returns when that is done. What was posted and is not done fails. From any thread.
    void close();

    // In a forked child: closes its copies of the connections, which would keep them open after the end of
    // the rank. Takes no lock: the threads that hold them are not in the child. Nothing can be posted after
    // it.
    void close_copies();

  private:
    struct Peer {
        std::vector<std::unique_ptr<Stream>> streams;  // none if it is this rank
        StreamChoice choice{0};
    };

    void add_streams(Connections connections, const std::vector<int>& sharers);
    void enqueue(const Message& message, Direction direction, uint32_t channel,
                 const std::shared_ptr<Ticket>& ticket);
    void send_sealed(const std::vector<Message>& sends, uint32_t channel,
                     const std::shared_ptr<Ticket>& ticket);
    void check(const std::shared_ptr<Ticket>& ticket, bool is_stopped);
    void begin_round(const std::shared_ptr<Ticket>& ticket);
    void pass_on(const std::shared_ptr<Ticket>& ticket);
    Stream& next_stream(int peer, int64_t num_bytes, Direction direction, uint32_t channel);
    void wait_for(const Watch& watch, double timeout_s);
    void refuse_copy() const;

    const Identity self_;
    FileDescriptor listener_;
    const int port_;
    std::shared_ptr<Segment> segment_;
    int own_place_ = -1;  // of this rank in the segment
    Tickets tickets_;
    LinkMeter meter_;
    std::vector<Peer> peers_;  // by rank
    SocketLoop socket_loop_;
    std::unique_ptr<RingLoop> ring_loop_;  // if there is a segment
    Courier courier_;
    bool is_copy_ = false;     // in a forked child
    std::mutex choice_mutex_;  // guards the choices of all peers
    std::mutex close_mutex_;   // two threads may not join the same one
    std::thread socket_thread_, ring_thread_;
};

}  // namespace cgx

// Connections between all ranks of a run: TCP, or rings of shared memory between ranks of one host. Messages
// are pushed as soon as they are posted, nobody asks first.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arrivals.h"
#include "shm_segment.h"

namespace cgx {

// Messages between a pair of ranks arrive in the order in which they were posted, so the n-th receive from a
// peer takes its n-th send. The memory of a posted message must stay as it is until `wait` returns or throws.
class Mesh {
  public:
    struct Part {
        int peer;
        void* data;
        int64_t num_bytes;
    };

    static constexpr size_t kTokenBytes = 32;
    static constexpr size_t kMaxBursts = 1024;

    // Listens on `address`, a numeric IP address, at a port that the kernel picks. `token` has kTokenBytes:
    // half of it is what a peer presents, the other half what it gets in return. `num_streams` connections go
    // to each peer whose round trip takes `far_s` or more, one to the others. Throws std::runtime_error if
    // the address is not this machine's.
    Mesh(int rank, int world_size, int num_streams, const std::string& address, const std::string& token,
         double far_s);
    ~Mesh();
    Mesh(const Mesh&) = delete;
    Mesh& operator=(const Mesh&) = delete;

    int port() const { return port_; }

    // Connects to every other rank, given its (address, port). Throws std::runtime_error that names the ranks
    // that did not come within `timeout_s`. Whoever does not present the token is hung up on. `sharers`,
    // ascending, have mapped `segment`, this rank among them; null: none have. Their connection is a sign of
    // life only.
    void connect(const std::vector<std::pair<std::string, int>>& addresses, double timeout_s,
                 std::shared_ptr<Segment> segment, const std::vector<int>& sharers);

    // Starts to send and receive, and returns at once with a ticket for `wait`.
    int64_t post(const std::vector<Part>& sends, const std::vector<Part>& receives);

    // Returns when everything posted under `ticket` is done: by peer the seconds from `post` to the arrival
    // of its last message, 0 without one. Throws std::runtime_error that names the ranks that did not answer
    // within `timeout_s`, hung up, or sent a message of another size; the mesh is closed then.
    std::vector<double> wait(int64_t ticket, double timeout_s);

    // Bursts since the last call, the newest kMaxBursts.
    std::vector<Burst> take_bursts();

    // Hangs up, and returns when that is done. What was posted and is not done fails. From any thread.
    void close();

    // In a forked child: closes its copies of the connections, which would keep them open after the rank's
    // end. Takes no lock: the threads that hold them are not in the child. Nothing can be posted after it.
    void close_copies();

  private:
    struct Ticket;
    struct Message;
    struct Stream;
    enum class Progress { kWaiting, kMore };

    void run();
    void run_rings();
    bool move_rings();
    void move_until_done(const Ticket& ticket, double timeout_s);
    void tell(const Ticket& ticket);
    Stream& next_stream(int peer, int64_t num_bytes, bool is_send);
    void enqueue(const Part& part, bool is_send, const std::shared_ptr<Ticket>& ticket);
    Progress send_some(Stream& stream);
    Progress receive_some(Stream& stream);
    void finish(const Message& message, int peer, double at = 0);
    void meter(const Stream& stream, double at, int64_t got, bool begins, bool ends);
    void settle_meters();
    void break_stream(Stream& stream, const std::string& why);
    void accept_peers(double deadline);
    void dial(int peer, const std::string& address, int port, double deadline);
    void add_stream(int fd, int peer, int index);
    void wake();

    const int rank_, world_size_, num_streams_;
    const std::string token_;
    const double far_s_;
    std::vector<int> num_streams_to_;  // by peer
    int listen_fd_ = -1, epoll_fd_ = -1, wake_fd_ = -1, port_ = 0;
    std::vector<std::unique_ptr<Stream>> streams_;  // peer * num_streams + index; null for this rank
    std::shared_ptr<Segment> segment_;
    std::vector<int> place_;  // of each rank in the segment, or -1

    std::mutex mutex_;  // guards what is below
    std::condition_variable changed_;
    std::vector<std::pair<int64_t, std::shared_ptr<Ticket>>> tickets_;
    std::vector<Stream*> posted_;  // have something new to receive or to go on sending
    int64_t last_ticket_ = 0;
    bool is_closing_ = false;
    std::vector<Burst> bursts_;

    std::vector<ArrivalMeter> meters_;  // of sockets, by peer, then of all; the socket thread's own
    bool is_copy_ = false;              // in a forked child
    std::mutex close_mutex_;            // two threads may not join the same one
    std::thread thread_, ring_thread_;
};

}  // namespace cgx

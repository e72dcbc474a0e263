// Tickets for messages that are posted and not done yet, and the threads that wait for them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "minimum.h"
#include "shm_segment.h"

namespace cgx {

// A message in memory: sent to `peer`, or received from it.
struct Message {
    int peer;
    void* data;
    int64_t num_bytes;
};

// State of one `post`. Guarded by the mutex of its Tickets.
struct Ticket : std::enable_shared_from_this<Ticket> {
    std::vector<int> num_open;      // parts of messages that are not done, by peer
    std::vector<double> arrived_s;  // when the last part arrived, by peer, from `posted_at` on
    double posted_at = 0;
    int64_t num_left = 0;  // parts of all peers that are not done
    std::string error;
    std::thread::id waiter;          // the thread that waits, if there is one
    std::optional<Minimum> minimum;  // whose rounds follow each other under this ticket
    std::vector<Message> unchecked;  // received, with checksums that nobody has looked at

    bool has_more() const { return !unchecked.empty() || (minimum && minimum->has_more()); }
    bool is_over() const { return (num_left == 0 && !has_more()) || !error.empty(); }
};

// What a thread waits for: that one of the tickets is over, or that `wake` is called.
struct Watch {
    std::vector<std::shared_ptr<Ticket>> tickets;
    bool heeds_wake;
};

class Tickets {
  public:
    using GoOn = std::function<void(const std::shared_ptr<Ticket>&)>;

    // `go_on`: has the next round of a minimum begin, or messages checked, later, as it is called with locks
    // held.
    Tickets(int world_size, GoOn go_on) : world_size_(world_size), go_on_(std::move(go_on)) {}

    // Rings `bell` too when a ticket is over that another thread waits for.
    void ring_also(Counter* bell) { bell_ = bell; }

    // Makes a ticket and its number. Throws std::runtime_error once the tickets are closed.
    std::pair<int64_t, std::shared_ptr<Ticket>> open();

    // Adds `num_parts` to or from `peer` to what the ticket waits for.
    void expect(Ticket& ticket, int peer, int num_parts);

    // Parts may be done before all are posted: between these two calls the ticket is not over.
    void begin_posting(Ticket& ticket);
    void end_posting(Ticket& ticket);

    // Counts the next round of the ticket's minimum as begun, as `begin_posting`, and returns its ranks.
    const std::vector<int>& begin_round(Ticket& ticket);

    // Takes the received messages as checked.
    void end_checks(Ticket& ticket);

    // Takes a part as done. `at`: when it arrived, 0 if it did not come through a socket.
    void finish(Ticket& ticket, int peer, double at);

    // Ends the ticket with an error, unless it has one already.
    void fail(Ticket& ticket, const std::string& why);

    // The tickets of these numbers, for this thread to wait for. Throws std::runtime_error if one is not
    // known.
    std::vector<std::shared_ptr<Ticket>> take_up(const std::vector<int64_t>& numbers);

    // Throws std::runtime_error if the ticket is not known.
    bool is_over(int64_t number);

    // The ticket has ended with an error. Throws std::runtime_error if it is not known.
    bool has_failed(int64_t number);

    // True if a thread that waits for this need not wait any longer.
    bool has_come(const Watch& watch);

    // Returns when `watch` has come, or after `timeout_s`.
    void wait(const Watch& watch, double timeout_s);

    // Index of the first ticket that is over. Without one, forgets that `wake` was called.
    std::optional<size_t> first_over(const Watch& watch);

    // Ends the wait of a thread that heeds it, or the next such wait.
    void wake();

    // Forgets the number. Returns why the ticket failed, or an empty text if it is done; without an error of
    // its own that is the peers that did not answer within `timeout_s`.
    std::string settle(int64_t number, const Ticket& ticket, double timeout_s);

    void close();

    // In a forked child: drops the threads that wait, which are not in the child.
    void forget_waiters();

  private:
    const std::shared_ptr<Ticket>& find(int64_t number) const;
    bool is_enough(const Watch& watch) const;
    void end_part(Ticket& ticket);
    void tell(const Ticket& ticket);
    void tell_all();

    const int world_size_;
    const GoOn go_on_;
    Counter* bell_ = nullptr;
    std::mutex mutex_;  // guards what is below
    std::condition_variable changed_;
    std::vector<std::pair<int64_t, std::shared_ptr<Ticket>>> tickets_;  // by number, ascending
    int64_t last_number_ = 0;
    bool is_closed_ = false, is_woken_ = false;
};

}  // namespace cgx

#include "tickets.h"

#include <algorithm>
#include <chrono>
#include <new>

#include "clock.h"
#include "errors.h"

namespace cgx {

std::pair<int64_t, std::shared_ptr<Ticket>> Tickets::open() {
    auto ticket = std::make_shared<Ticket>();
    ticket->num_open.resize(world_size_);
    ticket->arrived_s.resize(world_size_);
    ticket->posted_at = wall_clock_s();
    std::lock_guard lock(mutex_);
    if (is_closed_) cgx::fail("the connections are closed");
    tickets_.emplace_back(++last_number_, ticket);
    return {last_number_, ticket};
}

void Tickets::expect(Ticket& ticket, int peer, int num_parts) {
    std::lock_guard lock(mutex_);
    ticket.num_open[peer] += num_parts;
    ticket.num_left += num_parts;
}

void Tickets::finish(Ticket& ticket, int peer, double at) {
    std::lock_guard lock(mutex_);
    if (at > 0) ticket.arrived_s[peer] = at - ticket.posted_at;
    --ticket.num_open[peer];
    if (--ticket.num_left == 0) tell(ticket);
}

void Tickets::fail(Ticket& ticket, const std::string& why) {
    std::lock_guard lock(mutex_);
    if (ticket.error.empty()) ticket.error = why;
    tell(ticket);
}

std::shared_ptr<Ticket> Tickets::take_up(int64_t number) {
    std::lock_guard lock(mutex_);
    const auto entry =
        std::find_if(tickets_.begin(), tickets_.end(), [&](auto& e) { return e.first == number; });
    if (entry == tickets_.end()) cgx::fail("ticket " + std::to_string(number) + " is not known");
    entry->second->waiter = std::this_thread::get_id();
    return entry->second;
}

bool Tickets::is_over(const Ticket& ticket) {
    std::lock_guard lock(mutex_);
    return ticket.is_over();
}

void Tickets::wait(const Ticket& ticket, double timeout_s) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return ticket.is_over(); });
}

std::string Tickets::settle(int64_t number, const Ticket& ticket, double timeout_s) {
    std::lock_guard lock(mutex_);
    std::erase_if(tickets_, [&](auto& e) { return e.first == number; });
    if (ticket.is_over()) return ticket.error;
    std::string late;
    for (int peer = 0; peer < world_size_; ++peer) {
        if (ticket.num_open[peer] > 0) late += (late.empty() ? "rank " : ", rank ") + std::to_string(peer);
    }
    return late + " did not answer within " + std::to_string(static_cast<int64_t>(timeout_s * 1e3)) + " ms";
}

void Tickets::close() {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
}

void Tickets::forget_waiters() {
    // The destructor would wait for the threads.
    new (&changed_) std::condition_variable;
}

// Wakes the thread that waits for the ticket, if that is another one.
void Tickets::tell(const Ticket& ticket) {
    if (ticket.waiter == std::thread::id{} || ticket.waiter == std::this_thread::get_id()) return;
    changed_.notify_all();
    if (bell_ != nullptr) bell_->add_one();
}

}  // namespace cgx

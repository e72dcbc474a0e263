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

void Tickets::begin_posting(Ticket& ticket) {
    std::lock_guard lock(mutex_);
    ++ticket.num_left;
}

const std::vector<int>& Tickets::begin_round(Ticket& ticket) {
    std::lock_guard lock(mutex_);
    ++ticket.num_left;
    return ticket.minimum->rounds[ticket.minimum->num_begun++];
}

void Tickets::end_posting(Ticket& ticket) {
    std::lock_guard lock(mutex_);
    end_part(ticket);
}

void Tickets::end_checks(Ticket& ticket) {
    std::lock_guard lock(mutex_);
    ticket.unchecked.clear();
    tell(ticket);
}

void Tickets::finish(Ticket& ticket, int peer, double at) {
    std::lock_guard lock(mutex_);
    if (at > 0) {
        // An early part may be finished after one that came later; 0 stands for none.
        double& arrived_s = ticket.arrived_s[peer];
        arrived_s = arrived_s == 0 ? at - ticket.posted_at : std::max(arrived_s, at - ticket.posted_at);
    }
    --ticket.num_open[peer];
    end_part(ticket);
}

void Tickets::fail(Ticket& ticket, const std::string& why) {
    std::lock_guard lock(mutex_);
    if (ticket.error.empty()) ticket.error = why;
    tell(ticket);
}

std::vector<std::shared_ptr<Ticket>> Tickets::take_up(const std::vector<int64_t>& numbers) {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Ticket>> taken;
    for (const int64_t number : numbers) {
        taken.push_back(find(number));
        taken.back()->waiter = std::this_thread::get_id();
    }
    return taken;
}

bool Tickets::is_over(int64_t number) {
    std::lock_guard lock(mutex_);
    return find(number)->is_over();
}

bool Tickets::has_failed(int64_t number) {
    std::lock_guard lock(mutex_);
    return !find(number)->error.empty();
}

bool Tickets::has_come(const Watch& watch) {
    std::lock_guard lock(mutex_);
    return is_enough(watch);
}

void Tickets::wait(const Watch& watch, double timeout_s) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return is_enough(watch); });
}

std::optional<size_t> Tickets::first_over(const Watch& watch) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < watch.tickets.size(); ++i) {
        if (watch.tickets[i]->is_over()) return i;
    }
    is_woken_ = false;
    return std::nullopt;
}

void Tickets::wake() {
    std::lock_guard lock(mutex_);
    is_woken_ = true;
    tell_all();
}

std::string Tickets::settle(int64_t number, const Ticket& ticket, double timeout_s) {
    std::lock_guard lock(mutex_);
    std::erase_if(tickets_, [&](auto& e) { return e.first == number; });
    if (ticket.is_over()) return ticket.error;
    std::string late;
    for (int peer = 0; peer < world_size_; ++peer) {
        if (ticket.num_open[peer] > 0) late += (late.empty() ? "rank " : ", rank ") + std::to_string(peer);
    }
    if (late.empty()) late = "this rank";  // it has not begun the next round of a minimum
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

const std::shared_ptr<Ticket>& Tickets::find(int64_t number) const {
    const auto entry = std::lower_bound(tickets_.begin(), tickets_.end(), number,
                                        [](auto& e, int64_t n) { return e.first < n; });
    if (entry == tickets_.end() || entry->first != number)
        cgx::fail("ticket " + std::to_string(number) + " is not known");
    return entry->second;
}

bool Tickets::is_enough(const Watch& watch) const {
    if (watch.heeds_wake && is_woken_) return true;
    return std::any_of(watch.tickets.begin(), watch.tickets.end(), [](auto& t) { return t->is_over(); });
}

void Tickets::end_part(Ticket& ticket) {
    if (--ticket.num_left > 0) return;
    if (ticket.has_more() && !is_closed_) return go_on_(ticket.shared_from_this());
    if (ticket.has_more() && ticket.error.empty()) ticket.error = "the connections are closed";
    tell(ticket);
}

// Wakes the thread that waits for the ticket, if that is another one.
void Tickets::tell(const Ticket& ticket) {
    if (ticket.waiter != std::thread::id{} && ticket.waiter != std::this_thread::get_id()) tell_all();
}

void Tickets::tell_all() {
    changed_.notify_all();
    if (bell_ != nullptr) bell_->add_one();
}

}  // namespace cgx

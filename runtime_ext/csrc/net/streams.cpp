#include "streams.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace cgx {
namespace {

// One visit to a stream moves at most this much, so that no peer starves the others.
constexpr size_t kVisitBytes = 1 << 18;

}  // namespace

bool Stream::post_send(uint32_t channel, uint8_t* data, size_t num_bytes,
                       const std::shared_ptr<Ticket>& ticket) {
    std::lock_guard lock(mutex_);
    if (!broken_.empty()) {
        tickets_.fail(*ticket, broken_);
        return false;
    }
    const bool was_reading = is_reading(), is_first = sends_.empty();
    sends_.push_back({data, num_bytes, ticket, {channel, num_sends_[channel]++, num_bytes}});
    // The socket's buffer or the ring takes the beginning now, without waiting for the thread that moves
    // parts.
    const bool is_more = is_first && send_some();
    return (!was_reading && begin_reading()) || is_more;
}

bool Stream::post_receive(const Receive& receive) {
    std::unique_lock lock(mutex_);
    const bool was_reading = is_reading();
    std::optional<EarlyPart> early;
    try {
        early = inbox_.take_early(receive);
        if (!early && broken_.empty()) inbox_.expect(receive);
    } catch (const std::runtime_error& error) {
        break_off(error.what());
    }
    if (early) {
        lock.unlock();  // the thread that moves parts need not wait for the copy
        std::copy_n(early->data.get(), early->num_bytes, receive.data);
        tickets_.finish(*receive.ticket, peer_, early->at);
        return false;
    }
    if (!broken_.empty()) {
        tickets_.fail(*receive.ticket, broken_);
        return false;
    }
    return !was_reading && begin_reading();
}

bool Stream::move() {
    std::lock_guard lock(mutex_);
    const bool is_more_to_send = send_some();
    const bool is_more_to_receive = receive_some();
    return is_more_to_send || is_more_to_receive;
}

void Stream::close(const std::string& why) {
    std::lock_guard lock(mutex_);
    shutdown(fd(), SHUT_RDWR);
    break_off(why);
}

// Call it when something was posted and `is_reading` was false before. True if more can be received now.
bool Stream::begin_reading() {
    if (!is_reading()) return false;
    // A ring gives what it has now, without waiting for the thread that moves parts.
    if (rings_) return receive_some();
    num_stale_ = waiting_bytes(fd());
    return true;
}

// True if more can be sent now.
bool Stream::send_some() {
    size_t budget = kVisitBytes;
    while (!sends_.empty()) {
        Send& part = sends_.front();
        iovec pieces[2];
        int num_pieces = 0;
        const size_t in_frame = std::min(part.num_moved, sizeof(Frame));
        const size_t in_data = part.num_moved - in_frame;
        if (in_frame < sizeof(Frame)) {
            pieces[num_pieces++] = {reinterpret_cast<char*>(&part.frame) + in_frame,
                                    sizeof(Frame) - in_frame};
        }
        pieces[num_pieces++] = {part.data + in_data, std::min(part.num_bytes - in_data, kVisitBytes)};
        const ssize_t sent = send(pieces, num_pieces);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno == EAGAIN) return false;
        if (sent < 0) {
            break_off(why_ended(errno));
            return false;
        }
        part.num_moved += static_cast<size_t>(sent);
        if (part.num_moved == sizeof(Frame) + part.num_bytes) {
            tickets_.finish(*part.ticket, peer_, 0);
            sends_.pop_front();
        }
        if (static_cast<size_t>(sent) >= budget) return !sends_.empty();
        budget -= static_cast<size_t>(sent);
    }
    return false;
}

// True if more can be received now.
bool Stream::receive_some() {
    size_t budget = kVisitBytes;
    while (is_reading()) {
        const auto [data, num_bytes] = inbox_.room();
        double at;
        const ssize_t got = receive(data, std::min(num_bytes, budget), at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return false;
        if (got <= 0) {
            break_off(why_ended(got < 0 ? errno : 0));
            return false;
        }
        try {
            count_received(static_cast<size_t>(got), at);
        } catch (const std::runtime_error& error) {
            break_off(error.what());
            return false;
        }
        if (static_cast<size_t>(got) >= budget) return is_reading();
        budget -= static_cast<size_t>(got);
    }
    return false;
}

ssize_t Stream::send(iovec* pieces, int num_pieces) {
    return rings_ ? rings_->send(pieces, num_pieces) : send_pieces(fd(), pieces, num_pieces);
}

// `at`: when the bytes arrived if they came through the socket, otherwise 0.
ssize_t Stream::receive(void* data, size_t num_bytes, double& at) {
    at = 0;
    return rings_ ? rings_->receive(data, num_bytes) : receive_stamped(fd(), data, num_bytes, at);
}

void Stream::count_received(size_t num_bytes, double at) {
    const Inbox::Progress progress = inbox_.advance(num_bytes, at);
    if (!rings_) {
        const int64_t num_stale = std::min(num_stale_, static_cast<int64_t>(num_bytes));
        num_stale_ -= num_stale;
        meter_.add(peer_, at, static_cast<int64_t>(num_bytes) - num_stale, progress.begins, progress.ends);
    }
    if (progress.ticket) tickets_.finish(*progress.ticket, peer_, at);
}

// `error`: value of errno, 0 if the peer has closed its end.
std::string Stream::why_ended(int error) const {
    const std::string rank = "rank " + std::to_string(peer_);
    if (rings_ && error == RingPair::kBrokenError)
        return rank + " broke the ring of shared memory: its positions cannot be";
    return rank + " hung up" + (error != 0 ? std::string(": ") + std::strerror(error) : "");
}

void Stream::break_off(const std::string& why) {
    if (!broken_.empty()) return;
    broken_ = why;
    for (Send& part : sends_) tickets_.fail(*part.ticket, why);
    sends_.clear();
    for (const std::shared_ptr<Ticket>& ticket : inbox_.give_up()) tickets_.fail(*ticket, why);
}

}  // namespace cgx

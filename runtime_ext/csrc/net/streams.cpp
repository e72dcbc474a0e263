#include "streams.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace cgx {
namespace {

// One visit to a stream moves at most this much, so that no peer starves the others.
constexpr size_t kVisitBytes = 1 << 18;

}  // namespace

bool Stream::post(Direction direction, uint8_t* data, size_t num_bytes,
                  const std::shared_ptr<Ticket>& ticket) {
    std::lock_guard lock(mutex_);
    if (!broken_.empty()) {
        tickets_.fail(*ticket, broken_);
        return false;
    }
    const bool is_socket_read = direction == Direction::kReceive && !rings_;
    Queue& queue = this->queue(direction);
    if (is_socket_read && queue.parts.empty()) num_stale_ = waiting_bytes(fd());
    queue.parts.push_back({data, num_bytes, ticket, {queue.num_posted++, num_bytes}});
    if (is_socket_read) return true;
    // The socket's buffer or the ring takes the beginning now, and a ring gives it now, without waiting for
    // the thread that moves parts.
    return queue.parts.size() == 1 && (direction == Direction::kSend ? send_some() : receive_some());
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

// True if more can be sent now.
bool Stream::send_some() {
    size_t budget = kVisitBytes;
    while (!sends_.parts.empty()) {
        MessagePart& part = sends_.parts.front();
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
            break_off("rank " + std::to_string(peer_) + " hung up: " + std::strerror(errno));
            return false;
        }
        part.num_moved += static_cast<size_t>(sent);
        if (part.num_moved == sizeof(Frame) + part.num_bytes) {
            tickets_.finish(*part.ticket, peer_, 0);
            sends_.parts.pop_front();
        }
        if (static_cast<size_t>(sent) >= budget) return !sends_.parts.empty();
        budget -= static_cast<size_t>(sent);
    }
    return false;
}

// True if more can be received now.
bool Stream::receive_some() {
    size_t budget = kVisitBytes;
    while (!receives_.parts.empty()) {
        MessagePart& part = receives_.parts.front();
        double at;
        const std::optional<ssize_t> got = receive_part(part, budget, at);
        if (!got) {
            break_off("rank " + std::to_string(peer_) + " sent another message than the one of " +
                      std::to_string(part.num_bytes) + " bytes that was due");
            return false;
        }
        if (*got < 0 && errno == EINTR) continue;
        if (*got < 0 && errno == EAGAIN) return false;
        if (*got <= 0) {
            const std::string why = *got < 0 ? std::string(": ") + std::strerror(errno) : "";
            break_off("rank " + std::to_string(peer_) + " hung up" + why);
            return false;
        }
        count_received(part, *got, at);
        if (static_cast<size_t>(*got) >= budget) return !receives_.parts.empty();
        budget -= static_cast<size_t>(*got);
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

// Receives into the part. Returns no number if the peer sends another part than this one.
std::optional<ssize_t> Stream::receive_part(MessagePart& part, size_t budget, double& at) {
    if (part.num_moved >= sizeof(Frame)) {
        const size_t in_data = part.num_moved - sizeof(Frame);
        return receive(part.data + in_data, std::min(part.num_bytes - in_data, budget), at);
    }
    // Compare the frame as it comes in, so that a peer that is out of step is found early.
    char frame[sizeof(Frame)];
    const char* const expected = reinterpret_cast<const char*>(&part.frame) + part.num_moved;
    const ssize_t got = receive(frame, sizeof(Frame) - part.num_moved, at);
    if (got > 0 && std::memcmp(expected, frame, static_cast<size_t>(got)) != 0) return std::nullopt;
    return got;
}

void Stream::count_received(MessagePart& part, ssize_t num_bytes, double at) {
    const bool is_first = part.num_moved == 0;
    part.num_moved += static_cast<size_t>(num_bytes);
    const bool is_last = part.num_moved == sizeof(Frame) + part.num_bytes;
    if (!rings_) {
        const int64_t num_stale = std::min<int64_t>(num_stale_, num_bytes);
        num_stale_ -= num_stale;
        meter_.add(peer_, at, num_bytes - num_stale, is_first, is_last);
    }
    if (!is_last) return;
    tickets_.finish(*part.ticket, peer_, at);
    receives_.parts.pop_front();
}

void Stream::break_off(const std::string& why) {
    if (!broken_.empty()) return;
    broken_ = why;
    for (Queue* queue : {&sends_, &receives_}) {
        for (MessagePart& part : queue->parts) tickets_.fail(*part.ticket, why);
        queue->parts.clear();
    }
}

}  // namespace cgx

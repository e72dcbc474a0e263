#include "mesh.h"

#include <algorithm>
#include <new>
#include <optional>

#include "clock.h"
#include "errors.h"

namespace cgx {
namespace {

// A message of up to kSpreadBytes fits into a few initial TCP windows (10 segments each, and 64 KiB at the
// receiver). It is cut into parts of kMinPartBytes, because each further round trip would cost more than its
// bytes. Longer messages open the windows in any case, and every part has its cost.
constexpr int64_t kSpreadBytes = 1 << 18;
constexpr int64_t kMinPartBytes = 1 << 15, kMinLongPartBytes = 1 << 19;
constexpr const char* kClosed = "the connections are closed";
// Longer than any run. The clocks take no infinity.
constexpr double kForeverS = 1e9;

Identity checked(const Identity& self) {
    if (self.token.size() != kTokenBytes) fail("a token has " + std::to_string(kTokenBytes) + " bytes");
    if (self.num_streams < 1)
        fail("num_streams " + std::to_string(self.num_streams) + " is not allowed; give 1 or more");
    return self;
}

}  // namespace

Mesh::Mesh(int rank, int world_size, int num_streams, const std::string& address, const std::string& token,
           double far_s, std::pair<int, int> ports)
    : self_(checked({rank, world_size, num_streams, far_s, token})),
      listener_(listen_at(address, ports.first, ports.second)),
      port_(port_of(listener_.get())),
      tickets_(world_size,
               [this](const std::shared_ptr<Ticket>& ticket) {
                   if (ticket->minimum) return socket_loop_.call([this, ticket] { pass_on(ticket); });
                   courier_.call([this, ticket](bool is_stopped) { check(ticket, is_stopped); });
               }),
      meter_(world_size),
      peers_(world_size),
      socket_loop_(meter_) {}

Mesh::~Mesh() { close(); }

void Mesh::connect(const std::vector<std::pair<std::string, int>>& addresses, double timeout_s,
                   std::shared_ptr<Segment> segment, const std::vector<int>& sharers) {
    const double deadline = now_s() + timeout_s;
    segment_ = std::move(segment);
    std::vector<bool> is_local(self_.world_size);
    if (segment_) {
        own_place_ =
            static_cast<int>(std::find(sharers.begin(), sharers.end(), self_.rank) - sharers.begin());
        tickets_.ring_also(&segment_->rank(own_place_).waiter_bell);
        for (int rank : sharers) is_local[rank] = true;
    }
    add_streams(shake_hands(self_, std::move(listener_), addresses, is_local, deadline), sharers);
    socket_thread_ = std::thread([this] { socket_loop_.run(); });
    if (ring_loop_) ring_thread_ = std::thread([this] { ring_loop_->run(); });
}

void Mesh::add_streams(Connections connections, const std::vector<int>& sharers) {
    std::vector<std::optional<RingPair>> rings(self_.world_size);
    if (segment_) {
        for (size_t place = 0; place < sharers.size(); ++place)
            rings[sharers[place]].emplace(*segment_, own_place_, static_cast<int>(place));
    }
    std::vector<Stream*> with_rings;
    for (int peer = 0; peer < self_.world_size; ++peer) {
        for (FileDescriptor& socket : connections[peer]) {
            auto stream = std::make_unique<Stream>(std::move(socket), peer, rings[peer], tickets_, meter_);
            socket_loop_.watch(*stream);
            if (stream->has_rings()) with_rings.push_back(stream.get());
            peers_[peer].streams.push_back(std::move(stream));
        }
        peers_[peer].choice = StreamChoice(connections[peer].size());
    }
    if (segment_) ring_loop_ = std::make_unique<RingLoop>(*segment_, own_place_, with_rings);
}

int64_t Mesh::post(const std::vector<Message>& sends, const std::vector<Message>& receives, uint32_t channel,
                   bool is_sealed) {
    refuse_copy();
    const auto has_header = [](const Message& message) {
        return message.num_bytes >= static_cast<int64_t>(kHeaderBytes);
    };
    if (is_sealed && !(std::all_of(sends.begin(), sends.end(), has_header) &&
                       std::all_of(receives.begin(), receives.end(), has_header)))
        fail("a message with a checksum has " + std::to_string(kHeaderBytes) + " bytes or more");
    if (is_sealed) courier_.start();
    const auto [number, ticket] = tickets_.open();
    if (is_sealed) {
        ticket->unchecked = receives;
        tickets_.begin_posting(*ticket);
    }
    // Receives first: a peer may answer at once what is sent below.
    for (const Message& message : receives) enqueue(message, Direction::kReceive, channel, ticket);
    if (!is_sealed) {
        for (const Message& message : sends) enqueue(message, Direction::kSend, channel, ticket);
    } else if (sends.empty()) {
        tickets_.end_posting(*ticket);
    } else {
        courier_.call([this, sends, channel, ticket = ticket](bool is_stopped) {
            is_stopped ? tickets_.fail(*ticket, kClosed) : send_sealed(sends, channel, ticket);
        });
    }
    socket_loop_.wake();
    return number;
}

void Mesh::send_sealed(const std::vector<Message>& sends, uint32_t channel,
                       const std::shared_ptr<Ticket>& ticket) {
    try {
        const void* last = nullptr;
        for (const Message& message : sends) {
            // Messages for several ranks may be the same memory, one after the other. It is sealed once: the
            // first may be on its way.
            if (message.data != last) seal(static_cast<uint8_t*>(message.data), message.num_bytes);
            last = message.data;
            enqueue(message, Direction::kSend, channel, ticket);
        }
        tickets_.end_posting(*ticket);
        socket_loop_.wake();
    } catch (const std::exception& error) {  // no memory is left
        tickets_.fail(*ticket, error.what());
    }
}

void Mesh::check(const std::shared_ptr<Ticket>& ticket, bool is_stopped) {
    if (is_stopped) return tickets_.fail(*ticket, kClosed);
    for (const Message& message : ticket->unchecked)
        mark_if_damaged(static_cast<uint8_t*>(message.data), message.num_bytes);
    tickets_.end_checks(*ticket);
}

int64_t Mesh::post_minimum(uint8_t* values, size_t num_bytes, bool is_int64,
                           std::vector<std::vector<int>> rounds, uint32_t channel) {
    refuse_copy();
    const auto [number, ticket] = tickets_.open();
    ticket->minimum = {values, num_bytes, is_int64, std::move(rounds), channel};
    begin_round(ticket);
    socket_loop_.wake();
    return number;
}

void Mesh::pass_on(const std::shared_ptr<Ticket>& ticket) {
    try {
        ticket->minimum->fold();
        begin_round(ticket);
    } catch (const std::exception& error) {  // no memory is left: what waits for the minimum hears of it
        tickets_.fail(*ticket, error.what());
    }
}

void Mesh::begin_round(const std::shared_ptr<Ticket>& ticket) {
    Minimum& minimum = *ticket->minimum;
    const std::vector<int>& ranks = tickets_.begin_round(*ticket);
    minimum.received.assign(ranks.size(), std::vector<uint8_t>(minimum.num_bytes));
    const auto num_bytes = static_cast<int64_t>(minimum.num_bytes);
    for (size_t i = 0; i < ranks.size(); ++i)
        enqueue({ranks[i], minimum.received[i].data(), num_bytes}, Direction::kReceive, minimum.channel,
                ticket);
    for (const int rank : ranks)
        enqueue({rank, minimum.values, num_bytes}, Direction::kSend, minimum.channel, ticket);
    tickets_.end_posting(*ticket);
}

void Mesh::enqueue(const Message& message, Direction direction, uint32_t channel,
                   const std::shared_ptr<Ticket>& ticket) {
    const int peer = message.peer;
    const int64_t part_bytes = message.num_bytes <= kSpreadBytes ? kMinPartBytes : kMinLongPartBytes;
    const int64_t most = std::max<int64_t>(1, (message.num_bytes + part_bytes - 1) / part_bytes);
    const int64_t num_parts = std::min(std::ssize(peers_[peer].streams), most);
    tickets_.expect(*ticket, peer, static_cast<int>(num_parts));
    for (int64_t i = 0; i < num_parts; ++i) {
        const int64_t begin = message.num_bytes * i / num_parts,
                      end = message.num_bytes * (i + 1) / num_parts;
        Stream& stream = next_stream(peer, end - begin, direction, channel);
        uint8_t* const data = static_cast<uint8_t*>(message.data) + begin;
        const auto num_bytes = static_cast<size_t>(end - begin);
        const bool is_more = direction == Direction::kSend
                                 ? stream.post_send(channel, data, num_bytes, ticket)
                                 : stream.post_receive({channel, data, num_bytes, ticket});
        if (!is_more) continue;
        if (stream.has_rings()) {
            ring_loop_->wake();
        } else {
            socket_loop_.visit(stream);
        }
    }
}

Stream& Mesh::next_stream(int peer, int64_t num_bytes, Direction direction, uint32_t channel) {
    std::lock_guard choosing(choice_mutex_);
    return *peers_[peer].streams[peers_[peer].choice.next(channel, direction, num_bytes)];
}

std::vector<double> Mesh::wait(int64_t number, double timeout_s, double waited_s) {
    const Watch watch{tickets_.take_up({number}), false};
    wait_for(watch, std::max(timeout_s - waited_s, 0.0));
    const std::shared_ptr<Ticket>& ticket = watch.tickets.front();
    const std::string why = tickets_.settle(number, *ticket, timeout_s);
    if (why.empty()) {
        if (ticket->minimum) ticket->minimum->fold();
        return ticket->arrived_s;
    }
    // Nobody may touch the posted memory after this returns.
    close();
    fail(why);
}

std::optional<int64_t> Mesh::wait_any(const std::vector<int64_t>& numbers, double timeout_s) {
    refuse_copy();
    const Watch watch{tickets_.take_up(numbers), true};
    wait_for(watch, timeout_s);
    const std::optional<size_t> first = tickets_.first_over(watch);
    return first ? std::optional(numbers[*first]) : std::nullopt;
}

void Mesh::wait_for(const Watch& watch, double timeout_s) {
    timeout_s = std::min(timeout_s, kForeverS);
    if (ring_loop_ && !tickets_.has_come(watch)) {
        ring_loop_->move_until([&] { return tickets_.has_come(watch); }, timeout_s);
    } else {
        tickets_.wait(watch, timeout_s);
    }
}

void Mesh::wake() {
    if (!is_copy_) tickets_.wake();
}

void Mesh::close() {
    if (is_copy_) return;
    std::lock_guard closing(close_mutex_);
    tickets_.close();
    listener_.close();
    socket_loop_.stop();
    if (ring_loop_) ring_loop_->stop();
    if (socket_thread_.joinable()) socket_thread_.join();
    if (ring_thread_.joinable()) ring_thread_.join();
    courier_.stop();
    if (segment_) segment_->rank(own_place_).has_left.store(1);
    for (Peer& peer : peers_) {
        for (auto& stream : peer.streams) stream->close(kClosed);
    }
    // Rounds that were about to begin fail.
    socket_loop_.do_called();
    tickets_.wake();
}

void Mesh::close_copies() {
    is_copy_ = true;
    // The destructors of threads that are not in this process would end it.
    new (&socket_thread_) std::thread;
    new (&ring_thread_) std::thread;
    courier_.forget_thread();
    tickets_.forget_waiters();
    socket_loop_.close_copies();
    for (Peer& peer : peers_) {
        for (auto& stream : peer.streams) stream->close_copy();
    }
    listener_.close();
}

void Mesh::refuse_copy() const {
    if (is_copy_) fail("the connections are those of the process that this one was forked from");
}

}  // namespace cgx

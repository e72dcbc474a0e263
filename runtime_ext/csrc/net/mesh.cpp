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
// Shorter parts do not count: a header is to go where its message will go, so that both are read together.
constexpr int64_t kMinCountedBytes = 1 << 10;

Identity checked(const Identity& self) {
    if (self.token.size() != kTokenBytes) fail("a token has " + std::to_string(kTokenBytes) + " bytes");
    if (self.num_streams < 1)
        fail("num_streams " + std::to_string(self.num_streams) + " is not allowed; give 1 or more");
    return self;
}

}  // namespace

Mesh::Mesh(int rank, int world_size, int num_streams, const std::string& address, const std::string& token,
           double far_s)
    : self_(checked({rank, world_size, num_streams, far_s, token})),
      listener_(listen_at(address)),
      port_(port_of(listener_.get())),
      tickets_(world_size),
      meter_(world_size),
      streams_(world_size),
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
    add_streams(shake_hands(self_, listener_, addresses, is_local, deadline), sharers);
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
            streams_[peer].push_back(std::move(stream));
        }
    }
    if (segment_) ring_loop_ = std::make_unique<RingLoop>(*segment_, own_place_, with_rings, tickets_);
}

int64_t Mesh::post(const std::vector<Message>& sends, const std::vector<Message>& receives) {
    if (is_copy_) fail("the connections are those of the process that this one was forked from");
    const auto [number, ticket] = tickets_.open();
    // Receives first: a peer may answer at once what is sent below.
    for (const Message& message : receives) enqueue(message, Direction::kReceive, ticket);
    for (const Message& message : sends) enqueue(message, Direction::kSend, ticket);
    socket_loop_.wake();
    return number;
}

void Mesh::enqueue(const Message& message, Direction direction, const std::shared_ptr<Ticket>& ticket) {
    const int peer = message.peer;
    const int64_t part_bytes = message.num_bytes <= kSpreadBytes ? kMinPartBytes : kMinLongPartBytes;
    const int64_t most = std::max<int64_t>(1, (message.num_bytes + part_bytes - 1) / part_bytes);
    const int64_t num_parts = std::min(std::ssize(streams_[peer]), most);
    tickets_.expect(*ticket, peer, static_cast<int>(num_parts));
    for (int64_t i = 0; i < num_parts; ++i) {
        const int64_t begin = message.num_bytes * i / num_parts,
                      end = message.num_bytes * (i + 1) / num_parts;
        Stream& stream = next_stream(peer, end - begin, direction);
        uint8_t* const data = static_cast<uint8_t*>(message.data) + begin;
        if (!stream.post(direction, data, static_cast<size_t>(end - begin), ticket)) continue;
        if (stream.has_rings()) {
            ring_loop_->wake();
        } else {
            socket_loop_.visit(stream);
        }
    }
}

// The stream to which the fewest bytes were posted. Both ends count alike, so they choose the same one.
Stream& Mesh::next_stream(int peer, int64_t num_bytes, Direction direction) {
    auto& streams = streams_[peer];
    const auto least = std::min_element(streams.begin(), streams.end(), [&](const auto& a, const auto& b) {
        return a->posted_bytes(direction) < b->posted_bytes(direction);
    });
    if (num_bytes >= kMinCountedBytes) (*least)->posted_bytes(direction) += num_bytes;
    return **least;
}

std::vector<double> Mesh::wait(int64_t number, double timeout_s) {
    const std::shared_ptr<Ticket> ticket = tickets_.take_up(number);
    if (ring_loop_ && !tickets_.is_over(*ticket)) {
        ring_loop_->move_until_over(*ticket, timeout_s);
    } else {
        tickets_.wait(*ticket, timeout_s);
    }
    const std::string why = tickets_.settle(number, *ticket, timeout_s);
    if (why.empty()) return ticket->arrived_s;
    // Nobody may touch the posted memory after this returns.
    close();
    fail(why);
}

void Mesh::close() {
    if (is_copy_) return;
    std::lock_guard closing(close_mutex_);
    tickets_.close();
    socket_loop_.stop();
    if (ring_loop_) ring_loop_->stop();
    if (socket_thread_.joinable()) socket_thread_.join();
    if (ring_thread_.joinable()) ring_thread_.join();
    if (segment_) segment_->rank(own_place_).has_left.store(1);
    for (auto& streams : streams_) {
        for (auto& stream : streams) stream->close("the connections are closed");
    }
}

void Mesh::close_copies() {
    is_copy_ = true;
    // The destructors of threads that are not in this process would end it.
    new (&socket_thread_) std::thread;
    new (&ring_thread_) std::thread;
    tickets_.forget_waiters();
    socket_loop_.close_copies();
    for (auto& streams : streams_) {
        for (auto& stream : streams) stream->close_copy();
    }
    listener_.close();
}

}  // namespace cgx

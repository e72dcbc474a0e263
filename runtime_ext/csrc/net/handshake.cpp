#include "handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <unordered_map>

#include "clock.h"
#include "errors.h"

namespace cgx {
namespace {

constexpr size_t kHalfToken = kTokenBytes / 2;
constexpr char kMagic[4] = {'c', 'g', 'x', '3'};
// A hello comes right after its connection, so this is time enough to send it again twice if it was lost.
constexpr double kHelloS = 2;
// Connections without a hello at a time: a part of the 1,024 files that a process may usually have open.
constexpr size_t kMaxStrangers = 256;

// The first bytes on a connection, from the rank that dialled.
struct Hello {
    char magic[4];
    uint32_t rank;
    uint32_t index, num_streams;  // which connection this is, of how many between the two ranks
    char token[kHalfToken];
};

// Has connected, and not said all of its hello yet.
struct Stranger {
    FileDescriptor socket;
    std::string address;
    double end;  // when it is hung up on
    Hello hello{};
    size_t num_received = 0;

    bool is_done() const { return num_received == sizeof(Hello); }

    // Reads more of the hello. False if the stranger has hung up, or had its time.
    bool read_hello() {
        char* const bytes = reinterpret_cast<char*>(&hello);
        const ssize_t got = recv(socket.get(), bytes + num_received, sizeof(Hello) - num_received, 0);
        if (got > 0) num_received += static_cast<size_t>(got);
        return is_done() || (now_s() < end && (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR))));
    }
};

// Compares half tokens in a time that does not tell how much of them is the same.
bool is_half_token(const char* shown, const char* expected) {
    volatile unsigned char difference = 0;
    for (size_t i = 0; i < kHalfToken; ++i) difference = difference | (shown[i] ^ expected[i]);
    return difference == 0;
}

class Handshake {
  public:
    Handshake(const Identity& self, const std::vector<bool>& is_local, double deadline)
        : self_(self), is_local_(is_local), deadline_(deadline), connections_(self.world_size) {
        for (int peer = 0; peer < self.world_size; ++peer) connections_[peer].resize(peer != self.rank);
    }

    void dial_peer(int peer, const std::string& address, int port) {
        for (size_t index = 0; index < connections_[peer].size(); ++index) {
            int error;
            FileDescriptor socket = dial(address, port, deadline_, error);
            if (error == 0 && index == 0 && !is_local_[peer] && round_trip_s(socket.get()) >= self_.far_s)
                connections_[peer].resize(self_.num_streams);
            if (error != 0 || !say_hello(socket.get(), peer, index)) {
                fail_errno("cannot reach rank " + std::to_string(peer) + " at " + address + " port " +
                               std::to_string(port),
                           error != 0 ? error : errno);
            }
            connections_[peer][index] = std::move(socket);
        }
    }

    // Waits for all higher ranks.
    void accept_peers(int listen_fd) {
        num_missing_.assign(self_.world_size, 0);
        std::fill(num_missing_.begin() + self_.rank + 1, num_missing_.end(), 1);
        while (is_waiting()) {
            await_strangers(listen_fd);
            for (Stranger& stranger : std::exchange(strangers_, {})) hear(std::move(stranger));
            while (is_waiting() && accept_stranger(listen_fd)) {
            }
        }
        strangers_.clear();
        const std::string missing = missing_ranks();
        if (!missing.empty()) fail("ranks that did not connect: " + missing);
    }

    // The answer comes once the peer has reached accept_peers.
    void await_answer(int peer, const std::string& address) const {
        for (const FileDescriptor& socket : connections_[peer]) {
            char answer[kHalfToken];
            if (!read_all(socket.get(), answer, sizeof answer, deadline_) ||
                !is_half_token(answer, self_.token.data() + kHalfToken)) {
                fail("rank " + std::to_string(peer) + " at " + address + " did not answer");
            }
        }
    }

    Connections take_connections() { return std::move(connections_); }

  private:
    bool say_hello(int fd, int peer, size_t index) const {
        Hello hello{{},
                    static_cast<uint32_t>(self_.rank),
                    static_cast<uint32_t>(index),
                    static_cast<uint32_t>(connections_[peer].size()),
                    {}};
        std::memcpy(hello.magic, kMagic, sizeof kMagic);
        std::memcpy(hello.token, self_.token.data(), kHalfToken);
        return write_all(fd, &hello, sizeof hello, deadline_);
    }

    bool is_waiting() const { return !missing_ranks().empty() && now_s() < deadline_; }

    void await_strangers(int listen_fd) const {
        std::vector<pollfd> entries{{listen_fd, POLLIN, 0}};
        for (const Stranger& stranger : strangers_) entries.push_back({stranger.socket.get(), POLLIN, 0});
        const double end = strangers_.empty() ? deadline_ : std::min(deadline_, strangers_.front().end);
        // A millisecond more, because poll takes whole ones.
        if (poll(entries.data(), entries.size(), left_ms(end) + 1) < 0 && errno != EINTR) fail_errno("poll");
    }

    // Accepts one connection that waits. False if there is none.
    bool accept_stranger(int listen_fd) {
        std::string address;
        FileDescriptor socket = accept_one(listen_fd, address);
        if (socket.is_open()) {
            hear({std::move(socket), address, now_s() + kHelloS});
            return true;
        }
        const int error = errno;
        if (error == ECONNABORTED || error == EINTR) return true;
        const bool is_short = error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
        if (is_short && strangers_.empty()) fail_socket("cannot accept another rank's connection", error);
        // The strangers may have taken what is missing.
        if (is_short) strangers_.clear();
        return is_short;
    }

    // Reads what has come of the hello, and admits, keeps or hangs up on the stranger.
    void hear(Stranger stranger) {
        if (!stranger.read_hello()) return;
        if (stranger.is_done()) {
            admit(std::move(stranger));
            return;
        }
        if (strangers_.size() == kMaxStrangers) make_room();
        strangers_.push_back(std::move(stranger));
    }

    // Hangs up on the oldest stranger of the address that has most, so that others are not affected.
    void make_room() {
        std::unordered_map<std::string, int> counts;
        for (const Stranger& stranger : strangers_) ++counts[stranger.address];
        const auto most =
            std::max_element(counts.begin(), counts.end(),
                             [](const auto& one, const auto& other) { return one.second < other.second; });
        strangers_.erase(std::find_if(strangers_.begin(), strangers_.end(), [&](const Stranger& stranger) {
            return stranger.address == most->first;
        }));
    }

    bool is_peer(const Hello& hello) const {
        if (std::memcmp(hello.magic, kMagic, sizeof kMagic) != 0 ||
            !is_half_token(hello.token, self_.token.data())) {
            return false;
        }
        const auto rank = static_cast<int>(hello.rank);
        if (rank <= self_.rank || rank >= self_.world_size) return false;
        if (hello.num_streams > static_cast<uint32_t>(self_.num_streams) || hello.index >= hello.num_streams)
            return false;
        const std::vector<FileDescriptor>& sockets = connections_[rank];
        return hello.index >= sockets.size() || !sockets[hello.index].is_open();
    }

    // Answers a peer and keeps its connection. Hangs up on others.
    void admit(Stranger stranger) {
        const Hello& hello = stranger.hello;
        if (!is_peer(hello) ||
            !write_all(stranger.socket.get(), self_.token.data() + kHalfToken, kHalfToken, deadline_)) {
            return;
        }
        set_stream_options(stranger.socket.get());
        std::vector<FileDescriptor>& sockets = connections_[hello.rank];
        int& num_missing = num_missing_[hello.rank];
        // The rank that dials says how many connections it makes.
        if (sockets.size() < hello.num_streams) {
            num_missing += static_cast<int>(hello.num_streams - sockets.size());
            sockets.resize(hello.num_streams);
        }
        sockets[hello.index] = std::move(stranger.socket);
        --num_missing;
    }

    // The higher ranks that have not made all their connections, with commas between them.
    std::string missing_ranks() const {
        std::string missing;
        for (int peer = 0; peer < self_.world_size; ++peer) {
            if (num_missing_[peer] > 0) missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
        }
        return missing;
    }

    const Identity& self_;
    const std::vector<bool>& is_local_;
    const double deadline_;
    Connections connections_;
    std::vector<int> num_missing_;     // connections, by peer
    std::vector<Stranger> strangers_;  // in the order of arrival
};

}  // namespace

Connections shake_hands(const Identity& self, FileDescriptor listener,
                        const std::vector<std::pair<std::string, int>>& addresses,
                        const std::vector<bool>& is_local, double deadline) {
    Handshake handshake(self, is_local, deadline);
    // The kernel completes connections before anyone accepts them, so everyone can dial first.
    for (int peer = 0; peer < self.rank; ++peer)
        handshake.dial_peer(peer, addresses[peer].first, addresses[peer].second);
    handshake.accept_peers(listener.get());
    listener.close();
    for (int peer = 0; peer < self.rank; ++peer) handshake.await_answer(peer, addresses[peer].first);
    return handshake.take_connections();
}

}  // namespace cgx

#include "mesh.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <numeric>
#include <stdexcept>

namespace cgx {
namespace {

// One visit to a stream moves at most this much, so that no peer starves the others.
constexpr size_t kVisitBytes = 1 << 18;
// A message that a few initial windows carry (10 segments each, and the receiver's 64 KiB) is spread over
// them, as each further round trip would cost more than its bytes. Longer ones open windows anyway, and parts
// cost.
constexpr int64_t kSpreadBytes = 1 << 18;
constexpr int64_t kMinPartBytes = 1 << 15, kMinLongPartBytes = 1 << 19;
// A header goes where its message will, to be read with it.
constexpr int64_t kMinCountedBytes = 1 << 10;
// The bell wakes the thread that moves messages through rings; a time-out would only hide a bell that is not
// rung.
constexpr double kForeverS = 1e6;
constexpr size_t kHalfToken = Mesh::kTokenBytes / 2;

struct Hello {
    char magic[4];
    uint32_t rank;
    uint32_t index, num_streams;
    char token[kHalfToken];
};
constexpr char kMagic[4] = {'c', 'g', 'x', '2'};

// Before every part: enough to notice that the two ends do not speak of the same message.
struct Frame {
    uint64_t number;
    uint64_t num_bytes;
};

double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// The clock of the kernel's time stamps.
double wall_clock() {
    using namespace std::chrono;
    return duration<double>(system_clock::now().time_since_epoch()).count();
}

// As recv, and `at` is when the kernel got the last of these bytes.
ssize_t receive_stamped(int fd, void* data, size_t bytes, double& at) {
    iovec piece{data, bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(timespec))];
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(fd, &header, 0);
    at = 0;
    if (got <= 0) return got;
    for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_TIMESTAMPNS) continue;
        timespec stamp;
        std::memcpy(&stamp, CMSG_DATA(c), sizeof stamp);
        at = static_cast<double>(stamp.tv_sec) + 1e-9 * static_cast<double>(stamp.tv_nsec);
    }
    // Stamps start a moment after they are asked for.
    if (at == 0) at = wall_clock();
    return got;
}

int left_ms(double deadline) { return std::max(0, static_cast<int>((deadline - now()) * 1e3)); }

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

[[noreturn]] void fail_errno(const std::string& what) { fail(what + ": " + std::strerror(errno)); }

int64_t waiting_bytes(int fd) {
    int waiting = 0;
    if (ioctl(fd, FIONREAD, &waiting) != 0) fail_errno("cannot see how much has arrived");
    return waiting;
}

// Between two hosts, once they are connected.
double round_trip_s(int fd) {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) fail_errno("cannot read a round trip");
    return 1e-6 * info.tcpi_rtt;
}

struct AddressInfo {
    addrinfo* info = nullptr;

    AddressInfo(const std::string& address, int port) {
        addrinfo hints{};
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = AI_NUMERICHOST;
        const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &info);
        if (error != 0) fail("'" + address + "' is not a numeric IP address: " + gai_strerror(error));
    }
    ~AddressInfo() { freeaddrinfo(info); }
    AddressInfo(const AddressInfo&) = delete;
    AddressInfo& operator=(const AddressInfo&) = delete;
};

bool await(int fd, short events, double deadline) {
    pollfd entry{fd, events, 0};
    int ready;
    do ready = poll(&entry, 1, left_ms(deadline));
    while (ready < 0 && errno == EINTR && now() < deadline);
    return ready > 0;
}

// All of `bytes` on a non-blocking socket; false if the peer hangs up or the deadline passes.
template <typename Move>
bool move_all(int fd, short events, void* data, size_t bytes, double deadline, Move move) {
    auto* at = static_cast<char*>(data);
    while (bytes > 0) {
        const ssize_t moved = move(fd, at, bytes);
        if (moved == 0) return false;
        if (moved < 0) {
            if (errno != EAGAIN && errno != EINTR) return false;
            if (!await(fd, events, deadline)) return false;
            continue;
        }
        at += moved;
        bytes -= static_cast<size_t>(moved);
    }
    return true;
}

bool read_all(int fd, void* data, size_t bytes, double deadline) {
    return move_all(fd, POLLIN, data, bytes, deadline,
                    [](int f, char* at, size_t n) { return recv(f, at, n, 0); });
}

bool write_all(int fd, void* data, size_t bytes, double deadline) {
    return move_all(fd, POLLOUT, data, bytes, deadline,
                    [](int f, char* at, size_t n) { return ::send(f, at, n, MSG_NOSIGNAL); });
}

}  // namespace

// What one `post` waits for.
struct Mesh::Ticket {
    std::vector<int> num_open;      // parts not done, by peer
    std::vector<double> arrived_s;  // of the last part, by peer, after `posted_at`
    double posted_at = 0;
    int64_t num_left = 0;
    std::string error;
    std::thread::id waiter;  // the thread in `wait`, if there is one

    bool is_over() const { return num_left == 0 || !error.empty(); }
};

struct Mesh::Message {
    uint8_t* data;
    size_t num_bytes;
    std::shared_ptr<Ticket> ticket;
    Frame frame;
    size_t moved = 0;  // bytes of frame and data
};

struct Mesh::Stream {
    int fd;
    int peer;
    Segment* segment = nullptr;  // if messages go through its rings
    int own_place = -1, place = -1;
    int64_t to_send = 0, to_receive = 0;  // bytes posted so far, for the thread that posts
    std::mutex mutex;                     // guards what is below
    std::deque<Message> sends, receives;
    uint64_t num_sends = 0, num_receives = 0;  // posted so far
    int64_t stale = 0;   // bytes to receive that came before anyone asked: when, nobody saw
    std::string broken;  // why, if it is

    ~Stream() {
        if (fd >= 0) ::close(fd);
    }

    // As sendmsg and recv do, on a socket that does not block.
    ssize_t send(iovec* pieces, int num_pieces) {
        if (segment == nullptr) {
            msghdr header{};
            header.msg_iov = pieces;
            header.msg_iovlen = static_cast<size_t>(num_pieces);
            return sendmsg(fd, &header, MSG_NOSIGNAL);
        }
        if (segment->is_gone(place)) {
            errno = EPIPE;
            return -1;
        }
        const size_t moved = segment->put(own_place, place, pieces, num_pieces);
        errno = EAGAIN;
        return moved > 0 ? static_cast<ssize_t>(moved) : -1;
    }

    // `at`: when it came, if through a socket.
    ssize_t receive(void* data, size_t num_bytes, double& at) {
        at = 0;
        if (segment == nullptr) return receive_stamped(fd, data, num_bytes, at);
        // Looked at before the ring: what a rank sent before it left is still good.
        const bool is_gone = segment->is_gone(place);
        const size_t moved = segment->take(place, own_place, data, num_bytes);
        errno = EAGAIN;
        return moved > 0 || is_gone ? static_cast<ssize_t>(moved) : -1;
    }
};

Mesh::Mesh(int rank, int world_size, int num_streams, const std::string& address, const std::string& token,
           double far_s)
    : rank_(rank),
      world_size_(world_size),
      num_streams_(num_streams),
      token_(token),
      far_s_(far_s),
      num_streams_to_(world_size, 1),
      place_(world_size, -1) {
    if (token.size() != kTokenBytes) fail("a token has " + std::to_string(kTokenBytes) + " bytes");
    if (num_streams < 1)
        fail("num_streams " + std::to_string(num_streams) + " is not allowed; give 1 or more");
    streams_.resize(static_cast<size_t>(world_size) * num_streams);
    for (int peer = 0; peer < world_size; ++peer) meters_.emplace_back(peer);
    meters_.emplace_back(-1);
    const AddressInfo target(address, 0);
    listen_fd_ = socket(target.info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listen_fd_ < 0 || bind(listen_fd_, target.info->ai_addr, target.info->ai_addrlen) != 0 ||
        listen(listen_fd_, SOMAXCONN) != 0) {
        const std::string why = std::strerror(errno);
        if (listen_fd_ >= 0) ::close(listen_fd_);
        fail("cannot listen on " + address + ": " + why);
    }
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    getsockname(listen_fd_, reinterpret_cast<sockaddr*>(&bound), &size);
    port_ = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                              : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
    epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    epoll_event event{};
    event.events = EPOLLIN;
    if (epoll_fd_ < 0 || wake_fd_ < 0 || epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_, &event) != 0) {
        fail_errno("cannot make an epoll instance");
    }
}

Mesh::~Mesh() {
    close();
    streams_.clear();
    for (int fd : {listen_fd_, epoll_fd_, wake_fd_}) {
        if (fd >= 0) ::close(fd);
    }
}

void Mesh::connect(const std::vector<std::pair<std::string, int>>& addresses, double timeout_s,
                   std::shared_ptr<Segment> segment, const std::vector<int>& sharers) {
    const double deadline = now() + timeout_s;
    segment_ = std::move(segment);
    if (segment_) {
        for (size_t place = 0; place < sharers.size(); ++place)
            place_[sharers[place]] = static_cast<int>(place);
    }
    // The kernel completes connections before anyone accepts them, so everyone can dial first.
    for (int peer = 0; peer < rank_; ++peer)
        dial(peer, addresses[peer].first, addresses[peer].second, deadline);
    accept_peers(deadline);
    ::close(listen_fd_);
    listen_fd_ = -1;
    // The answer comes once the peer has reached accept_peers.
    for (int peer = 0; peer < rank_; ++peer) {
        for (int index = 0; index < num_streams_to_[peer]; ++index) {
            char answer[kHalfToken];
            const int fd = streams_[peer * num_streams_ + index]->fd;
            if (!read_all(fd, answer, sizeof answer, deadline) ||
                std::memcmp(answer, token_.data() + kHalfToken, kHalfToken) != 0) {
                fail("rank " + std::to_string(peer) + " at " + addresses[peer].first + " did not answer");
            }
        }
    }
    for (auto& stream : streams_) {
        if (!stream) continue;
        epoll_event event{};
        event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
        event.data.ptr = stream.get();
        if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, stream->fd, &event) != 0)
            fail_errno("cannot watch a connection");
    }
    thread_ = std::thread([this] { run(); });
    if (segment_) ring_thread_ = std::thread([this] { run_rings(); });
}

void Mesh::dial(int peer, const std::string& address, int port, double deadline) {
    const AddressInfo target(address, port);
    for (int index = 0; index < num_streams_to_[peer]; ++index) {
        const int fd = socket(target.info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0) fail_errno("cannot make a socket");
        add_stream(fd, peer, index);
        int error = 0;
        socklen_t size = sizeof error;
        if (::connect(fd, target.info->ai_addr, target.info->ai_addrlen) != 0) error = errno;
        if (error == EINPROGRESS) {
            error = ETIMEDOUT;
            if (await(fd, POLLOUT, deadline)) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        }
        if (error == 0 && index == 0 && place_[peer] < 0 && round_trip_s(fd) >= far_s_)
            num_streams_to_[peer] = num_streams_;
        Hello hello{{},
                    static_cast<uint32_t>(rank_),
                    static_cast<uint32_t>(index),
                    static_cast<uint32_t>(num_streams_to_[peer]),
                    {}};
        std::memcpy(hello.magic, kMagic, sizeof kMagic);
        std::memcpy(hello.token, token_.data(), kHalfToken);
        if (error != 0 || !write_all(fd, &hello, sizeof hello, deadline)) {
            fail("cannot reach rank " + std::to_string(peer) + " at " + address + " port " +
                 std::to_string(port) + ": " + std::strerror(error != 0 ? error : errno));
        }
    }
}

void Mesh::accept_peers(double deadline) {
    struct Stranger {
        int fd;
        Hello hello;
        size_t received = 0;
    };
    std::vector<Stranger> strangers;            // connected, and have not said everything yet
    std::vector<int> num_left(world_size_, 0);  // by peer; whoever dials says how many it makes
    std::fill(num_left.begin() + rank_ + 1, num_left.end(), 1);
    const auto is_missing = [&](int peer) { return num_left[peer] > 0; };
    std::vector<int> peers(world_size_);
    std::iota(peers.begin(), peers.end(), 0);
    while (std::any_of(peers.begin(), peers.end(), is_missing) && now() < deadline) {
        std::vector<pollfd> entries{{listen_fd_, POLLIN, 0}};
        for (const Stranger& stranger : strangers) entries.push_back({stranger.fd, POLLIN, 0});
        if (poll(entries.data(), entries.size(), left_ms(deadline)) < 0 && errno != EINTR) fail_errno("poll");
        std::vector<Stranger> still;
        for (Stranger& stranger : strangers) {
            const ssize_t got =
                recv(stranger.fd, reinterpret_cast<char*>(&stranger.hello) + stranger.received,
                     sizeof(Hello) - stranger.received, 0);
            if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
                still.push_back(stranger);
                continue;
            }
            if (got > 0) stranger.received += static_cast<size_t>(got);
            if (got > 0 && stranger.received < sizeof(Hello)) {
                still.push_back(stranger);
                continue;
            }
            const Hello& hello = stranger.hello;
            const bool is_peer =
                stranger.received == sizeof(Hello) && std::memcmp(hello.magic, kMagic, 4) == 0 &&
                std::memcmp(hello.token, token_.data(), kHalfToken) == 0 &&
                static_cast<int>(hello.rank) > rank_ && static_cast<int>(hello.rank) < world_size_ &&
                hello.num_streams <= static_cast<uint32_t>(num_streams_) && hello.index < hello.num_streams &&
                !streams_[hello.rank * num_streams_ + hello.index];
            char answer[kHalfToken];
            std::memcpy(answer, token_.data() + kHalfToken, kHalfToken);
            if (!is_peer || !write_all(stranger.fd, answer, sizeof answer, deadline)) {
                ::close(stranger.fd);
                continue;
            }
            add_stream(stranger.fd, static_cast<int>(hello.rank), static_cast<int>(hello.index));
            int& left = num_left[hello.rank];
            if (num_streams_to_[hello.rank] < static_cast<int>(hello.num_streams)) {
                num_streams_to_[hello.rank] = static_cast<int>(hello.num_streams);
                left += num_streams_to_[hello.rank] - 1;
            }
            --left;
        }
        strangers = std::move(still);
        for (int fd; (fd = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;) {
            strangers.push_back({fd, {}});
        }
    }
    for (const Stranger& stranger : strangers) ::close(stranger.fd);
    std::string missing;
    for (int peer : peers) {
        if (is_missing(peer)) missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
    }
    if (missing.empty()) return;
    fail("ranks that did not connect: " + missing);
}

void Mesh::add_stream(int fd, int peer, int index) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
    auto stream = std::make_unique<Stream>();
    stream->fd = fd;
    stream->peer = peer;
    if (place_[peer] >= 0) {
        stream->segment = segment_.get();
        stream->own_place = place_[rank_];
        stream->place = place_[peer];
    }
    streams_[peer * num_streams_ + index] = std::move(stream);
}

int64_t Mesh::post(const std::vector<Part>& sends, const std::vector<Part>& receives) {
    if (is_copy_) fail("the connections are those of the process that this one was forked from");
    auto ticket = std::make_shared<Ticket>();
    ticket->num_open.resize(world_size_);
    ticket->arrived_s.resize(world_size_);
    ticket->posted_at = wall_clock();
    int64_t number;
    {
        std::lock_guard lock(mutex_);
        if (is_closing_) fail("the connections are closed");
        number = ++last_ticket_;
        tickets_.emplace_back(number, ticket);
    }
    // Receives first: what is sent below may be answered at once.
    for (const Part& part : receives) enqueue(part, false, ticket);
    for (const Part& part : sends) enqueue(part, true, ticket);
    wake();
    return number;
}

// The one that has been given the fewest bytes. Both ends count alike, so they take the same one.
Mesh::Stream& Mesh::next_stream(int peer, int64_t num_bytes, bool is_send) {
    const auto posted = [is_send](const auto& s) -> int64_t& { return is_send ? s->to_send : s->to_receive; };
    const auto first = streams_.begin() + peer * num_streams_;
    const auto least = std::min_element(first, first + num_streams_to_[peer],
                                        [&](auto& a, auto& b) { return posted(a) < posted(b); });
    if (num_bytes >= kMinCountedBytes) posted(*least) += num_bytes;
    return **least;
}

void Mesh::enqueue(const Part& part, bool is_send, const std::shared_ptr<Ticket>& ticket) {
    const int64_t part_bytes = part.num_bytes <= kSpreadBytes ? kMinPartBytes : kMinLongPartBytes;
    const int64_t most = std::max<int64_t>(1, (part.num_bytes + part_bytes - 1) / part_bytes);
    const int64_t num_parts = std::min<int64_t>(num_streams_to_[part.peer], most);
    {
        std::lock_guard lock(mutex_);
        ticket->num_open[part.peer] += static_cast<int>(num_parts);
        ticket->num_left += num_parts;
    }
    for (int64_t i = 0; i < num_parts; ++i) {
        const int64_t begin = part.num_bytes * i / num_parts, end = part.num_bytes * (i + 1) / num_parts;
        Stream& stream = next_stream(part.peer, end - begin, is_send);
        Message message{
            static_cast<uint8_t*>(part.data) + begin, static_cast<size_t>(end - begin), ticket, {}};
        std::unique_lock lock(stream.mutex);
        if (!stream.broken.empty()) {
            const std::string why = stream.broken;
            lock.unlock();
            std::lock_guard own(mutex_);
            ticket->error = why;
            continue;
        }
        message.frame = {is_send ? stream.num_sends++ : stream.num_receives++,
                         static_cast<uint64_t>(end - begin)};
        auto& queue = is_send ? stream.sends : stream.receives;
        if (!is_send && stream.segment == nullptr && queue.empty()) stream.stale = waiting_bytes(stream.fd);
        queue.push_back(std::move(message));
        // The socket's buffer or the ring takes the beginning now, and the ring gives it, without waiting for
        // the other thread.
        bool goes_on = true;
        if (is_send) {
            goes_on = queue.size() == 1 && send_some(stream) == Progress::kMore;
        } else if (stream.segment != nullptr) {
            goes_on = queue.size() == 1 && receive_some(stream) == Progress::kMore;
        }
        lock.unlock();
        if (goes_on && stream.segment != nullptr) {
            segment_->ring_bell(stream.own_place);
        } else if (goes_on) {
            std::lock_guard own(mutex_);
            posted_.push_back(&stream);
        }
    }
}

std::vector<double> Mesh::wait(int64_t number, double timeout_s) {
    std::unique_lock lock(mutex_);
    const auto entry =
        std::find_if(tickets_.begin(), tickets_.end(), [&](auto& e) { return e.first == number; });
    if (entry == tickets_.end()) fail("ticket " + std::to_string(number) + " is not known");
    const std::shared_ptr<Ticket> ticket = entry->second;
    ticket->waiter = std::this_thread::get_id();
    bool is_over = ticket->is_over();
    if (!is_over && segment_) {
        lock.unlock();
        move_until_done(*ticket, timeout_s);
        lock.lock();
        is_over = ticket->is_over();
    } else if (!is_over) {
        is_over = changed_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                    [&] { return ticket->is_over(); });
    }
    std::erase_if(tickets_, [&](auto& e) { return e.first == number; });
    if (ticket->num_left == 0 && ticket->error.empty()) return ticket->arrived_s;
    std::string why = ticket->error;
    if (!is_over) {
        for (int peer = 0; peer < world_size_; ++peer) {
            if (ticket->num_open[peer] > 0) why += (why.empty() ? "rank " : ", rank ") + std::to_string(peer);
        }
        why += " did not answer within " + std::to_string(static_cast<int64_t>(timeout_s * 1e3)) + " ms";
    }
    lock.unlock();
    // Nobody may touch the posted memory after this returns.
    close();
    fail(why);
}

std::vector<Burst> Mesh::take_bursts() {
    std::lock_guard lock(mutex_);
    return std::exchange(bursts_, {});
}

void Mesh::close() {
    if (is_copy_) return;
    std::lock_guard closing(close_mutex_);
    {
        std::lock_guard lock(mutex_);
        is_closing_ = true;
    }
    wake();
    if (segment_) segment_->rank(place_[rank_]).bell.add_one();
    if (thread_.joinable()) thread_.join();
    if (ring_thread_.joinable()) ring_thread_.join();
    if (segment_) segment_->rank(place_[rank_]).has_left.store(1);
    for (auto& stream : streams_) {
        if (!stream) continue;
        std::lock_guard lock(stream->mutex);
        shutdown(stream->fd, SHUT_RDWR);
        break_stream(*stream, "the connections are closed");
    }
}

void Mesh::close_copies() {
    is_copy_ = true;
    // Destructors would end the process or wait for threads that are not here.
    new (&changed_) std::condition_variable;
    new (&thread_) std::thread;
    new (&ring_thread_) std::thread;
    for (auto& stream : streams_) {
        if (stream) ::close(std::exchange(stream->fd, -1));
    }
    for (int* fd : {&listen_fd_, &epoll_fd_, &wake_fd_}) {
        if (*fd >= 0) ::close(std::exchange(*fd, -1));
    }
}

void Mesh::wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof one);
}

void Mesh::run() {
    std::vector<Stream*> ready;
    std::vector<epoll_event> events(2 * streams_.size() + 1);
    while (true) {
        const int count =
            epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), ready.empty() ? -1 : 0);
        for (int i = 0; i < count; ++i) {
            if (auto* stream = static_cast<Stream*>(events[i].data.ptr); stream != nullptr) {
                const bool hung_up = (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
                if (hung_up && stream->segment != nullptr) segment_->set_gone(stream->place);
                ready.push_back(stream);
                continue;
            }
            uint64_t number;
            [[maybe_unused]] const ssize_t drained = read(wake_fd_, &number, sizeof number);
        }
        {
            std::lock_guard lock(mutex_);
            if (is_closing_) return;
            ready.insert(ready.end(), posted_.begin(), posted_.end());
            posted_.clear();
        }
        std::sort(ready.begin(), ready.end());
        ready.erase(std::unique(ready.begin(), ready.end()), ready.end());
        std::erase_if(ready, [this](Stream* stream) {
            std::lock_guard lock(stream->mutex);
            const bool more_to_send = send_some(*stream) == Progress::kMore;
            const bool more_to_receive = receive_some(*stream) == Progress::kMore;
            return !more_to_send && !more_to_receive;
        });
        if (ready.empty()) settle_meters();
    }
}

void Mesh::run_rings() {
    Counter& bell = segment_->rank(place_[rank_]).bell;
    while (true) {
        const uint32_t seen = bell.value.load();
        {
            std::lock_guard lock(mutex_);
            if (is_closing_) return;
        }
        if (!move_rings()) bell.sleep(seen, kForeverS);
    }
}

// Moves some of every message that goes through a ring; false if nothing more can be moved now.
bool Mesh::move_rings() {
    bool is_more = false;
    for (auto& stream : streams_) {
        if (!stream || stream->segment == nullptr) continue;
        std::lock_guard lock(stream->mutex);
        is_more |= send_some(*stream) == Progress::kMore;
        is_more |= receive_some(*stream) == Progress::kMore;
    }
    return is_more;
}

// A thread that waits moves messages itself: nobody needs to wake it when the other thread has done so.
void Mesh::move_until_done(const Ticket& ticket, double timeout_s) {
    const double deadline = now() + timeout_s;
    RankState& own = segment_->rank(place_[rank_]);
    ++own.num_waiters;
    uint32_t seen;
    bool is_more = true;
    for (double left_s = timeout_s; left_s > 0; left_s = deadline - now()) {
        seen = own.waiter_bell.value.load();
        is_more = move_rings();
        {
            std::lock_guard lock(mutex_);
            if (ticket.is_over()) break;
        }
        if (!is_more) own.waiter_bell.sleep(seen, left_s);
    }
    --own.num_waiters;
    // What has come up since then is for the next one that moves.
    if (is_more || own.waiter_bell.value.load() != seen) segment_->ring_bell(place_[rank_]);
}

Mesh::Progress Mesh::send_some(Stream& stream) {
    size_t budget = kVisitBytes;
    while (!stream.sends.empty()) {
        Message& message = stream.sends.front();
        const size_t total = sizeof(Frame) + message.num_bytes;
        iovec pieces[2];
        int num_pieces = 0;
        const size_t body = message.moved > sizeof(Frame) ? message.moved - sizeof(Frame) : 0;
        if (message.moved < sizeof(Frame)) {
            pieces[num_pieces++] = {reinterpret_cast<char*>(&message.frame) + message.moved,
                                    sizeof(Frame) - message.moved};
        }
        pieces[num_pieces++] = {message.data + body, std::min(message.num_bytes - body, kVisitBytes)};
        const ssize_t sent = stream.send(pieces, num_pieces);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno == EAGAIN) return Progress::kWaiting;
        if (sent < 0) {
            break_stream(stream, "rank " + std::to_string(stream.peer) + " hung up: " + std::strerror(errno));
            return Progress::kWaiting;
        }
        message.moved += static_cast<size_t>(sent);
        if (message.moved == total) {
            finish(message, stream.peer);
            stream.sends.pop_front();
        }
        if (static_cast<size_t>(sent) >= budget)
            return stream.sends.empty() ? Progress::kWaiting : Progress::kMore;
        budget -= static_cast<size_t>(sent);
    }
    return Progress::kWaiting;
}

Mesh::Progress Mesh::receive_some(Stream& stream) {
    size_t budget = kVisitBytes;
    while (!stream.receives.empty()) {
        Message& message = stream.receives.front();
        Frame frame = message.frame;
        ssize_t got;
        double at;
        if (message.moved < sizeof(Frame)) {
            // Frames are read into a copy and compared as they come in: a peer that is out of step is found
            // out early.
            char* const expected = reinterpret_cast<char*>(&message.frame);
            got = stream.receive(reinterpret_cast<char*>(&frame) + message.moved,
                                 sizeof(Frame) - message.moved, at);
            if (got > 0 &&
                std::memcmp(expected + message.moved, reinterpret_cast<char*>(&frame) + message.moved,
                            static_cast<size_t>(got)) != 0) {
                break_stream(stream, "rank " + std::to_string(stream.peer) +
                                         " sent another message than the one of " +
                                         std::to_string(message.num_bytes) + " bytes that was due");
                return Progress::kWaiting;
            }
        } else {
            const size_t body = message.moved - sizeof(Frame);
            got = stream.receive(message.data + body, std::min(message.num_bytes - body, budget), at);
        }
        if (got == 0) {
            break_stream(stream, "rank " + std::to_string(stream.peer) + " hung up");
            return Progress::kWaiting;
        }
        if (got < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) return Progress::kWaiting;
            break_stream(stream, "rank " + std::to_string(stream.peer) + " hung up: " + std::strerror(errno));
            return Progress::kWaiting;
        }
        const bool is_first = message.moved == 0;
        message.moved += static_cast<size_t>(got);
        const bool is_last = message.moved == sizeof(Frame) + message.num_bytes;
        if (stream.segment == nullptr) {
            const int64_t stale = std::min<int64_t>(stream.stale, got);
            stream.stale -= stale;
            meter(stream, at, got - stale, is_first, is_last);
        }
        if (is_last) {
            finish(message, stream.peer, at);
            stream.receives.pop_front();
        }
        if (static_cast<size_t>(got) >= budget)
            return stream.receives.empty() ? Progress::kWaiting : Progress::kMore;
        budget -= static_cast<size_t>(got);
    }
    return Progress::kWaiting;
}

void Mesh::meter(const Stream& stream, double at, int64_t got, bool begins, bool ends) {
    meters_[stream.peer].add(at, got, begins, ends);
    meters_[world_size_].add(at, got, begins, ends);
}

void Mesh::settle_meters() {
    std::vector<Burst> done;
    for (ArrivalMeter& meter : meters_) meter.settle(done);
    if (done.empty()) return;
    std::lock_guard lock(mutex_);
    bursts_.insert(bursts_.end(), done.begin(), done.end());
    if (bursts_.size() > kMaxBursts) bursts_.erase(bursts_.begin(), bursts_.end() - kMaxBursts);
}

void Mesh::finish(const Message& message, int peer, double at) {
    std::lock_guard lock(mutex_);
    if (at > 0) message.ticket->arrived_s[peer] = at - message.ticket->posted_at;
    --message.ticket->num_open[peer];
    if (--message.ticket->num_left == 0) tell(*message.ticket);
}

void Mesh::break_stream(Stream& stream, const std::string& why) {
    if (!stream.broken.empty()) return;
    stream.broken = why;
    std::lock_guard lock(mutex_);
    for (auto* queue : {&stream.sends, &stream.receives}) {
        for (Message& message : *queue) {
            if (message.ticket->error.empty()) message.ticket->error = why;
            tell(*message.ticket);
        }
        queue->clear();
    }
}

// Wakes the thread that waits for the ticket, if there is another.
void Mesh::tell(const Ticket& ticket) {
    if (ticket.waiter == std::thread::id{} || ticket.waiter == std::this_thread::get_id()) return;
    changed_.notify_all();
    if (segment_) segment_->rank(place_[rank_]).waiter_bell.add_one();
}

}  // namespace cgx

#include "sockets.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "clock.h"
#include "errors.h"

namespace cgx {
namespace {

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

    FileDescriptor make_socket() const {
        return FileDescriptor(socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    }
};

// True once one of `events` is there, false if the deadline passes first.
bool await_events(int fd, short events, double deadline) {
    pollfd entry{fd, events, 0};
    int ready;
    do ready = poll(&entry, 1, left_ms(deadline));
    while (ready < 0 && errno == EINTR && now_s() < deadline);
    return ready > 0;
}

// Calls move(at, num_left) until all of `num_bytes` are moved.
template <typename Move>
bool move_all(int fd, short events, size_t num_bytes, double deadline, Move move) {
    for (size_t at = 0; at < num_bytes;) {
        const ssize_t moved = move(at, num_bytes - at);
        if (moved == 0) return false;
        if (moved < 0) {
            if (errno != EAGAIN && errno != EINTR) return false;
            if (!await_events(fd, events, deadline)) return false;
            continue;
        }
        at += static_cast<size_t>(moved);
    }
    return true;
}

}  // namespace

void FileDescriptor::close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

FileDescriptor listen_at(const std::string& address, int first_port, int last_port) {
    for (int port = first_port; port <= last_port; ++port) {
        const AddressInfo target(address, port);
        FileDescriptor listener = target.make_socket();
        const int on = 1;
        // Without it, connections that were accepted at this port keep it in use, also for a minute after
        // their end. The kernel's own choice needs no such thing.
        if (port != 0) setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (listener.is_open() && bind(listener.get(), target.info->ai_addr, target.info->ai_addrlen) == 0 &&
            listen(listener.get(), SOMAXCONN) == 0) {
            return listener;
        }
        if (errno != EADDRINUSE) fail_errno("cannot listen on " + address);
    }
    fail("all ports from " + std::to_string(first_port) + " to " + std::to_string(last_port) +
         " are in use on " + address);
}

int port_of(int fd) {
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size);
    return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

FileDescriptor dial(const std::string& address, int port, double deadline, int& error) {
    const AddressInfo target(address, port);
    FileDescriptor connection = target.make_socket();
    if (!connection.is_open()) fail_socket("cannot make a socket", errno);
    const int fd = connection.get();
    set_stream_options(fd);
    error = 0;
    if (connect(fd, target.info->ai_addr, target.info->ai_addrlen) != 0) error = errno;
    if (error == EINPROGRESS) {
        error = ETIMEDOUT;
        socklen_t size = sizeof error;
        if (await_events(fd, POLLOUT, deadline)) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    return connection;
}

FileDescriptor accept_one(int listen_fd, std::string& address) {
    sockaddr_storage from{};
    socklen_t size = sizeof from;
    auto* const name = reinterpret_cast<sockaddr*>(&from);
    FileDescriptor connection(accept4(listen_fd, name, &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.is_open()) return connection;
    char text[NI_MAXHOST] = "";
    getnameinfo(name, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
    address = text;
    return connection;
}

void fail_socket(const std::string& what, int error) {
    std::string advice;
    rlimit limit{};
    if (error == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        advice = "; this process may have " + std::to_string(limit.rlim_cur) +
                 " files open: raise that limit with ulimit -n";
    }
    fail(what + ": " + std::strerror(error) + advice);
}

void set_stream_options(int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
}

int left_ms(double deadline) { return std::max(0, static_cast<int>((deadline - now_s()) * 1e3)); }

bool read_all(int fd, void* data, size_t num_bytes, double deadline) {
    auto* bytes = static_cast<char*>(data);
    return move_all(fd, POLLIN, num_bytes, deadline,
                    [&](size_t at, size_t num_left) { return recv(fd, bytes + at, num_left, 0); });
}

bool write_all(int fd, const void* data, size_t num_bytes, double deadline) {
    const auto* bytes = static_cast<const char*>(data);
    return move_all(fd, POLLOUT, num_bytes, deadline,
                    [&](size_t at, size_t num_left) { return send(fd, bytes + at, num_left, MSG_NOSIGNAL); });
}

ssize_t send_pieces(int fd, iovec* pieces, int num_pieces) {
    msghdr header{};
    header.msg_iov = pieces;
    header.msg_iovlen = static_cast<size_t>(num_pieces);
    return sendmsg(fd, &header, MSG_NOSIGNAL);
}

ssize_t receive_stamped(int fd, void* data, size_t num_bytes, double& at) {
    iovec piece{data, num_bytes};
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
    // The kernel starts to stamp a moment after set_stream_options.
    if (at == 0) at = wall_clock_s();
    return got;
}

int64_t waiting_bytes(int fd) {
    int waiting = 0;
    if (ioctl(fd, FIONREAD, &waiting) != 0) fail_errno("cannot see how much has arrived");
    return waiting;
}

double round_trip_s(int fd) {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) fail_errno("cannot read a round trip");
    return 1e-6 * info.tcpi_rtt;
}

}  // namespace cgx

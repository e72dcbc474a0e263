// File descriptors, and TCP sockets that do not block.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace cgx {

// Owns a file descriptor, or none.
class FileDescriptor {
  public:
    FileDescriptor() = default;
    explicit FileDescriptor(int fd) : fd_(fd) {}
    ~FileDescriptor() { close(); }
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }

    int get() const { return fd_; }
    bool is_open() const { return fd_ >= 0; }
    void close();

  private:
    int fd_ = -1;
};

// Listens on `address`, a numeric IP address, at the first port from `first_port` to `last_port` where nobody
// else does; 0 to 0: at any. Throws std::runtime_error if the address is not one of this machine, or if all
// ports are in use.
FileDescriptor listen_at(const std::string& address, int first_port, int last_port);

// The local port of a socket.
int port_of(int fd);

// Connects to a numeric IP address. `error` becomes 0, or the value of errno that says why it failed.
FileDescriptor dial(const std::string& address, int port, double deadline, int& error);

// A connection that waits at `listen_fd`, and the IP address that it comes from. None with errno if there is
// none, or if it cannot be accepted.
FileDescriptor accept_one(int listen_fd, std::string& address);

// Throws as fail_errno, and says how many files may be open if that is the reason.
[[noreturn]] void fail_socket(const std::string& what, int error);

// Sends at once what is written, and asks the kernel for time stamps of received bytes.
void set_stream_options(int fd);

// Milliseconds until `deadline`, for poll.
int left_ms(double deadline);

// Read or write all of `num_bytes`. False if the peer hangs up or the deadline passes.
bool read_all(int fd, void* data, size_t num_bytes, double deadline);
bool write_all(int fd, const void* data, size_t num_bytes, double deadline);

// Sends as sendmsg does.
ssize_t send_pieces(int fd, iovec* pieces, int num_pieces);

// Receives as recv does. `at` becomes the time at which the kernel got the last of these bytes.
ssize_t receive_stamped(int fd, void* data, size_t num_bytes, double& at);

// Bytes that have arrived and are not read yet.
int64_t waiting_bytes(int fd);

// The round trip of a connection, as the kernel measured it.
double round_trip_s(int fd);

}  // namespace cgx

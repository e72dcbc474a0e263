#include "socket_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "errors.h"

namespace cgx {

SocketLoop::SocketLoop(LinkMeter& meter)
    : meter_(meter), epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    epoll_event event{};  // without a stream
    event.events = EPOLLIN;
    if (!epoll_.is_open() || !wake_.is_open() ||
        epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
        fail_errno("cannot make an epoll instance");
    }
}

void SocketLoop::watch(Stream& stream) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    event.data.ptr = &stream;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stream.fd(), &event) != 0)
        fail_errno("cannot watch a connection");
    ++num_watched_;
}

void SocketLoop::run() {
    std::vector<Stream*> ready;
    std::vector<epoll_event> events(num_watched_ + 1);
    bool is_idle = true;
    {
        std::lock_guard lock(mutex_);
        thread_ = std::this_thread::get_id();
    }
    while (true) {
        const int count =
            epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), is_idle ? -1 : 0);
        for (int i = 0; i < count; ++i) {
            if (auto* stream = static_cast<Stream*>(events[i].data.ptr); stream != nullptr) {
                if ((events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) stream->notice_hang_up();
                ready.push_back(stream);
                continue;
            }
            uint64_t number;
            [[maybe_unused]] const ssize_t drained = read(wake_.get(), &number, sizeof number);
        }
        do_called();
        {
            std::lock_guard lock(mutex_);
            if (is_stopped_) return;
            ready.insert(ready.end(), posted_.begin(), posted_.end());
            posted_.clear();
        }
        std::sort(ready.begin(), ready.end());
        ready.erase(std::unique(ready.begin(), ready.end()), ready.end());
        std::erase_if(ready, [](Stream* stream) { return !stream->move(); });
        if (ready.empty()) meter_.settle();
        std::lock_guard lock(mutex_);
        is_idle = ready.empty() && called_.empty();
    }
}

void SocketLoop::stop() {
    {
        std::lock_guard lock(mutex_);
        is_stopped_ = true;
    }
    wake();
}

void SocketLoop::visit(Stream& stream) {
    std::lock_guard lock(mutex_);
    posted_.push_back(&stream);
}

void SocketLoop::wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
}

void SocketLoop::call(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    called_.push_back(std::move(work));
    if (thread_ != std::this_thread::get_id()) wake();
}

void SocketLoop::do_called() {
    std::vector<std::function<void()>> called;
    {
        std::lock_guard lock(mutex_);
        called.swap(called_);
    }
    for (const auto& work : called) work();
}

void SocketLoop::close_copies() {
    epoll_.close();
    wake_.close();
}

}  // namespace cgx

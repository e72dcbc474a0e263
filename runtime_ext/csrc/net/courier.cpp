#include "courier.h"

#include <cstring>
#include <new>
#include <utility>

#include "../cpu/kernels.h"

namespace cgx {
namespace {

uint32_t checksum(const uint8_t* message, size_t num_bytes) {
    return crc32c(message + kHeaderBytes, static_cast<int64_t>(num_bytes - kHeaderBytes),
                  crc32c(message, kChecksumAt, 0));
}

}  // namespace

void seal(uint8_t* message, size_t num_bytes) {
    const uint32_t found = checksum(message, num_bytes);
    std::memcpy(message + kChecksumAt, &found, sizeof found);
}

void mark_if_damaged(uint8_t* message, size_t num_bytes) {
    uint32_t written;
    std::memcpy(&written, message + kChecksumAt, sizeof written);
    if (written != checksum(message, num_bytes)) std::memset(message, 0, 2);
}

void Courier::start() {
    std::lock_guard lock(mutex_);
    if (!is_stopped_ && !thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void Courier::call(Work work) {
    {
        std::lock_guard lock(mutex_);
        if (!is_stopped_) {
            called_.push_back(std::move(work));
            changed_.notify_all();
            return;
        }
    }
    work(true);
}

void Courier::stop() {
    {
        std::lock_guard lock(mutex_);
        is_stopped_ = true;
        changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
    for (const Work& work : called_) work(true);
    called_.clear();
}

void Courier::run() {
    while (true) {
        Work work;
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return is_stopped_ || !called_.empty(); });
            if (is_stopped_) return;
            work = std::move(called_.front());
            called_.pop_front();
        }
        work(false);
    }
}

void Courier::forget_thread() {
    // The destructors would end the process, or wait.
    new (&thread_) std::thread;
    new (&changed_) std::condition_variable;
}

}  // namespace cgx

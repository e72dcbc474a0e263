#include "threads.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace cgx {
namespace {

// Lives on the stack of the thread that calls run_parts.
struct Job {
    PartFunction function;
    void* context;
    int num_parts;
    int next_part = 0;
    int num_done = 0;
    std::condition_variable done{};
};

class Pool {
  public:
    void run(Job& job) {
        std::unique_lock lock(mutex_);
        start_workers(job.num_parts - 1);
        jobs_.push_back(&job);
        for (int part = 1; part < job.num_parts; ++part) ready_.notify_one();
        // Run the parts that no worker has taken by now, so that a call never waits for calls of other
        // threads.
        while (job.next_part < job.num_parts) run_next_part(job, lock);
        job.done.wait(lock, [&] { return job.num_done == job.num_parts; });
    }

  private:
    void start_workers(int num_wanted) {
        try {
            for (; num_workers_ < num_wanted; ++num_workers_) std::thread([this] { work(); }).detach();
        } catch (const std::system_error&) {
            // The system has no more threads. The existing ones, at least the caller, run all parts.
        }
    }

    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            ready_.wait(lock, [this] { return !jobs_.empty(); });
            run_next_part(*jobs_.front(), lock);
        }
    }

    void run_next_part(Job& job, std::unique_lock<std::mutex>& lock) {
        const int part = job.next_part++;
        if (job.next_part == job.num_parts) std::erase(jobs_, &job);
        lock.unlock();
        job.function(job.context, part);
        lock.lock();
        if (++job.num_done == job.num_parts) job.done.notify_one();
    }

    std::mutex mutex_;
    std::condition_variable ready_;
    std::deque<Job*> jobs_;  // jobs with parts that no thread has taken
    int num_workers_ = 0;
};

// Never destroyed: workers wait on it until the process ends.
Pool* pool = new Pool;

// The child of a fork has no workers, and one of them may have held the mutex.
void forget_workers() { pool = new Pool; }

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, forget_workers);

}  // namespace

void run_parts(int num_parts, PartFunction function, void* context) {
    Job job{function, context, num_parts};
    pool->run(job);
}

}  // namespace cgx

// One segment of POSIX shared memory for the ranks of a host: their counters, slots for collectives, and a
// ring of bytes for each ordered pair.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cgx {

// A number that only grows, modulo 2^32, and that threads of all processes can sleep on.
struct alignas(64) Counter {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> num_sleepers;

    void set(uint32_t to);
    void add_one();
    // Sleeps while the value is `seen`, at most `timeout_s`; may return early.
    void sleep(uint32_t seen, double timeout_s);
};

// State that one rank shows the others.
struct RankState {
    static constexpr int kNumSlots = 8;

    Counter copied;   // pieces that it has copied into its slots
    Counter reduced;  // pieces whose share of the sum it has put into its slot
    Counter taken;    // pieces for which it needs no slot of another rank any more

    Counter bell;         // for the thread that moves messages: a ring has data or room
    Counter waiter_bell;  // rung instead while threads wait for messages, since they move messages themselves
    std::atomic<uint32_t> num_waiters;

    std::atomic<uint32_t> has_left;
    std::atomic<uint64_t> operation[kNumSlots];  // operation that the piece in the slot belongs to
};

// Bytes from one rank to another. The positions only grow. A reader or writer that finds nothing to do sets
// its flag, and the other side then rings its bell.
struct Ring {
    alignas(64) std::atomic<uint64_t> written;
    std::atomic<uint32_t> reader_waits;
    alignas(64) std::atomic<uint64_t> read;
    std::atomic<uint32_t> writer_waits;
};

class Segment {
  public:
    static constexpr size_t kSlotBytes = 1 << 17;
    static constexpr size_t kNonceBytes = 16;

    // Makes a segment for `num_ranks` ranks and maps it. If /dev/shm has no room, throws std::runtime_error
    // that says how much it takes.
    explicit Segment(int num_ranks);
    // Maps the segment of that name, made by another process. Throws std::runtime_error if it is not there or
    // does not begin with `nonce`.
    Segment(int num_ranks, const std::string& name, const std::string& nonce);
    ~Segment();
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    // Removes the name, so that the memory goes with the last process that has mapped it.
    void unlink();

    const std::string& name() const { return name_; }
    const std::string& nonce() const { return nonce_; }
    int num_ranks() const { return num_ranks_; }

    RankState& rank(int index) const;
    uint8_t* slot(int rank, uint32_t piece) const;

    // `put` moves as many bytes as there is room for, `take` as many as there are, and both return how many.
    // After 0 the bell of `from` (put) or `to` (take) rings when it is worth trying again. kBroken: the other
    // rank has written positions that cannot be.
    static constexpr size_t kBroken = SIZE_MAX;
    size_t put(int from, int to, const iovec* pieces, int num_pieces);
    size_t take(int from, int to, void* data, size_t num_bytes);
    void ring_bell(int rank);

    // Marks a rank as gone, for this process only: its connection has ended.
    void set_gone(int rank) { gone_[rank].store(true); }
    bool is_gone(int rank) const { return gone_[rank].load() || has_left(rank); }
    bool has_left(int rank) const { return this->rank(rank).has_left.load() != 0; }

  private:
    void make();
    void map(int fd);
    Ring& ring(int from, int to) const;
    uint8_t* ring_data(int from, int to) const;

    const int num_ranks_;
    const size_t ring_bytes_, num_bytes_;
    std::string name_, nonce_;
    int owner_fd_ = -1;  // holds the lock that says that the name is still needed
    uint8_t* base_ = nullptr;
    std::vector<std::atomic<bool>> gone_;
};

}  // namespace cgx

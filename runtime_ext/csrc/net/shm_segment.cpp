#include "shm_segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <cstring>
#include <ctime>
#include <new>

#include "errors.h"

namespace cgx {
namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == 4, "the kernel sleeps on 32 bits");

constexpr char kFolder[] = "/dev/shm";
constexpr char kPrefix[] = "/cgx-ray-";
constexpr size_t kPage = 4096;
// A ring of either size stays in the cache of a core. Up to 32 ranks all rings together take 16 MiB or less.
constexpr size_t kMaxRingBytes = 1 << 18, kMinRingBytes = 1 << 14, kAllRingsBytes = 1 << 24;

size_t round_up(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

size_t count_pairs(int num_ranks) { return static_cast<size_t>(num_ranks) * (num_ranks - 1); }

size_t choose_ring_bytes(int num_ranks) {
    const size_t share = kAllRingsBytes / std::max<size_t>(1, count_pairs(num_ranks));
    return std::clamp(std::bit_floor(share), kMinRingBytes, kMaxRingBytes);
}

// Layout of the segment: nonce, states of the ranks, positions of the rings, slots, bytes of the rings.
constexpr size_t kStatesAt = 64;

size_t rings_at(int num_ranks) { return kStatesAt + num_ranks * sizeof(RankState); }

size_t slots_at(int num_ranks) {
    return round_up(rings_at(num_ranks) + static_cast<size_t>(num_ranks) * num_ranks * sizeof(Ring));
}

size_t bytes_at(int num_ranks) {
    return slots_at(num_ranks) + num_ranks * RankState::kNumSlots * Segment::kSlotBytes;
}

std::string random_bytes(size_t count) {
    std::string bytes(count, '\0');
    if (getrandom(bytes.data(), count, 0) != static_cast<ssize_t>(count)) fail_errno("getrandom");
    return bytes;
}

std::string random_name() {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string name = kPrefix + std::to_string(getpid()) + "-";
    for (const unsigned char byte : random_bytes(8)) name += {kDigits[byte >> 4], kDigits[byte & 15]};
    return name;
}

// Removes segments that nobody needs any more. The maker of a segment holds a lock on it as long as its name
// is needed, and the kernel releases the lock however the process ends. Process ids would not do: containers
// may share the folder without sharing process ids.
void remove_leftovers() {
    DIR* folder = opendir(kFolder);
    if (folder == nullptr) return;
    while (const dirent* entry = readdir(folder)) {
        const std::string name = std::string("/") + entry->d_name;
        if (!name.starts_with(kPrefix)) continue;
        const int fd = shm_open(name.c_str(), O_RDWR, 0);
        if (fd < 0) continue;  // of another user, or gone by now
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) shm_unlink(name.c_str());
        ::close(fd);
    }
    closedir(folder);
}

// memcpy may be given no null pointer, and an empty message is one.
void copy_bytes(uint8_t* to, const uint8_t* from, size_t num_bytes) {
    if (num_bytes > 0) std::memcpy(to, from, num_bytes);
}

}  // namespace

void Counter::set(uint32_t to) {
    value.store(to);
    if (num_sleepers.load() == 0) return;
    syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Counter::add_one() {
    ++value;
    if (num_sleepers.load() == 0) return;
    syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Counter::sleep(uint32_t seen, double timeout_s) {
    const double whole = std::floor(std::max(timeout_s, 0.0));
    const timespec timeout{static_cast<time_t>(whole),
                           static_cast<long>((std::max(timeout_s, 0.0) - whole) * 1e9)};
    ++num_sleepers;
    // The kernel compares the value once more before it sleeps. Writers change the value before they look for
    // sleepers, so no wake-up is missed.
    syscall(SYS_futex, &value, FUTEX_WAIT, seen, &timeout, nullptr, 0);
    --num_sleepers;
}

Segment::Segment(int num_ranks)
    : num_ranks_(num_ranks),
      ring_bytes_(choose_ring_bytes(num_ranks)),
      num_bytes_(bytes_at(num_ranks) + count_pairs(num_ranks) * ring_bytes_),
      nonce_(random_bytes(kNonceBytes)),
      gone_(num_ranks) {
    remove_leftovers();
    try {
        make();
    } catch (...) {
        unlink();
        throw;
    }
    for (int index = 0; index < num_ranks_; ++index) new (&rank(index)) RankState{};
    for (int pair = 0; pair < num_ranks_ * num_ranks_; ++pair) new (&ring(0, 0) + pair) Ring{};
    std::memcpy(base_, nonce_.data(), kNonceBytes);
}

Segment::Segment(int num_ranks, const std::string& name, const std::string& nonce)
    : num_ranks_(num_ranks),
      ring_bytes_(choose_ring_bytes(num_ranks)),
      num_bytes_(bytes_at(num_ranks) + count_pairs(num_ranks) * ring_bytes_),
      name_(name),
      nonce_(nonce),
      gone_(num_ranks) {
    const int fd = shm_open(name.c_str(), O_RDWR, 0);
    if (fd < 0) fail_errno("cannot open shared memory " + name);
    struct stat status{};
    const bool is_whole = fstat(fd, &status) == 0 && static_cast<size_t>(status.st_size) == num_bytes_;
    try {
        if (!is_whole) fail("shared memory " + name + " has another size");
        map(fd);
    } catch (...) {
        ::close(fd);
        throw;
    }
    ::close(fd);
    if (nonce.size() != kNonceBytes || std::memcmp(base_, nonce.data(), kNonceBytes) != 0) {
        munmap(base_, num_bytes_);
        fail("shared memory " + name + " is of another run");
    }
}

Segment::~Segment() {
    unlink();
    if (base_ != nullptr) munmap(base_, num_bytes_);
}

void Segment::make() {
    struct stat status{};
    do {  // repeat if the clean-up of another run came before the lock
        unlink();
        name_ = random_name();
        owner_fd_ = shm_open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
        if (owner_fd_ < 0) fail_errno("cannot make shared memory in " + std::string(kFolder));
        if (flock(owner_fd_, LOCK_EX) != 0 || fstat(owner_fd_, &status) != 0) fail_errno("flock");
    } while (status.st_nlink == 0);
    // Take the pages now: a full folder would otherwise end this process by SIGBUS later.
    const int error = posix_fallocate(owner_fd_, 0, static_cast<off_t>(num_bytes_));
    if (error != 0) {
        const size_t needed_mib = (num_bytes_ + (1 << 20) - 1) >> 20;
        fail_errno(std::string(kFolder) + " has no room for " + std::to_string(needed_mib) + " MiB", error);
    }
    map(owner_fd_);
}

void Segment::unlink() {
    if (owner_fd_ < 0) return;
    shm_unlink(name_.c_str());
    ::close(owner_fd_);
    owner_fd_ = -1;
}

void Segment::map(int fd) {
    void* base = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED) fail_errno("cannot map shared memory " + name_);
    base_ = static_cast<uint8_t*>(base);
}

size_t Segment::put(int from, int to, const iovec* pieces, int num_pieces) {
    Ring& ring = this->ring(from, to);
    const uint64_t written = ring.written.load(std::memory_order_relaxed);
    size_t used = written - ring.read.load();
    if (used == ring_bytes_) {
        ring.writer_waits.store(1);
        used = written - ring.read.load();
        if (used == ring_bytes_) return 0;
        ring.writer_waits.store(0);
    }
    if (used > ring_bytes_) return kBroken;
    const size_t room = ring_bytes_ - used;
    size_t moved = 0;
    for (int i = 0; i < num_pieces && moved < room; ++i) {
        const size_t count = std::min(pieces[i].iov_len, room - moved);
        const size_t at = (written + moved) % ring_bytes_, before_end = std::min(count, ring_bytes_ - at);
        const auto* data = static_cast<const uint8_t*>(pieces[i].iov_base);
        copy_bytes(ring_data(from, to) + at, data, before_end);
        copy_bytes(ring_data(from, to), data + before_end, count - before_end);
        moved += count;
    }
    ring.written.store(written + moved);
    if (ring.reader_waits.load() != 0 && ring.reader_waits.exchange(0) != 0) ring_bell(to);
    return moved;
}

size_t Segment::take(int from, int to, void* data, size_t num_bytes) {
    Ring& ring = this->ring(from, to);
    const uint64_t read = ring.read.load(std::memory_order_relaxed);
    size_t there = ring.written.load() - read;
    if (there == 0) {
        ring.reader_waits.store(1);
        there = ring.written.load() - read;
        if (there == 0) return 0;
        ring.reader_waits.store(0);
    }
    if (there > ring_bytes_) return kBroken;
    const size_t count = std::min(num_bytes, there);
    const size_t at = read % ring_bytes_, before_end = std::min(count, ring_bytes_ - at);
    copy_bytes(static_cast<uint8_t*>(data), ring_data(from, to) + at, before_end);
    copy_bytes(static_cast<uint8_t*>(data) + before_end, ring_data(from, to), count - before_end);
    ring.read.store(read + count);
    // Do not ring for every bit of room. A reader that lacks data has emptied the ring, so half of it becomes
    // free in any case.
    const bool has_room = there - count <= ring_bytes_ / 2;
    if (has_room && ring.writer_waits.load() != 0 && ring.writer_waits.exchange(0) != 0) ring_bell(from);
    return count;
}

void Segment::ring_bell(int rank) {
    RankState& state = this->rank(rank);
    if (state.num_waiters.load() > 0) {
        state.waiter_bell.add_one();
        // A thread that stops waiting lowers num_waiters first and looks at its bell after that. If it is
        // still counted here, it will find this ring.
        if (state.num_waiters.load() > 0) return;
    }
    state.bell.add_one();
}

RankState& Segment::rank(int index) const { return reinterpret_cast<RankState*>(base_ + kStatesAt)[index]; }

uint8_t* Segment::slot(int rank, uint32_t piece) const {
    const size_t index = static_cast<size_t>(rank) * RankState::kNumSlots + piece % RankState::kNumSlots;
    return base_ + slots_at(num_ranks_) + index * kSlotBytes;
}

Ring& Segment::ring(int from, int to) const {
    return reinterpret_cast<Ring*>(base_ + rings_at(num_ranks_))[from * num_ranks_ + to];
}

uint8_t* Segment::ring_data(int from, int to) const {
    const size_t pair = static_cast<size_t>(from) * (num_ranks_ - 1) + (to < from ? to : to - 1);
    return base_ + bytes_at(num_ranks_) + pair * ring_bytes_;
}

}  // namespace cgx

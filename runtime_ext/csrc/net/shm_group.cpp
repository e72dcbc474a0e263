#include "shm_group.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "clock.h"
#include "errors.h"
#include "kernels.h"
#include "portable.h"

namespace cgx {
namespace {

constexpr size_t kLine = 64;
// Up to this many bytes every rank makes the whole sum itself: more work, and one wait less.
constexpr int64_t kSmallBytes = 1 << 12;
// Rounds between copying a piece into the slot, summing it and taking the sum. By then the other ranks have
// mostly done their work on it, and ranks that share a core take turns less often.
constexpr int64_t kLag = 2;
// Interval at which a sleeping rank looks whether the rank it waits for is still there.
constexpr double kLookS = 0.05;
constexpr int kNumSpins = 2000;
constexpr int64_t kSumBlock = 1024;

bool has_cores_to_spare(int num_ranks) {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) > num_ranks;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

CGX_INLINE double to_sum(double x) { return x; }
template <typename T>
CGX_INLINE float to_sum(T x) {
    return to_float(x);
}

// Rounds to the nearest number, ties to even.
CGX_INLINE void round_to(float sum, float& out) { out = sum; }
CGX_INLINE void round_to(double sum, double& out) { out = sum; }
CGX_INLINE void round_to(float sum, BFloat16& out) {
    const uint32_t bits = float_bits(sum);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    out.bits = static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded);
}
CGX_INLINE void round_to(float sum, Half& out) {
    const uint32_t bits = float_bits(sum), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    // Normal: the offset of the exponent is 112 less, and 13 bits are dropped. A carry runs into the
    // exponent, up to infinity.
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal: these numbers are 2^-24 apart, as floats from 0.5 on are.
    const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
    const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    out.bits = static_cast<uint16_t>(sign | (magnitude >= (143u << 23) ? special : finite));
}

// Sets out[i] to the sum of sources[.][i], in the order of `sources`. `out` may be one of them.
template <typename T>
CGX_INLINE void sum(const T* const* sources, int num_sources, T* out, int64_t numel) {
    using Sum = decltype(to_sum(T{}));
    for (int64_t begin = 0; begin < numel; begin += kSumBlock) {
        const int64_t count = std::min(kSumBlock, numel - begin);
        Sum sums[kSumBlock];
        for (int64_t i = 0; i < count; ++i) sums[i] = to_sum(sources[0][begin + i]);
        for (int source = 1; source < num_sources; ++source) {
            for (int64_t i = 0; i < count; ++i) sums[i] += to_sum(sources[source][begin + i]);
        }
        for (int64_t i = 0; i < count; ++i) round_to(sums[i], out[begin + i]);
    }
}

CGX_MULTIVERSION
void add_up(const float* const* sources, int num_sources, float* out, int64_t numel) {
    sum(sources, num_sources, out, numel);
}
CGX_MULTIVERSION
void add_up(const double* const* sources, int num_sources, double* out, int64_t numel) {
    sum(sources, num_sources, out, numel);
}
CGX_MULTIVERSION
void add_up(const Half* const* sources, int num_sources, Half* out, int64_t numel) {
    sum(sources, num_sources, out, numel);
}
CGX_MULTIVERSION
void add_up(const BFloat16* const* sources, int num_sources, BFloat16* out, int64_t numel) {
    sum(sources, num_sources, out, numel);
}

template <typename F>
void with_type(LocalGroup::Type type, void* values, F f) {
    switch (type) {
        case LocalGroup::Type::kFloat32:
            return f(static_cast<float*>(values));
        case LocalGroup::Type::kFloat64:
            return f(static_cast<double*>(values));
        case LocalGroup::Type::kFloat16:
            return f(static_cast<Half*>(values));
        case LocalGroup::Type::kBFloat16:
            return f(static_cast<BFloat16*>(values));
    }
}

enum class Kind { kReduceScatter = 1, kAllGather, kAllReduce };

// A number that tells operations apart: FNV-1a of everything that ranks must agree on.
uint64_t operation_of(Kind kind, LocalGroup::Type type, const LocalGroup::Bounds& bounds) {
    uint64_t hash = 0xCBF29CE484222325u;
    const auto mix = [&](int64_t number) {
        hash = (hash ^ static_cast<uint64_t>(number)) * 0x100000001B3u;
        hash ^= hash >> 29;
    };
    mix(static_cast<int64_t>(kind));
    mix(static_cast<int64_t>(type));
    for (const auto& [start, stop] : bounds) {
        mix(start);
        mix(stop);
    }
    return hash;
}

template <typename T>
T* as(uint8_t* bytes) {
    return reinterpret_cast<T*>(bytes);
}

struct Span {
    int64_t begin, numel;
};

// Piece `index` of a part that is cut every `piece_numel` elements.
Span span_of(const std::pair<int64_t, int64_t>& bounds, int64_t index, int64_t piece_numel) {
    const int64_t begin = std::min(bounds.second, bounds.first + index * piece_numel);
    return {begin, std::min(piece_numel, bounds.second - begin)};
}

int64_t count_pieces(const LocalGroup::Bounds& bounds, int64_t piece_numel) {
    // Ranks meet even without elements, to find out whether they mean different operations.
    int64_t longest = 1;
    for (const auto& [start, stop] : bounds) longest = std::max(longest, stop - start);
    return (longest + piece_numel - 1) / piece_numel;
}

template <typename T>
void copy(const T* from, T* to, int64_t numel) {
    if (numel == 0) return;  // the pointers may be null
    std::memcpy(to, from, static_cast<size_t>(numel) * sizeof(T));
}

constexpr auto kNothing = [](int64_t, uint32_t) {};
template <typename F>
constexpr bool is_nothing = std::is_same_v<std::remove_const_t<F>, std::remove_const_t<decltype(kNothing)>>;

}  // namespace

LocalGroup::LocalGroup(std::shared_ptr<Segment> segment, int rank, std::vector<int> names, double timeout_s)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(segment_->num_ranks()),
      names_(std::move(names)),
      timeout_s_(timeout_s),
      spins_(has_cores_to_spare(size_)) {}

void LocalGroup::reduce_scatter(void* values, Type type, const Bounds& bounds) {
    operation_ = operation_of(Kind::kReduceScatter, type, bounds);
    with_type(type, values, [&](auto* typed) { reduce_scatter_of(typed, bounds); });
}

void LocalGroup::all_gather(void* values, Type type, const Bounds& bounds) {
    operation_ = operation_of(Kind::kAllGather, type, bounds);
    with_type(type, values, [&](auto* typed) { all_gather_of(typed, bounds); });
}

void LocalGroup::all_reduce(void* values, int64_t numel, Type type) {
    operation_ = operation_of(Kind::kAllReduce, type, {{0, numel}});
    with_type(type, values, [&](auto* typed) { all_reduce_of(typed, numel); });
}

template <typename T>
void LocalGroup::reduce_scatter_of(T* values, const Bounds& bounds) {
    // A slot holds one piece per rank.
    const int64_t piece_numel = static_cast<int64_t>(Segment::kSlotBytes / kLine / size_ * kLine / sizeof(T));
    std::vector<const T*> sources(size_);
    run_pieces(
        count_pieces(bounds, piece_numel),
        [&](int64_t index, uint32_t piece) {
            for (int peer = 0; peer < size_; ++peer) {
                const Span span = span_of(bounds[peer], index, piece_numel);
                if (peer == rank_) continue;
                copy(values + span.begin, as<T>(segment_->slot(rank_, piece)) + peer * piece_numel,
                     span.numel);
            }
        },
        [&](int64_t index, uint32_t piece) {
            const Span span = span_of(bounds[rank_], index, piece_numel);
            for (int peer = 0; peer < size_; ++peer) {
                sources[peer] = as<T>(segment_->slot(peer, piece)) + rank_ * piece_numel;
            }
            sources[rank_] = values + span.begin;
            add_up(sources.data(), size_, values + span.begin, span.numel);
        },
        kNothing);
}

template <typename T>
void LocalGroup::all_gather_of(T* values, const Bounds& bounds) {
    const auto piece_numel = static_cast<int64_t>(Segment::kSlotBytes / sizeof(T));
    run_pieces(
        count_pieces(bounds, piece_numel),
        [&](int64_t index, uint32_t piece) {
            const Span span = span_of(bounds[rank_], index, piece_numel);
            copy(values + span.begin, as<T>(segment_->slot(rank_, piece)), span.numel);
        },
        kNothing,
        [&](int64_t index, uint32_t piece) {
            for (int peer = 0; peer < size_; ++peer) {
                const Span span = span_of(bounds[peer], index, piece_numel);
                if (peer != rank_) copy(as<T>(segment_->slot(peer, piece)), values + span.begin, span.numel);
            }
        });
}

template <typename T>
void LocalGroup::all_reduce_of(T* values, int64_t numel) {
    const auto block_numel = static_cast<int64_t>(Segment::kSlotBytes / sizeof(T));
    const auto num_blocks = std::max<int64_t>(1, (numel + block_numel - 1) / block_numel);
    std::vector<const T*> sources(size_);
    if (numel * static_cast<int64_t>(sizeof(T)) <= kSmallBytes) {
        run_pieces(
            1, [&](int64_t, uint32_t piece) { copy(values, as<T>(segment_->slot(rank_, piece)), numel); },
            kNothing,
            [&](int64_t, uint32_t piece) {
                for (int peer = 0; peer < size_; ++peer) sources[peer] = as<T>(segment_->slot(peer, piece));
                add_up(sources.data(), size_, values, numel);
            });
        return;
    }
    // The share of each rank in a block lies at the same place in the slots.
    const auto share = [&](int64_t index, int rank) -> Span {
        const int64_t begin = index * block_numel, count = std::min(block_numel, numel - begin);
        const int64_t length = ((count + size_ - 1) / size_ + kLine - 1) / kLine * kLine;
        const int64_t first = std::min(count, rank * length);
        return {first, std::min(length, count - first)};
    };
    run_pieces(
        num_blocks,
        [&](int64_t index, uint32_t piece) {
            const T* block = values + index * block_numel;
            T* slot = as<T>(segment_->slot(rank_, piece));
            const Span own = share(index, rank_);
            const int64_t after = own.begin + own.numel,
                          count = std::min(block_numel, numel - index * block_numel);
            copy(block, slot, own.begin);
            copy(block + after, slot + after, count - after);
        },
        [&](int64_t index, uint32_t piece) {
            const Span own = share(index, rank_);
            T* sums = values + index * block_numel + own.begin;
            for (int peer = 0; peer < size_; ++peer)
                sources[peer] = as<T>(segment_->slot(peer, piece)) + own.begin;
            T* shared = as<T>(segment_->slot(rank_, piece)) + own.begin;
            sources[rank_] = sums;
            add_up(sources.data(), size_, sums, own.numel);
            copy(sums, shared, own.numel);
        },
        [&](int64_t index, uint32_t piece) {
            for (int peer = 0; peer < size_; ++peer) {
                if (peer == rank_) continue;
                const Span theirs = share(index, peer);
                const T* slot = as<T>(segment_->slot(peer, piece));
                copy(slot + theirs.begin, values + index * block_numel + theirs.begin, theirs.numel);
            }
        });
}

template <typename CopyIn, typename Reduce, typename CopyOut>
void LocalGroup::run_pieces(int64_t num_pieces, CopyIn copy_in, Reduce reduce, CopyOut copy_out) {
    static_assert(RankState::kNumSlots > 2 * kLag);
    RankState& own = segment_->rank(rank_);
    if (segment_->is_gone(rank_)) give_up("the connections are closed");
    const auto is_piece = [&](int64_t index) { return 0 <= index && index < num_pieces; };
    for (int64_t round = 0; round < num_pieces + 2 * kLag; ++round) {
        if (is_piece(round)) {
            const uint32_t piece = num_done_ + static_cast<uint32_t>(round);
            await_all(&RankState::taken, piece - RankState::kNumSlots + 1);
            copy_in(round, piece);
            own.operation[piece % RankState::kNumSlots].store(operation_);
            own.copied.set(piece + 1);
        }
        if (const int64_t index = round - kLag; is_piece(index)) {
            const uint32_t piece = num_done_ + static_cast<uint32_t>(index);
            await_all(&RankState::copied, piece + 1);
            if (index == 0) check_operation(piece);
            reduce(index, piece);
            own.reduced.set(piece + 1);
        }
        if (const int64_t index = round - 2 * kLag; is_piece(index)) {
            const uint32_t piece = num_done_ + static_cast<uint32_t>(index);
            if constexpr (!is_nothing<Reduce> && !is_nothing<CopyOut>)
                await_all(&RankState::reduced, piece + 1);
            copy_out(index, piece);
            own.taken.set(piece + 1);
        }
    }
    num_done_ += static_cast<uint32_t>(num_pieces);
}

void LocalGroup::await_all(Phase phase, uint32_t at_least) {
    double deadline = 0;  // set by the first rank that has to be waited for
    for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_) await(peer, phase, at_least, deadline);
    }
}

void LocalGroup::await(int peer, Phase phase, uint32_t at_least, double& deadline) {
    Counter& counter = segment_->rank(peer).*phase;
    uint32_t seen = 0;
    const auto is_there = [&](int of) {
        seen = (segment_->rank(of).*phase).value.load();
        return static_cast<int32_t>(seen - at_least) >= 0;
    };
    for (int spin = 0; spin < (spins_ ? kNumSpins : 1); ++spin) {
        if (is_there(peer)) return;
        relax();
    }
    if (deadline == 0) deadline = now_s() + timeout_s_;
    while (true) {
        // All ranks are needed, so any rank that is gone ends the operation. Name a rank that did not say
        // that it left, if there is one: the others gave up because of it.
        int gone = -1;
        for (int other = 0; other < size_; ++other) {
            // Look at this before the counter: pieces that a rank finished before it left are still good.
            if (!segment_->is_gone(other) || (other != rank_ && is_there(other))) continue;
            if (other == rank_) give_up("the connections are closed");
            if (gone < 0 || !segment_->has_left(other)) gone = other;
        }
        if (is_there(peer)) return;
        if (gone >= 0) give_up("rank " + std::to_string(names_[gone]) + " hung up");
        const double left_s = deadline - now_s();
        if (left_s <= 0) break;
        counter.sleep(seen, std::min(kLookS, left_s));
    }
    std::string late;
    for (int other = 0; other < size_; ++other) {
        if (other == peer || (other != rank_ && !is_there(other)))
            late += (late.empty() ? "rank " : ", rank ") + std::to_string(names_[other]);
    }
    give_up(late + " did not answer within " + std::to_string(static_cast<int64_t>(timeout_s_ * 1e3)) +
            " ms");
}

void LocalGroup::check_operation(uint32_t piece) {
    for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_ ||
            segment_->rank(peer).operation[piece % RankState::kNumSlots].load() == operation_)
            continue;
        give_up("rank " + std::to_string(names_[peer]) +
                " called another operation, or with other sizes or types");
    }
}

void LocalGroup::give_up(const std::string& why) {
    segment_->rank(rank_).has_left.store(1);
    fail(why);
}

}  // namespace cgx

// How CUDA threads share buckets: a team of 8 threads takes a bucket, row by row.
//
// A row is 32 elements, 4 per thread, so the team reads 128 bytes of float32 at once, and thread t has the
// elements of lanes 4t to 4t + 3 in the sums that reference/ defines: a thread adds rows without asking a
// neighbour. The four teams of a warp walk together, since they shuffle together; a team beyond the last
// bucket gets a bucket without elements.
//
// A bucket is read once for its grid or means and once more for its levels. The second time it is in the L1
// cache, where the 4 buckets of 128 elements of all warps take 128 KiB of 256.
#pragma once

#include "portable.h"

namespace cgx {

constexpr int kBlockSize = 256;
// 5 blocks are 40 of 64 warps and leave 48 registers per thread; with 40 the compiler spills.
constexpr int kBlocksAMultiprocessor = 5;
constexpr int kTeamSize = 8;
constexpr int kTeamsABlock = kBlockSize / kTeamSize;
constexpr int kQuad = 4;  // elements of a thread in a row
constexpr int kRow = kTeamSize * kQuad;
// Rows that are loaded before the first is used: 48 warps times 2 loads of 16 bytes per thread are 48 KiB in
// flight per multiprocessor; 4.8 TB/s at 700 ns need 26 KiB.
constexpr int kBatch = 2;
// The same for passes that find their rows in the L1 cache. With 2, qsgd takes more than 48 registers.
constexpr int kReread = 1;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

CGX_DEVICE int team_lane() { return static_cast<int>(threadIdx.x) % kTeamSize; }

template <typename T>
CGX_DEVICE T lesser(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
CGX_DEVICE T greater(T a, T b) {
    return a < b ? b : a;
}

CGX_DEVICE bool is_aligned(const void* address, int alignment) {
    return reinterpret_cast<uint64_t>(address) % alignment == 0;
}

// Hides from the compiler how `x` was computed: it would compute it again for every row.
CGX_DEVICE void keep(uint32_t& x) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(x));
#else
    static_cast<void>(x);
#endif
}

struct Bucket {
    int64_t index;
    int64_t begin;  // its first element
    int count;      // its elements
    int size;       // elements of a full bucket

    CGX_DEVICE int num_rows() const { return (size + kRow - 1) / kRow; }
    CGX_DEVICE int row_count(int row) const { return greater(0, lesser(count - row * kRow, kRow)); }
    // This thread's elements of the first row start here; those of row r are r * kRow further on.
    CGX_DEVICE int64_t mine() const { return begin + team_lane() * kQuad; }
};

// Calls body(bucket), in all teams of a warp equally often.
template <typename Body>
CGX_DEVICE void for_each_bucket(int64_t numel, int bucket_size, Body body) {
    const int64_t num_buckets = (numel + bucket_size - 1) / bucket_size;
    const int64_t stride = int64_t{gridDim.x} * kTeamsABlock;
    constexpr int kTeamsAWarp = 32 / kTeamSize;
    const int team = static_cast<int>(threadIdx.x) / kTeamSize, first_team = team / kTeamsAWarp * kTeamsAWarp;
#pragma unroll 1
    for (int64_t first = int64_t{blockIdx.x} * kTeamsABlock + first_team; first < num_buckets;
         first += stride) {
        Bucket bucket;
        bucket.index = first + team % kTeamsAWarp;
        bucket.begin = bucket.index * bucket_size;
        bucket.count =
            static_cast<int>(greater<int64_t>(0, lesser<int64_t>(numel - bucket.begin, bucket_size)));
        bucket.size = bucket_size;
        body(bucket);
    }
}

// This thread's elements of a row; those beyond the end of the bucket are 0.
struct Quad {
    float x[kQuad];
    int valid;      // how many of these elements the bucket has
    int row_count;  // how many of the row it has
};

// Four elements as one load fetches them: 16 bytes of float32, 8 of the others.
template <typename T>
struct Packed {
    uint2 words;
};
template <>
struct Packed<float> {
    float4 words;
};

CGX_DEVICE void unpack(Packed<float> packed, float* x) {
    x[0] = packed.words.x;
    x[1] = packed.words.y;
    x[2] = packed.words.z;
    x[3] = packed.words.w;
}

template <typename T>
CGX_DEVICE void unpack(Packed<T> packed, float* x) {
    x[0] = to_float(T{static_cast<uint16_t>(packed.words.x)});
    x[1] = to_float(T{static_cast<uint16_t>(packed.words.x >> 16)});
    x[2] = to_float(T{static_cast<uint16_t>(packed.words.y)});
    x[3] = to_float(T{static_cast<uint16_t>(packed.words.y >> 16)});
}

template <typename T>
CGX_DEVICE Packed<T> load_packed(const T* values) {
    return *reinterpret_cast<const Packed<T>*>(values);
}

template <typename T>
CGX_DEVICE bool is_packed(const T* values) {
    return is_aligned(values, sizeof(Packed<T>));
}

template <typename T>
CGX_DEVICE void load_some(const T* values, int valid, float* x) {
#pragma unroll
    for (int j = 0; j < kQuad; ++j) x[j] = j < valid ? to_float(values[j]) : 0.0f;
}

CGX_DEVICE void store_quad(const float* x, int valid, float* values) {
    if (valid == kQuad && is_packed(values)) {
        *reinterpret_cast<float4*>(values) = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
        if (j < valid) values[j] = x[j];
    }
}

// Calls body(row, quad) with the elements of `values` (numel,) plus those of `added` (numel,). Either may be
// null: it is not read and counts as zeros. Body may overwrite the elements that it has got.
template <int kRows = kBatch, typename T, typename Body>
CGX_DEVICE void for_each_row(const Bucket& bucket, const T* values, const float* added, Body body) {
    const int num_rows = bucket.num_rows();
    values += values == nullptr ? 0 : bucket.mine();
    added += added == nullptr ? 0 : bucket.mine();
    int row = 0;
    // The same answer in all teams of the warp.
    const bool is_whole = __all_sync(kAllLanes, bucket.count == bucket.size && bucket.size % kRow == 0);
    if (is_whole && is_packed(values) && is_packed(added)) {
        // Otherwise the compiler would unroll the loop over rows fourfold too: ten times the code, and no
        // faster.
#pragma unroll 1
        for (; row + kRows <= num_rows; row += kRows) {
            Packed<T> packed[kRows] = {};
            Quad quads[kRows];
            if (values != nullptr) {
#pragma unroll
                for (int i = 0; i < kRows; ++i) packed[i] = load_packed(values + (row + i) * kRow);
            }
            if (added != nullptr) {
                Packed<float> other[kRows];
#pragma unroll
                for (int i = 0; i < kRows; ++i) other[i] = load_packed(added + (row + i) * kRow);
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    float y[kQuad];
                    unpack(packed[i], quads[i].x);
                    unpack(other[i], y);
#pragma unroll
                    for (int j = 0; j < kQuad; ++j) quads[i].x[j] += y[j];
                }
            } else {
#pragma unroll
                for (int i = 0; i < kRows; ++i) unpack(packed[i], quads[i].x);
            }
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                quads[i].valid = kQuad;
                quads[i].row_count = kRow;
                body(row + i, quads[i]);
            }
        }
    }
#pragma unroll 1
    for (; row < num_rows; ++row) {
        Quad quad;
        quad.row_count = bucket.row_count(row);
        quad.valid = greater(0, lesser(quad.row_count - team_lane() * kQuad, kQuad));
        load_some(values + row * kRow, values == nullptr ? 0 : quad.valid, quad.x);
        if (added != nullptr) {
            float y[kQuad];
            load_some(added + row * kRow, quad.valid, y);
#pragma unroll
            for (int j = 0; j < kQuad; ++j) quad.x[j] += y[j];
        }
        body(row, quad);
    }
}

// grad, residual, next (numel,); residual and next may be null, and may be the same memory.
template <typename T>
struct Input {
    const T* grad;
    const float* residual;
    float* next;
    int64_t numel;
};

// for_each_row of the error-fed gradient.
template <int kRows = kBatch, typename T, typename Body>
CGX_DEVICE void for_each_fed(const Bucket& bucket, const Input<T>& input, Body body) {
    for_each_row<kRows>(bucket, input.grad, input.residual, body);
}

// Combines `value` over the team. combine(a, b) is commutative, so all threads get the same result.
template <typename T, typename Combine>
CGX_DEVICE T over_team(T value, Combine combine) {
#pragma unroll
    for (int distance = kTeamSize / 2; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(kAllLanes, value, distance, kTeamSize));
    }
    return value;
}

// The sum of a bucket in the order of reference/: 32 lanes, each from its first row on, then halved.
struct LaneSum {
    // Minus zero: adding it to a first element changes nothing, not even another minus zero.
    float lanes[kQuad] = {-0.0f, -0.0f, -0.0f, -0.0f};

    CGX_DEVICE float total() const {
        float sum[kQuad];
#pragma unroll
        for (int j = 0; j < kQuad; ++j) sum[j] = over_team(lanes[j], [](float a, float b) { return a + b; });
        return (sum[0] + sum[2]) + (sum[1] + sum[3]);
    }
};

// Writes the low `num_bytes` of `word`, at most 4.
CGX_DEVICE void store_bytes(uint8_t* out, uint32_t word, int num_bytes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i < num_bytes) out[i] = static_cast<uint8_t>(word >> 8 * i);
    }
}

CGX_DEVICE uint32_t load_bytes(const uint8_t* in, int num_bytes) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i < num_bytes) word |= static_cast<uint32_t>(in[i]) << 8 * i;
    }
    return word;
}

CGX_DEVICE void store_word(uint8_t* out, uint32_t word) {
    if (is_aligned(out, 4)) {
        *reinterpret_cast<uint32_t*>(out) = word;
    } else {
        store_bytes(out, word, 4);
    }
}

CGX_DEVICE uint32_t load_word(const uint8_t* in) {
    return is_aligned(in, 4) ? *reinterpret_cast<const uint32_t*>(in) : load_bytes(in, 4);
}

// The levels of a whole row are kBits words on the wire. Each thread has a piece of them: its four levels.
template <int kBits>
struct Levels {
    static constexpr int kPiece = kQuad * kBits;  // bits

    // Every bucket starts at a full byte, also if buckets are not made of whole rows.
    static CGX_DEVICE int64_t first_byte(const Bucket& bucket) { return bucket.begin / 8 * kBits; }
    static CGX_DEVICE int row_bytes(int row) { return row * (kRow / 8 * kBits); }
    static CGX_DEVICE int num_bytes(int count) { return (count * kBits + 7) / 8; }

    // For every thread of the warp. Bits after the last level have to be zero.
    static CGX_DEVICE void store(uint8_t* row, int count, uint32_t piece) {
        const int lane = team_lane();
        uint32_t word = 0;
        int index = lane;
        bool writes = lane < kBits;
        if constexpr (32 % kPiece == 0) {
            // Whole pieces make a word, and the first of its threads writes it.
            constexpr int kThreads = 32 / kPiece;
            word = piece << lane % kThreads * kPiece;
#pragma unroll
            for (int distance = 1; distance < kThreads; distance *= 2) {
                word |= __shfl_xor_sync(kAllLanes, word, distance, kTeamSize);
            }
            index = lane / kThreads;
            writes = lane % kThreads == 0;
        } else {
            // Thread w collects word w.
            constexpr int kPieces = kBits == 3 ? 4 : kBits == 5 ? 3 : 2;  // most pieces that a word touches
            const int first = 8 * lane / kBits;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const uint32_t other = __shfl_sync(kAllLanes, piece, first + i, kTeamSize);
                const int shift = (first + i) * kPiece - 32 * lane;
                if (first + i < kTeamSize && shift < 32) word |= shift < 0 ? other >> -shift : other << shift;
            }
        }
        if (!writes) return;
        if (count == kRow) {
            store_word(row + 4 * index, word);
        } else {
            store_bytes(row + 4 * index, word, num_bytes(count) - 4 * index);
        }
    }

    // Bits after the last level are undefined.
    static CGX_DEVICE uint32_t load(const uint8_t* row, int count) {
        const int bit = team_lane() * kPiece;
        if (count == kRow && is_aligned(row, 4)) {
            const uint32_t* words = reinterpret_cast<const uint32_t*>(row) + bit / 32;
            const int shift = bit % 32;
            uint32_t piece = words[0] >> shift;
            if (32 % kPiece != 0 && shift + kPiece > 32) piece |= words[1] << (32 - shift);
            return piece;
        }
        const int last = lesser(num_bytes(count), (bit + kPiece + 7) / 8);
        return load_bytes(row + bit / 8, last - bit / 8) >> bit % 8;
    }
};

}  // namespace cgx

// How CUDA threads share buckets: a team of 8 threads takes a bucket, row by row.
//
// A row is 32 elements, 4 per thread, so the team reads 128 bytes of float32 at once, and thread t has the
// elements of lanes 4t to 4t + 3 in the sums that reference/ defines: a thread adds rows without asking a
// neighbour. The four teams of a warp walk together, since they shuffle together; a team beyond the last
// bucket gets a bucket without elements.
//
// A bucket is read once for its grid or means and once more for its levels. The second time it is in the L1
// cache, where the 4 buckets of 128 elements of all warps take 48 KiB of 256.
#pragma once

#include "portable.h"

namespace cgx {

constexpr int kBlockSize = 256;
// 3 blocks are 24 of 64 warps and leave 80 registers per thread: on an H100 more loads in flight in each
// thread are worth more than the 32 warps of 4 blocks.
constexpr int kBlocksAMultiprocessor = 3;
constexpr int kTeamSize = 8;
constexpr int kTeamsABlock = kBlockSize / kTeamSize;
constexpr int kQuad = 4;  // elements of a thread in a row
constexpr int kRow = kTeamSize * kQuad;
// Rows that are loaded before the first is used: 24 warps times 4 loads of 16 bytes per thread are 48 KiB in
// flight per multiprocessor; 4.8 TB/s at 700 ns need 26 KiB.
constexpr int kBatch = 4;
// The same for passes that find their rows in the L1 cache.
constexpr int kReread = 2;
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
    int index;
    int64_t begin;  // its first element
    int count;      // its elements
    int size;       // elements of a full bucket

    // Where it begins in an array with `num_bytes` of each bucket.
    CGX_DEVICE int64_t at(int num_bytes) const { return int64_t{num_bytes} * index; }
    CGX_DEVICE int num_rows() const { return (size + kRow - 1) / kRow; }
    CGX_DEVICE int row_count(int row) const { return greater(0, lesser(count - row * kRow, kRow)); }
    // This thread's elements of the first row start here; those of row r are r * kRow further on.
    CGX_DEVICE int64_t mine() const { return begin + team_lane() * kQuad; }
};

// Calls body(bucket), in all teams of a warp equally often. Of `num_blocks` blocks this is number `block`.
template <typename Body>
CGX_DEVICE void for_each_bucket(int64_t numel, int bucket_size, unsigned block, unsigned num_blocks,
                                Body body) {
    // A bucket has 4 bytes of payload or more, and a payload less than 4 GiB.
    const int num_buckets = static_cast<int>((numel + bucket_size - 1) / bucket_size);
    const int stride = static_cast<int>(num_blocks * kTeamsABlock);
    constexpr int kTeamsAWarp = 32 / kTeamSize;
    const int team = static_cast<int>(threadIdx.x) / kTeamSize, first_team = team / kTeamsAWarp * kTeamsAWarp;
#pragma unroll 1
    for (int first = static_cast<int>(block * kTeamsABlock) + first_team; first < num_buckets;
         first += stride) {
        Bucket bucket;
        bucket.index = first + team % kTeamsAWarp;
        bucket.begin = int64_t{bucket.index} * bucket_size;
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
    // The row has kRow elements, known without a look at row_count. Of a minimum NVRTC 13.0 for sm_90 asks
    // "is it kRow?" wrongly: with min.relu's own predicate, which says yes of 8.
    bool is_whole;
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

// Sets x (kQuad,) to the elements of `values` that are those of `quad`.
CGX_DEVICE void load_like(const Quad& quad, const float* values, float* x) {
    if (quad.is_whole && is_packed(values)) {
        unpack(load_packed(values), x);
    } else {
        load_some(values, quad.valid, x);
    }
}

CGX_DEVICE void store_quad(const Quad& quad, float* values) {
    const float* x = quad.x;
    if (quad.is_whole && is_packed(values)) {
        *reinterpret_cast<float4*>(values) = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
        if (j < quad.valid) values[j] = x[j];
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
                quads[i].is_whole = true;
                body(row + i, quads[i]);
            }
        }
    }
#pragma unroll 1
    for (; row < num_rows; ++row) {
        Quad quad;
        quad.row_count = bucket.row_count(row);
        quad.valid = greater(0, lesser(quad.row_count - team_lane() * kQuad, kQuad));
        quad.is_whole = false;
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

// Parts of a gradient that are coded in one launch, with as many blocks for each. A part has elements
// [start, start + numel) of the gradient and of its memory, and its payload begins at byte `payload`.
constexpr int kMaxRows = 32;
struct Row {
    int64_t start;
    int64_t numel;
    int64_t payload;
    uint32_t key;
};
struct Rows {
    Row rows[kMaxRows];
    int32_t count;

    CGX_DEVICE const Row& mine() const { return rows[blockIdx.x % count]; }
};
// As Python passes it.
static_assert(sizeof(Rows) == kMaxRows * 32 + 8);

// Calls body(bucket) for the buckets of this block's part.
template <typename Body>
CGX_DEVICE void for_each_bucket(const Rows& rows, int bucket_size, Body body) {
    for_each_bucket(rows.mine().numel, bucket_size, blockIdx.x / rows.count, gridDim.x / rows.count, body);
}

template <typename T>
CGX_DEVICE T* offset(T* pointer, int64_t distance) {
    return pointer == nullptr ? nullptr : pointer + distance;
}

// grad, residual, next (numel,); residual and next may be null, and may be the same memory.
template <typename T>
struct Input {
    const T* grad;
    const float* residual;
    float* next;
    int64_t numel;

    // Returns what `next` gets of an element of which the encoding drops `dropped`.
    CGX_DEVICE float left(float dropped) const { return dropped; }
};

// The messages of other ranks: `count` payloads of as many elements, `pitch` bytes apart.
struct Payloads {
    const uint8_t* first;
    int64_t pitch;
    int count;
};

// The average of `num_ranks` gradients: `grad`, and those of the others in `payloads`. Residual and next are
// in units of the sum. open(payload, bucket) returns what `decode_bucket` takes.
template <typename Open>
struct Average : Input<float> {
    Payloads payloads;
    int num_ranks;
    Open open;

    CGX_DEVICE float left(float dropped) const { return dropped * static_cast<float>(num_ranks); }
};

template <typename T>
CGX_DEVICE Input<T> part_of(const Input<T>& input, const Row& part) {
    return {input.grad + part.start, offset(input.residual, part.start), offset(input.next, part.start),
            part.numel};
}

// for_each_row of the error-fed gradient.
template <int kRows = kBatch, typename T, typename Body>
CGX_DEVICE void for_each_fed(const Bucket& bucket, const Input<T>& input, Body body) {
    for_each_row<kRows>(bucket, input.grad, input.residual, body);
}

// The same of the average, which is summed anew in each pass: no memory holds it.
template <int kRows = kBatch, typename Open, typename Body>
CGX_DEVICE void for_each_fed(const Bucket& bucket, const Average<Open>& input, Body body) {
    for_each_row<1>(bucket, input.grad, nullptr, [&](int row, Quad& quad) {
        float x[kQuad];
#pragma unroll 1
        for (int i = 0; i < input.payloads.count; ++i) {
            const uint8_t* payload = input.payloads.first + i * input.payloads.pitch;
            input.open(payload, bucket).decode(row, quad, x);
#pragma unroll
            for (int j = 0; j < kQuad; ++j) quad.x[j] += x[j];
        }
        const float num_ranks = static_cast<float>(input.num_ranks);
#pragma unroll
        for (int j = 0; j < kQuad; ++j) quad.x[j] = j < quad.valid ? quad.x[j] / num_ranks : 0.0f;
        if (input.residual != nullptr) {
            load_like(quad, input.residual + bucket.mine() + row * kRow, x);
            const float inverse = 1.0f / num_ranks;
#pragma unroll
            for (int j = 0; j < kQuad; ++j) quad.x[j] = fmaf(inverse, x[j], quad.x[j]);
        }
        body(row, quad);
    });
}

// Writes the bucket's elements to `out` (numel,), or adds them. encoded.decode(row, quad, x) sets x (kQuad,)
// to the elements that are those of `quad`.
template <typename Encoded>
CGX_DEVICE void decode_bucket(const Bucket& bucket, float* out, bool add, const Encoded& encoded) {
    for_each_row(bucket, add ? out : nullptr, nullptr, [&](int row, Quad& quad) {
        float x[kQuad];
        encoded.decode(row, quad, x);
#pragma unroll
        for (int j = 0; j < kQuad; ++j) quad.x[j] = add ? quad.x[j] + x[j] : x[j];
        store_quad(quad, out + bucket.mine() + row * kRow);
    });
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
    static CGX_DEVICE void store(uint8_t* row, const Quad& quad, uint32_t piece) {
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
        if (quad.is_whole) {
            store_word(row + 4 * index, word);
        } else {
            store_bytes(row + 4 * index, word, num_bytes(quad.row_count) - 4 * index);
        }
    }

    // Bits after the last level are undefined.
    static CGX_DEVICE uint32_t load(const uint8_t* row, const Quad& quad) {
        const int bit = team_lane() * kPiece;
        if (quad.is_whole && is_aligned(row, 4)) {
            const uint32_t* words = reinterpret_cast<const uint32_t*>(row) + bit / 32;
            const int shift = bit % 32;
            uint32_t piece = words[0] >> shift;
            if (32 % kPiece != 0 && shift + kPiece > 32) piece |= words[1] << (32 - shift);
            return piece;
        }
        const int last = lesser(num_bytes(quad.row_count), (bit + kPiece + 7) / 8);
        return load_bytes(row + bit / 8, last - bit / 8) >> bit % 8;
    }
};

}  // namespace cgx

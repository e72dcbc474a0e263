// CPU kernels. Callers have checked sizes. Buffers may be unaligned, except that floats sit on float
// boundaries. `residual` is what earlier steps did not send; it is added to the gradient first. `next` is
// overwritten with what this step does not send. Either may be null, and both may be the same memory.
#pragma once

#include <cstdint>
#include <vector>

#include "multiversion.h"

namespace cgx {

// grad, residual, next (numel,)
struct Input {
    const float* grad;
    const float* residual;
    float* next;
    int64_t numel;
};

// data (num_bytes,)
uint32_t crc32c(const uint8_t* data, int64_t num_bytes, uint32_t seed);

// out (payload bytes,); grid is a Grid kind of qsgd.h
void qsgd_encode(Input input, uint8_t* out, int bits, int64_t bucket_size, int grid, uint32_t key,
                 bool stochastic, int num_threads);

// payload (payload bytes,), out (numel,)
void qsgd_decode(const uint8_t* payload, float* out, int64_t numel, int bits, int64_t bucket_size, int grid,
                 bool add, int num_threads);

// out (payload bytes,); kind is one of sign.h
void sign_encode(Input input, uint8_t* out, int64_t bucket_size, int kind, int num_threads);

// payload (payload bytes,), out (numel,)
void sign_decode(const uint8_t* payload, float* out, int64_t numel, int64_t bucket_size, int kind, bool add,
                 int num_threads);

// grad (numel,). NaN if any element is NaN or Inf, else 0, which is -0 if all signs are minus.
float poison(const float* grad, int64_t numel, int num_threads);

// DGC's momentum correction: next_momentum = factor * momentum + scale * grad, next = residual +
// next_momentum. All (numel,); residual may be null.
void add_momentum(const float* grad, const float* momentum, const float* residual, float* next_momentum,
                  float* next, int64_t numel, float factor, float scale, int num_threads);

// Where layers end in the gradient, and their elements among the kept ones: elements and kept
// (num_layers,), ascending, up to numel and num_kept. num_layers 0 is one layer.
struct LayerEnds {
    const int64_t* elements;
    const int64_t* kept;
    int64_t num_layers;
};

// index and value (num_kept,)
void topk_select(Input input, LayerEnds ends, int32_t* index, float* value, int64_t num_kept,
                 int num_threads);

// payload (4 + index bytes + 4 * num_kept,), index and value (num_kept,), which are overwritten too
void topk_encode(Input input, LayerEnds ends, uint8_t* payload, int32_t* index, float* value,
                 int64_t num_kept, int num_threads);

// counts (4096,)
void magnitude_histogram(const float* grad, int64_t numel, int64_t* counts, int num_threads);

// thresholds (2,): sure, maybe
void bisect_thresholds(const float* grad, int64_t numel, int64_t num_kept, int num_rounds,
                       int64_t* thresholds, int num_threads);

// thresholds (2,): kNever, and the magnitude of the rank-th largest element, but 1 at least
void rank_thresholds(const float* grad, int64_t numel, int64_t rank, int64_t* thresholds, int num_threads);

// thresholds (2,): kNever, and the fitted magnitude
void sidco_thresholds(const float* grad, int64_t numel, const std::vector<double>& ratios, int64_t num_kept,
                      int64_t* thresholds, int num_threads);

// thresholds (2,), index and value (num_kept,), count (1,)
void collect(const float* grad, int64_t numel, const int64_t* thresholds, uint32_t key, int32_t* index,
             float* value, int64_t num_kept, int32_t* count, int num_threads);

// index (num_kept,)
void random_indices(int64_t numel, uint32_t key, int32_t* index, int64_t num_kept);

// index (num_kept,), count (1,), out (index bytes,). Any count and index are allowed: the count is clamped to
// [0, num_kept], and an index outside [0, numel) loses its high bits.
void pack_indices(const int32_t* index, const int32_t* count, int64_t num_kept, int64_t numel, uint8_t* out);

// packed (index bytes,), count (1,), index (num_kept,). False unless there are `count` ascending indices
// below `numel`.
bool unpack_indices(const uint8_t* packed, const int32_t* count, int64_t num_kept, int64_t numel,
                    int32_t* index);

// index and value (num_kept,), of which the first `count` are used, count (1,), out (numel,). Any count and
// index are allowed: the count is clamped, and an index outside [0, numel) is skipped.
void scatter_add(const int32_t* index, const float* value, const int32_t* count, int64_t num_kept, float* out,
                 int64_t numel);

// Sets `out` to zero where scatter_add would add.
void scatter_zero(const int32_t* index, const int32_t* count, int64_t num_kept, float* out, int64_t numel);

// index and value (num_kept,), count (1,), payload (4 + index bytes + 4 * num_kept,): count, packed indices,
// values. Indices as in pack_indices.
void pack_message(const int32_t* index, const float* value, const int32_t* count, int64_t num_kept,
                  int64_t numel, uint8_t* payload);

// Undoes pack_message: writes the elements and zeros to out (numel,), or adds the elements. index (num_kept,)
// is overwritten. False, and `out` as before, if the message is broken.
bool unpack_message(const uint8_t* payload, int32_t* index, int64_t num_kept, float* out, int64_t numel,
                    bool add, int num_threads);

}  // namespace cgx

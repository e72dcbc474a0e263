// Collectives among the ranks of a host, piece by piece through slots of shared memory that stay in the
// cache.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shm_segment.h"

namespace cgx {

// Every rank calls the same operations in the same order, one at a time. Sums are made in the order of ranks;
// 16-bit elements are added in float32 and rounded once. Each operation throws std::runtime_error that names
// the ranks that did not come within `timeout_s`, left, or called another operation; nothing more can be
// called then.
class LocalGroup {
  public:
    enum class Type { kFloat32, kFloat64, kFloat16, kBFloat16 };
    using Bounds = std::vector<std::pair<int64_t, int64_t>>;  // (start, stop) by rank

    // names: numbers of the ranks in the run, for error messages
    LocalGroup(std::shared_ptr<Segment> segment, int rank, std::vector<int> names, double timeout_s);

    // Afterwards `values` holds the sum within this rank's bounds. The rest stays as it is.
    void reduce_scatter(void* values, Type type, const Bounds& bounds);
    // Afterwards `values` holds the values of every rank within the bounds of that rank.
    void all_gather(void* values, Type type, const Bounds& bounds);
    void all_reduce(void* values, int64_t numel, Type type);

  private:
    using Phase = Counter RankState::*;

    template <typename T>
    void reduce_scatter_of(T* values, const Bounds& bounds);
    template <typename T>
    void all_gather_of(T* values, const Bounds& bounds);
    template <typename T>
    void all_reduce_of(T* values, int64_t numel);
    template <typename CopyIn, typename Reduce, typename CopyOut>
    void run_pieces(int64_t num_pieces, CopyIn copy_in, Reduce reduce, CopyOut copy_out);

    void await_all(Phase phase, uint32_t at_least);
    void await(int peer, Phase phase, uint32_t at_least, double& deadline);
    void check_operation(uint32_t piece);
    [[noreturn]] void give_up(const std::string& why);

    const std::shared_ptr<Segment> segment_;
    const int rank_, size_;
    const std::vector<int> names_;
    const double timeout_s_;
    bool spins_;
    uint32_t num_done_ = 0;   // pieces of earlier operations
    uint64_t operation_ = 0;  // the current operation
};

}  // namespace cgx

// Splits the buckets of a message over threads, and picks the loops for the machine's instruction set.
#pragma once

#include "isa.h"
#include "threads.h"

namespace cgx {

// `Work` is an encoding or a decoding of one codec. Its loops are walk<Isa>(work, first, last), compiled for
// `Portable` here, and walk_avx2 and walk_avx512(work, first, last) in sources of their own.
template <typename Portable, typename Work>
void run_buckets(const Work& work, int num_threads) {
    parallel_for(num_threads, work.numel(), work.bucket_size, [&](int64_t first, int64_t last) {
        switch (instruction_set()) {
#if CGX_HAS_X86_LOOPS
            case InstructionSet::kAvx512:
                return walk_avx512(work, first, last);
            case InstructionSet::kAvx2:
                return walk_avx2(work, first, last);
#endif
            default:
                return walk<Portable>(work, first, last);
        }
    });
}

}  // namespace cgx
